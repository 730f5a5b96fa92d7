"""Contexts kept for good: rows in SQLite, and beside them `.nuggets` files that are named after their contents.

    FOLDER/contexts.sqlite3        what there is
    FOLDER/files/SHA256.nuggets    never changed; contexts with the same contents share one
    FOLDER/incoming/TOKEN/         files that one process is writing; TOKEN.lock is held while it lives

A file is written to one side, flushed to the disk and moved into place, and then its row is committed, the last two under the
database's write lock. So whatever a process is killed at, a context that was acknowledged is whole; what it leaves behind are
files without a row, which the next one to open the store sweeps. Several processes may share a store.

With a limit on the disk, contexts that were not used for longest are deleted to make room; without one, none ever is.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from dodo.config import Use
from dodo.errors import InputError, NuggetsFileError, StoreDamaged, StoreFull, UnknownContext
from dodo.nuggets import Nuggets
from dodo.nuggets_file import StorageType
from dodo.serving.held import Held

__all__ = ["AnyStore", "Context", "Store", "full_disk_said"]

BUSY_SECONDS = 30
"""How long to wait for another process that is writing."""

USED_SECONDS = 60
"""How exactly it is known when a context was last used; finer would mean a write to the disk for each question."""

_ID = re.compile(r"ctx_[A-Za-z0-9_-]{22}")
_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS contexts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    name TEXT,
    created REAL NOT NULL,
    used REAL NOT NULL,
    n INTEGER NOT NULL,
    k INTEGER NOT NULL,
    states INTEGER NOT NULL,
    ratio REAL NOT NULL,
    bytes INTEGER NOT NULL,
    full_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    base TEXT NOT NULL,
    tokenizer TEXT NOT NULL,
    adapter TEXT NOT NULL,
    use TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS contexts_by_file ON contexts (sha256);
CREATE INDEX IF NOT EXISTS contexts_by_use ON contexts (used);
"""


@dataclass(frozen=True)
class Context:
    """What is known of a stored context.

    seq: contexts are numbered as they come.
    id: opaque, "ctx_" and 128 random bits.
    created, used: seconds since 1970; the second within a minute.
    n, k, states: tokens, nuggets, and nuggets with kept first tokens.
    ratio: tokens over states, as achieved.
    bytes, full_bytes: of the keys and values held, and of all tokens' in an ordinary cache.
    stored_bytes, sha256: of the file.
    base, tokenizer, adapter: the fingerprint.
    use: what the nuggets were chosen for; None: for all uses alike, or not known (stores of before).
    """

    seq: int
    id: str
    name: str | None
    created: float
    used: float
    n: int
    k: int
    states: int
    ratio: float
    bytes: int
    full_bytes: int
    stored_bytes: int
    sha256: str
    base: str
    tokenizer: str
    adapter: str
    use: Use | None = None


class AnyStore(Protocol):
    """What a server asks of a store, be it here or in another process. For any thread. See `Store` for each."""

    def add(self, nuggets: Nuggets, *, name: str | None = None) -> Context: ...
    def delete(self, context_id: str) -> None: ...
    def get(self, context_id: str) -> Context: ...
    def load(self, context_id: str) -> Nuggets: ...
    def read(self, context_id: str) -> bytes: ...
    def page(self, *, limit: int, after: str | None = None, ascending: bool = False) -> Sequence[Context]: ...
    def totals(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class Store:
    """A folder of contexts. For any thread; several processes may have it open.

    Args:
        folder: made if it is not there.
        memory_limit: bytes of nuggets that stay loaded, those used last.
        disk_limit: bytes of files; None: no limit, and nothing is ever deleted but by `delete`.
        storage: type of keys and values in the files; None keeps their own, so that answers are the same to the last bit.

    Raises:
        InputError: the folder can't be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        memory_limit: int = 2 * 1024**3,
        disk_limit: int | None = None,
        storage: StorageType | None = None,
    ) -> None:
        self.folder, self._disk_limit, self._storage = folder, disk_limit, storage
        self._loaded: Held[Nuggets] = Held(memory_limit)
        self._guard = threading.RLock()
        self._files, incoming = folder / "files", folder / "incoming"
        token = secrets.token_hex(8)
        self._incoming, self._alive = incoming / token, FileLock(incoming / f"{token}.lock", thread_local=False)
        try:
            for path in (self._files, incoming):
                path.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                folder / "contexts.sqlite3", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            with self._writing():
                if not any(column["name"] == "use" for column in self._db.execute("PRAGMA table_info(contexts)")):
                    self._db.execute("ALTER TABLE contexts ADD COLUMN use TEXT")
                self._sweep()
                self._alive.acquire()
                self._incoming.mkdir()
        except (OSError, sqlite3.Error) as error:
            if hasattr(self, "_db"):
                self._db.close()
            raise InputError(f"the store {folder} can't be used: {error}; give a folder that is writable") from None

    def close(self) -> None:
        """Let go of the folder."""
        with self._guard:
            self._db.close()
            shutil.rmtree(self._incoming, ignore_errors=True)
            self._alive.release()
            with suppress(FileNotFoundError):
                os.unlink(self._alive.lock_file)

    # -- adding and deleting

    def add(self, nuggets: Nuggets, *, name: str | None = None) -> Context:
        """Keep the nuggets of one text. When this returns they are on the disk, whatever happens next.

        Raises:
            StoreFull: there is no room; nothing was changed.
            InputError: several texts, or values that do not fit the storage type.
        """
        if nuggets.batch_size != 1:
            raise InputError(f"a context is one text, not {nuggets.batch_size}; take one out of its batch: nuggets[i]")
        path = self._incoming / f"{secrets.token_hex(8)}.nuggets"
        try:
            with full_disk_said("delete contexts, or make room"):
                nuggets.save(path, storage=self._storage)
                size, digest = path.stat().st_size, _digest(path)
                with self._writing():
                    self._make_room(size, digest)
                    os.replace(path, self._file(digest))
                    _flush(self._files)
                    context = self._insert(nuggets, name=name, size=size, digest=digest)
        finally:
            path.unlink(missing_ok=True)
        if self._storage is None:
            self._loaded.put(digest, nuggets, size=nuggets.nbytes)
        return context

    def delete(self, context_id: str) -> None:
        """Forget a context.

        Raises:
            UnknownContext: there is none of that id.
            StoreFull: the disk is so full that it can't be noted.
        """
        with full_disk_said("make room on it first"):
            with self._writing():
                context = self._row(context_id)
                self._db.execute("DELETE FROM contexts WHERE id = ?", (context_id,))
            with self._writing():  # on its own, so that the file goes only once the row is gone for good
                self._drop(context.sha256)

    # -- reading

    def get(self, context_id: str) -> Context:
        """What is known of a context.

        Raises:
            UnknownContext: there is none of that id.
        """
        with self._guard:
            return self._row(context_id)

    def load(self, context_id: str) -> Nuggets:
        """The nuggets of a context, on the CPU. They stay loaded while there is room.

        Raises:
            UnknownContext: there is none of that id.
            StoreDamaged: its file is not what was stored.
        """
        context = self._used(context_id)
        if (nuggets := self._loaded.get(context.sha256)) is not None:
            return nuggets
        path = self._file(context.sha256)
        try:
            if _digest(path) != context.sha256:
                raise StoreDamaged(f"the file of {context_id} is not what was stored; delete the context and add it again")
            nuggets = Nuggets.load(path)
        except (FileNotFoundError, NuggetsFileError):
            if path.exists():
                raise
            raise UnknownContext(f"there is no context {context_id}: it has just been deleted") from None
        with self._guard:
            self._loaded.put(context.sha256, nuggets, size=nuggets.nbytes)
            if not self._is_known(context.sha256):  # deleted meanwhile
                self._loaded.forget(context.sha256)
        return nuggets

    def read(self, context_id: str) -> bytes:
        """The file of a context.

        Raises:
            UnknownContext: there is none of that id.
        """
        context = self._used(context_id)
        try:
            return self._file(context.sha256).read_bytes()
        except FileNotFoundError:
            raise UnknownContext(f"there is no context {context_id}: it has just been deleted") from None

    def page(self, *, limit: int, after: str | None = None, ascending: bool = False) -> Sequence[Context]:
        """Contexts in the order in which they came, the latest first.

        Args:
            limit: at most so many.
            after: the id that the page before ended with.
            ascending: the oldest first.

        Raises:
            UnknownContext: there is none of the id `after`.
        """
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        with self._guard:
            where, values = ("", ()) if after is None else (f"WHERE seq {sign} ?", (self._row(after).seq,))
            rows = self._db.execute(f"SELECT * FROM contexts {where} ORDER BY seq {order} LIMIT ?", (*values, limit)).fetchall()
        return [Context(**row) for row in rows]

    def totals(self) -> dict[str, int]:
        """Number of contexts, bytes of their files, and bytes of nuggets that are loaded."""
        with self._guard:
            (count,) = self._db.execute("SELECT COUNT(*) FROM contexts").fetchone()
            return {"contexts": count, "disk_bytes": self._disk_bytes(), "memory_bytes": self._loaded.size}

    # -- under the guard

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction with the database's write lock, which all processes share."""
        with self._guard:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _row(self, context_id: str) -> Context:
        if _ID.fullmatch(context_id):
            row = self._db.execute("SELECT * FROM contexts WHERE id = ?", (context_id,)).fetchone()
            if row is not None:
                return Context(**row)
        raise UnknownContext(f"there is no context {context_id[:40]!r}; GET /v1/contexts lists those there are")

    def _used(self, context_id: str) -> Context:
        with self._guard:
            context = self._row(context_id)
            if time.time() - context.used > USED_SECONDS:
                with suppress(sqlite3.OperationalError):  # a full disk must not keep anyone from reading
                    self._db.execute("UPDATE contexts SET used = ? WHERE id = ?", (time.time(), context_id))
            return context

    def _insert(self, nuggets: Nuggets, *, name: str | None, size: int, digest: str) -> Context:
        now = time.time()
        values = {
            "id": f"ctx_{secrets.token_urlsafe(16)}",
            "name": name,
            "created": now,
            "used": now,
            "n": int(nuggets.lengths),
            "k": int(nuggets.k),
            "states": int(nuggets.states),
            "ratio": nuggets.achieved_ratio,
            "bytes": nuggets.nbytes,
            "full_bytes": nuggets.full_cache_nbytes,
            "stored_bytes": size,
            "sha256": digest,
            "use": nuggets.use,
            **vars(nuggets.fingerprint),
        }
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        row = self._db.execute(f"INSERT INTO contexts ({names}) VALUES ({marks}) RETURNING *", tuple(values.values())).fetchone()
        return Context(**row)

    def _make_room(self, size: int, digest: str) -> None:
        if self._disk_limit is None or self._file(digest).exists():
            return
        if size > self._disk_limit:
            raise StoreFull(f"the context takes {size:,} bytes, and the store may hold {self._disk_limit:,}; compress it more")
        while self._disk_bytes() + size > self._disk_limit:
            oldest = self._db.execute("SELECT id, sha256 FROM contexts ORDER BY used, seq LIMIT 1").fetchone()
            self._db.execute("DELETE FROM contexts WHERE id = ?", (oldest["id"],))
            # Committed by itself: were the file gone and this transaction rolled back, the row would have none.
            self._db.execute("COMMIT")
            self._db.execute("BEGIN IMMEDIATE")
            self._drop(oldest["sha256"])

    def _drop(self, digest: str) -> None:
        """Remove a file that no context has any more. A committed row is never without its file."""
        if not self._is_known(digest):
            self._file(digest).unlink(missing_ok=True)
            self._loaded.forget(digest)

    def _is_known(self, digest: str) -> bool:
        return self._db.execute("SELECT 1 FROM contexts WHERE sha256 = ?", (digest,)).fetchone() is not None

    def _disk_bytes(self) -> int:
        files = "SELECT DISTINCT sha256, stored_bytes FROM contexts"
        return int(self._db.execute(f"SELECT COALESCE(SUM(stored_bytes), 0) FROM ({files})").fetchone()[0])

    def _sweep(self) -> None:
        """Remove what processes that were killed have left."""
        known = {row["sha256"] for row in self._db.execute("SELECT DISTINCT sha256 FROM contexts")}
        for path in self._files.glob("*.nuggets"):
            if path.stem not in known:
                path.unlink(missing_ok=True)
        for path in self._incoming.parent.glob("*.lock"):
            lock = FileLock(path)
            try:
                lock.acquire(blocking=False)
            except Timeout:
                continue  # its process lives
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            lock.release()
            path.unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        return self._files / f"{digest}.nuggets"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    if os.name == "nt":  # where folders can't be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def full_disk_said(what_to_do: str) -> Iterator[None]:
    """Within it, an error that a full disk makes is a StoreFull, which says what to do."""
    try:
        yield
    except (NuggetsFileError, OSError, sqlite3.OperationalError) as error:
        if any(text in str(error) for text in (*_FULL, "disk is full")):
            raise StoreFull(f"the disk is full; nothing was changed: {what_to_do}") from None
        raise
