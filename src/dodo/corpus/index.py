"""Which documents are done: a row of JSON for each, added when its file is in place.

A row that was cut short is taken off when the index is opened. Of rows for the same document the last counts.
"""

import json
import os
from pathlib import Path
from typing import Any

from dodo.errors import InputError

__all__ = ["Index"]

Row = dict[str, Any]


class Index:
    """The rows that are there, and adding to them. For one process at a time, and one thread."""

    NAME = "index.jsonl"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Row] = {}
        self._of: dict[str, str] = {}

    def __enter__(self) -> "Index":
        self._file = (self._folder / self.NAME).open("a+b")
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

    def put(self, document: str, key: str, made: Row | None) -> Row:
        """The row of a document, written if it is not the one that counts. made: None if its file was there."""
        known = self._done[key] if made is None else made
        row = {**known, "document": document, "file": f"{key}.nuggets"}
        if self._of.get(document) != key or (made is not None and self._done[key]["bytes"] != made["bytes"]):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        self._done[key], self._of[document] = row, key
        return row

    def _read(self) -> None:
        whole = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                key = row["file"].removesuffix(".nuggets")
            except (ValueError, KeyError, TypeError, AttributeError):
                path = self._folder / self.NAME
                raise InputError(f"{path} is not an index of compressed documents; give another folder") from None
            whole += len(line)
            self._done[key] = row
            self._of[row["document"]] = key
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
