"""The documents of a corpus: texts, HTML, PDF and Word files, JSON lines, parquet; in a folder or a single file.

What can't be read is handed on as a failure in its place, so that the rest is read all the same.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dodo.data import extraction
from dodo.data.reading import read_each, text_field
from dodo.errors import DodoError, DodoWarning, InputError

__all__ = ["INDEX", "SUFFIXES", "Document", "Failure", "documents", "files_of", "pieces"]

SUFFIXES = (*extraction.SUFFIXES, ".jsonl", ".jsonl.xz", ".jsonl.gz", ".parquet")
INDEX = "index.jsonl"
"""In a folder that documents are compressed into, beside their nuggets."""
DOCUMENTS, CHARACTERS = 32, 8192
"""Of a piece of work: it ends with the document that makes it so large."""


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
        source: a file or a folder, read with the folders in it, also where links lead to them.
        besides: the folder that is written to. If it lies in `source` it is left out, and if it is `source`, its index is.
            Folders in `source` that were written to before are left out too.

    Returns:
        Also the folders that can't be read, and links that lead nowhere: `documents` hands them on as failures. Files of other
        kinds get a warning, except hidden ones and nuggets.

    Raises:
        InputError: there is no such file or folder, or nothing in it that can be read.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise InputError(f"there is no file or folder {source}")
    own = besides.resolve()
    others: list[Path] = []
    found = sorted(path for path in _files_in(source, own, others) if own != source.resolve() or path != source / INDEX)
    if not found:
        raise InputError(f"the folder {source} holds no documents: files that end in {', '.join(SUFFIXES)}")
    if others:
        told = f"files left out: {len(others)}, the first of them {min(others).relative_to(source).as_posix()}"
        warnings.warn(f"{told}; documents are in files that end in {', '.join(SUFFIXES)}", DodoWarning, stacklevel=3)
    return found


def _files_in(source: Path, own: Path, others: list[Path]) -> Iterator[Path]:
    """Those that hold documents; files of other kinds are put into `others`."""
    unreadable: list[OSError] = []
    seen = {source.resolve()}
    for folder, inner, names in os.walk(source, onerror=unreadable.append, followlinks=True):
        here = Path(folder)
        made = INDEX in names and any(name.endswith(".nuggets") for name in names)
        if here != source and (made or here.resolve() == own):
            inner.clear()
            continue
        inner.sort()
        for name in names:
            if name.lower().endswith(SUFFIXES) and ((here / name).is_file() or (here / name).is_symlink()):
                yield here / name
            elif not name.lower().endswith(".nuggets") and not _hidden(here.relative_to(source) / name):
                others.append(here / name)
        for name in list(inner):
            if (target := (here / name).resolve()) in seen:  # a link back, which would have no end
                inner.remove(name)
            seen.add(target)
    yield from (Path(error.filename) for error in unreadable)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def documents(files: Sequence[Path], source: Path) -> Iterator[Document | Failure]:
    """The documents of these files in order, and what can't be read as a failure. Names are within `source`."""
    for path in files:
        name = path.relative_to(source).as_posix() if path != source else path.name
        if path.is_dir():
            yield Failure(name, "this folder can't be read")
            continue
        whole = name.lower().endswith(extraction.SUFFIXES)
        number = 0
        try:
            for number, record in enumerate(read_each(path, fields=("text",)), 1):
                here = name if whole else f"{name}#{number}"
                try:
                    if isinstance(record, InputError):
                        raise record
                    yield Document(here, text_field(record))
                except InputError as error:
                    yield Failure(here, str(error))
        except DodoError as error:  # also of a package that reads such files
            yield Failure(name, str(error) if whole else f"{error}; read as far as record {number}")


def pieces(found: Iterable[Document | Failure]) -> Iterator[list[Document | Failure]]:
    """Documents and failures, in order, as many at a time as one worker takes: DOCUMENTS of them, or CHARACTERS of text."""
    piece: list[Document | Failure] = []
    characters = 0
    for one in found:
        piece.append(one)
        characters += len(one.text) if isinstance(one, Document) else 0
        if len(piece) == DOCUMENTS or characters >= CHARACTERS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece
