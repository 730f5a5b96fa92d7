"""The documents of a corpus: texts, JSON lines, parquet; in a folder or a single file.

What can't be read is handed on as a failure in its place, so that the rest is read all the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dodo.data.reading import read_records, text_field
from dodo.errors import InputError

__all__ = ["SUFFIXES", "Document", "Failure", "documents", "files_of"]

SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.xz", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Document:
    """A text, and where it is from: a file of the corpus, or a record of one ("papers.jsonl#3")."""

    name: str
    text: str


@dataclass(frozen=True)
class Failure:
    """A document, or a file, that could not be compressed or read."""

    name: str
    error: str


def files_of(source: Path, *, besides: Path) -> list[Path]:
    """The file itself, or the files of a folder that hold documents, in the order of their names.

    Args:
        source: a file or a folder, read with the folders in it.
        besides: the folder that is written to. If it lies in `source` it is left out, and if it is `source`, its index is.

    Raises:
        InputError: there is no such file or folder, or nothing in it that can be read.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise InputError(f"there is no file or folder {source}")
    found = sorted(path for path in source.rglob("*") if path.name.lower().endswith(SUFFIXES) and path.is_file())
    here, own = source.resolve(), besides.resolve()
    if own == here:
        found = [path for path in found if path != source / "index.jsonl"]
    elif own.is_relative_to(here):
        found = [path for path in found if not path.resolve().is_relative_to(own)]
    if not found:
        raise InputError(f"the folder {source} holds no documents: files that end in {', '.join(SUFFIXES)}")
    return found


def documents(files: Sequence[Path], source: Path) -> Iterator[Document | Failure]:
    """The documents of these files in order, and what can't be read as a failure. Names are within `source`."""
    for path in files:
        name = path.relative_to(source).as_posix() if path != source else path.name
        whole = name.lower().endswith((".txt", ".md"))
        number = 0
        try:
            for number, record in enumerate(read_records(str(path)), 1):
                here = name if whole else f"{name}#{number}"
                try:
                    yield Document(here, text_field(record))
                except InputError as error:
                    yield Failure(here, str(error))
        except (OSError, ValueError) as error:  # UnicodeDecodeError and pyarrow's own are ValueErrors
            yield Failure(name, str(error) if whole else f"{error}; read as far as record {number}")
