"""Records from files and datasets: JSON lines (plain, .xz, .gz), JSON, documents, parquet, Hugging Face ids; one dictionary each.

Nothing is held in memory but the record at hand, of a JSON file all. A text, HTML, PDF or Word file is one record.
"""

import glob
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dodo.data.extraction import SUFFIXES, extract
from dodo.errors import InputError, first_line
from dodo.prompts import check_whole

__all__ = [
    "NON_COMMERCIAL",
    "answers_field",
    "naming",
    "permits_commercial_use",
    "read_all",
    "read_each",
    "read_records",
    "read_texts",
    "resolve",
    "text_field",
]

Record = dict[str, Any]

NON_COMMERCIAL = ("nc", "non commercial", "noncommercial", "research only", "for research")
"""Words of licences, in lower case and with spaces between, under which weights for everybody may not be trained."""


def permits_commercial_use(record: Record) -> bool:
    """Whether the record's `license` (or `licence`) field has none of the words; a record without the field passes."""
    words = re.sub(r"[^a-z0-9]+", " ", str(record.get("license") or record.get("licence") or "").lower())
    return not any(f" {mark} " in f" {words} " for mark in NON_COMMERCIAL)


def resolve(sources: Sequence[str]) -> list[str]:
    """Expand patterns into sorted file names; `hf:` ids stay as they are.

    Raises:
        InputError: a pattern or name that matches nothing, or no sources at all.
    """
    if not sources:
        raise InputError("no data: give at least one file, pattern or hf: id")
    found: list[str] = []
    for source in sources:
        if source.startswith("hf:"):
            found.append(source)
            continue
        matches = [source] if Path(source).is_file() else sorted(glob.glob(source, recursive=True))  # a name may have brackets
        if not matches:
            raise InputError(f"no data file matches {source!r}")
        found += matches
    return found


def read_records(source: str, *, fields: Sequence[str] | None = None) -> Iterator[Record]:
    """Records of one file or dataset, in order.

    Args:
        source: `*.jsonl`, `*.jsonl.xz`, `*.jsonl.gz`, `*.json` (a list of records, or SQuAD's own form), `*.parquet`, `*.tokens`
            or a document of a kind in `extraction.SUFFIXES` (one record with `text`), or `hf:owner/name[:config][@split]`,
            streamed.
        fields: of a parquet file, if it has them, no others are read.

    Raises:
        InputError: unknown kind of file, one that can't be read, or a line that is no JSON object.
    """
    for record in _read_hub(source[3:]) if source.startswith("hf:") else read_each(Path(source), fields=fields):
        if isinstance(record, InputError):
            raise record
        yield record


def read_all(sources: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Records of several sources or patterns, each with where it stands: `corpus.jsonl, record 3`.

    Raises:
        InputError: see `resolve` and `read_records`.
    """
    for source in resolve(sources):
        for number, record in enumerate(read_records(source), 1):
            yield f"{source}, record {number}", record


def read_texts(sources: Sequence[str]) -> Iterator[str]:
    """The field `text` of each record of several sources or patterns.

    Raises:
        InputError: a record, which is named, has none; or see `read_all`.
    """
    for place, record in read_all(sources):
        with naming(place):
            text = text_field(record)
        yield text


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Errors about input say where it stands."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def read_each(path: Path, *, fields: Sequence[str] | None = None) -> Iterator[Record | InputError]:
    """As `read_records` of a file; a line that is no JSON object comes as the error that says so, and the next follow it.

    Raises:
        InputError: unknown kind of file, or nothing more of it can be read.
    """
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _read_parquet(path, fields)
    elif name.endswith((*SUFFIXES, ".tokens")):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror or error}") from None
        yield {"text": extract(data, path.name, str(path)), "source": str(path)}
    elif name.endswith((".jsonl", ".jsonl.xz", ".jsonl.gz")):
        yield from _read_lines(path)
    elif name.endswith(".json"):
        yield from _read_json(path)
    else:
        raise InputError(
            f"{path}: data files end in .jsonl, .jsonl.xz, .jsonl.gz, .json, .parquet, .tokens, {', '.join(SUFFIXES)}"
        )


def text_field(record: Record, name: str = "text") -> str:
    """A field that must be there and be text.

    Raises:
        InputError: it is not.
    """
    value = record.get(name)
    if name in record and not isinstance(value, str):
        raise InputError(f"a record's field {name!r} is {'null' if value is None else type(value).__name__}, not text")
    if not isinstance(value, str):
        raise InputError(f"a record has no text field {name!r}; its fields are {', '.join(sorted(record)) or 'none'}")
    check_whole(value, f"a record's field {name!r}")
    return value


def answers_field(record: Record) -> tuple[str, ...]:
    """The right answers of a question: `answers`, a list or, as SQuAD itself has them, one under `text`; or `answer`, a text.

    Raises:
        InputError: they are something else. No answers at all are none.
    """
    given = record.get("answers", record.get("answer"))
    found = given.get("text") if isinstance(given, dict) else given
    if isinstance(found, str):
        found = [found]
    if given is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(answer, str) for answer in found):
        raise InputError(f"answers are a list of texts, or {{'text': [...]}}, not {str(given)[:60]}")
    return tuple(found)


def _read_lines(path: Path) -> Iterator[Record | InputError]:
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix.lower(), open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                try:
                    record = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    yield InputError(
                        f"{path}, line {number}: not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start} of the line"
                    )
                    continue
                except (ValueError, RecursionError) as error:
                    yield InputError(f"{path}, line {number}: not JSON: {error}")
                    continue
                if isinstance(record, dict):
                    yield record
                else:
                    yield InputError(f"{path}, line {number}: a JSON object is wanted, not {type(record).__name__}")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise InputError(f"{path} can't be read: {error}") from None


def _read_json(path: Path) -> Iterator[Record | InputError]:
    try:
        whole = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}; a file of one JSON object a line ends in .jsonl") from None
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        try:
            yield from _of_squad(whole["data"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{path} has `data`, but not as SQuAD has it: {error!r}") from None
        return
    if not isinstance(whole, list):
        raise InputError(f"{path}: a list of JSON objects is wanted, or SQuAD's own form, not {type(whole).__name__}")
    for number, record in enumerate(whole, 1):
        wanted = isinstance(record, dict)
        yield record if wanted else InputError(f"{path}, entry {number}: a JSON object is wanted, not {type(record).__name__}")


def _of_squad(articles: list[Any]) -> Iterator[Record]:
    """Records of SQuAD's own files, 1.1 and 2.0: articles of paragraphs of questions."""
    for article in articles:
        title = {"title": article["title"]} if "title" in article else {}
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = [answer["text"] for answer in asked["answers"]]
                key = {"id": asked["id"]} if "id" in asked else {}
                yield {**key, **title, "context": paragraph["context"], "question": asked["question"], "answers": answers}


def _read_parquet(path: Path, fields: Sequence[str] | None) -> Iterator[Record]:
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowException
    except ImportError:
        raise InputError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        file = pq.ParquetFile(path)
        columns = list(fields) if fields is not None and set(fields) <= set(file.schema_arrow.names) else None
        for batch in file.iter_batches(batch_size=256, columns=columns):
            yield from batch.to_pylist()
    except (ArrowException, OSError, OverflowError, ValueError) as error:  # dates beyond Python's, strings that are no UTF-8
        raise InputError(f"{path} is no parquet file, or is damaged: {first_line(error)}") from None


def _read_hub(name: str) -> Iterator[Record]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(f"hf:{name}: reading from the hub needs datasets: pip install datasets") from None
    named, _, split = name.partition("@")
    identifier, _, config = named.partition(":")
    try:
        yield from load_dataset(identifier, config or None, split=split or "train", streaming=True)
    except (OSError, ValueError) as error:  # datasets' and the hub's own are among them
        raise InputError(f"hf:{name} can't be read: {first_line(error)}") from None
