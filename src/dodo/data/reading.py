"""Records from files and datasets: JSON lines (plain, .xz, .gz), text, parquet, Hugging Face ids; one dictionary each.

Nothing is held in memory but the record at hand. A text file is one document.
"""

import glob
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from dodo.errors import InputError

__all__ = ["NON_COMMERCIAL", "answers_field", "permits_commercial_use", "read_records", "resolve", "text_field"]

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
        matches = sorted(glob.glob(source, recursive=True))
        if not matches:
            raise InputError(f"no data file matches {source!r}")
        found += matches
    return found


def read_records(source: str) -> Iterator[Record]:
    """Records of one file or dataset, in order.

    Args:
        source: `*.jsonl`, `*.jsonl.xz`, `*.jsonl.gz`, `*.txt` or `*.md` (one record with `text`), `*.parquet`, or
            `hf:owner/name[:config][@split]`, streamed.

    Raises:
        InputError: unknown kind of file, or a line that is no JSON object.
    """
    if source.startswith("hf:"):
        yield from _read_hub(source[3:])
        return
    name = source.lower()
    if name.endswith(".parquet"):
        yield from _read_parquet(source)
    elif name.endswith((".txt", ".md", ".tokens")):
        try:
            yield {"text": Path(source).read_text(encoding="utf-8"), "source": source}
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is not UTF-8 text: {error.reason} at byte {error.start:,}") from None
    elif name.endswith((".jsonl", ".jsonl.xz", ".jsonl.gz")):
        yield from _read_lines(source)
    else:
        raise InputError(f"{source}: data files end in .jsonl, .jsonl.xz, .jsonl.gz, .txt, .md or .parquet")


def text_field(record: Record, name: str = "text") -> str:
    """A field that must be there and be text.

    Raises:
        InputError: it is not.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise InputError(f"a record has no text field {name!r}; its fields are {', '.join(sorted(record)) or 'none'}")
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


def _read_lines(path: str) -> Iterator[Record]:
    openers: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(Path(path).suffix, open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise InputError(f"{path}, line {number}: not JSON: {error}") from None
                if not isinstance(record, dict):
                    raise InputError(f"{path}, line {number}: a JSON object is wanted, not {type(record).__name__}")
                yield record
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise InputError(f"{path} can't be read: {error}") from None


def _read_parquet(path: str) -> Iterator[Record]:
    try:
        import pyarrow.parquet as pq
        from pyarrow import ArrowException
    except ImportError:
        raise InputError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise InputError(f"{path} is no parquet file, or is damaged: {str(error).splitlines()[0]}") from None


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
        raise InputError(f"hf:{name} can't be read: {str(error).strip().splitlines()[0]}") from None
