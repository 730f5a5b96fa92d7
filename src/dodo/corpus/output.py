"""The folder that a corpus is compressed into, and what a run did there.

    OUT/KEY.nuggets    KEY is a hash of the text, the model and the settings: equal documents share a file
    OUT/index.jsonl    a row for each document that is done; of rows for the same document the last counts

A file is moved into place when it is whole, and its row follows. So a document without a row, or without the file that the row
speaks of, is not done: whatever a run is killed at, the next one does what is missing and no more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dodo.corpus.documents import Failure
from dodo.corpus.index import Index
from dodo.errors import DodoError

__all__ = ["Report", "opened"]


@dataclass
class Report:
    """What a run did. rows: of the documents that are done, in the order of the corpus; skipped: how many were done before."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    failures: list[Failure] = field(default_factory=list)
    _made: set[str] = field(default_factory=set)

    @property
    def done(self) -> int:
        """How many documents are done or have failed."""
        return len(self.rows) + len(self.failures)

    def take(self, found: dict[str, Any], index: Index, source: Path) -> None:
        """Note what came of a document, and write its row.

        Args:
            found: `document`, its name; `key`; and `made`, `error` or `stop`, see `work.Outcome`. `made` is None if its file was
                there.
            index, source: see `Index.put`.

        Raises:
            DodoError: its file could not be written.
        """
        if "stop" in found:
            raise DodoError(found["stop"])
        if "error" in found:
            self.failures.append(Failure(found["document"], found["error"]))
            return
        if found["made"] is not None:
            self._made.add(found["key"])
        self.skipped += found["key"] not in self._made  # the same text again, in this run, was not there before
        self.rows.append(index.put(found["document"], found["key"], found["made"], source=source))


@contextmanager
def opened(out: Path) -> Iterator[Index]:
    """The folder's index, for one run at a time; the folder is made if it is not there.

    Raises:
        DodoError: another run has it.
        InputError: the index is not one.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock", blocking=False):
            for left in out.glob(".*.nuggets.*.part"):
                left.unlink(missing_ok=True)
            with Index(out) as index:
                yield index
    except Timeout:
        raise DodoError(f"another run is writing to {out}; wait for it, or give another folder") from None
