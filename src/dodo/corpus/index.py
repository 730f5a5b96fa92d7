"""Which documents are done: a row of JSON for each, added when its file is in place.

A row that was cut short is taken off when the index is opened. Of rows for the same document the last counts.
"""

import json
import os
from pathlib import Path
from typing import Any

from dodo.corpus.documents import INDEX
from dodo.errors import InputError

__all__ = ["Index"]

Row = dict[str, Any]
_BEGINNING = b'{"n": '
"""Of each row."""


class Index:
    """The rows that are there, and adding to them. For one process at a time, and one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Row] = {}
        self._of: dict[str, str] = {}

    def __enter__(self) -> "Index":
        self._file = (self._folder / INDEX).open("a+b")
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def has(self, key: str) -> bool:
        """Whether there are a row and a file of the size that it says."""
        if key not in self._done:
            return False
        path = self._folder / f"{key}.nuggets"
        return path.is_file() and path.stat().st_size == self._done[key]["bytes"]

    def done(self) -> frozenset[str]:
        """The keys for which there are both."""
        return frozenset(key for key in self._done if self.has(key))

    def put(self, document: str, key: str, made: Row | None, *, source: Path) -> Row:
        """The row of a document, written if it is not the one that counts.

        Args:
            document: its name in the corpus.
            key: of its file.
            made: what is told of the file; None if it was there.
            source: the corpus. A row for a document of this name from another one is followed by a row with a warning.
        """
        known = self._done[key] if made is None else made
        row = {**known, "document": document, "file": f"{key}.nuggets", "source": str(source.absolute())}
        if (last := self._of.get(document)) != key or (made is not None and self._done[key]["bytes"] != made["bytes"]):
            other = None if last in (None, key) else self._done[last].get("source")
            if other not in (None, row["source"]):
                told = f"the index had a document of this name from {other}; give each corpus a folder of its own"
                row["warnings"] = [*row["warnings"], told]
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._done[key], self._of[document] = row, key
        return row

    def _read(self) -> None:
        """All rows.

        Raises:
            InputError: there are others than ours; the file is left as it is.
        """
        whole = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                if whole == 0 and not line.startswith(_BEGINNING[: len(line)]):
                    raise self._not_ours()
                break
            try:
                row = json.loads(line)
                key, document = row["file"].removesuffix(".nuggets"), row["document"]
                if not isinstance(document, str) or not isinstance(row["bytes"], int):
                    raise TypeError
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self._not_ours() from None
            whole += len(line)
            self._done[key] = row
            self._of[document] = key
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def _not_ours(self) -> InputError:
        return InputError(f"{self._folder / INDEX} is not an index of compressed documents; give another folder")
