"""Compress many documents into a folder, by several processes, and go on where an earlier run was cut off.

    OUT/KEY.nuggets    KEY is a hash of the text, the model and the settings: equal documents share a file
    OUT/index.jsonl    a row for each document that is done; of rows for the same document the last counts

A file is moved into place when it is whole, and its row follows. So a document without a row, or without the file that the row
speaks of, is not done: whatever a run is killed at, the next one does what is missing and no more.
"""

import hashlib
import json
import multiprocessing
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from dodo.corpus.documents import Document, Failure, documents, files_of
from dodo.corpus.index import Index
from dodo.errors import DodoError, DodoWarning, InputError

if TYPE_CHECKING:
    from dodo.model import Dodo

__all__ = ["Report", "Settings", "compress_corpus"]

_AHEAD = 4
"""Documents that are read ahead, for each worker."""


@dataclass(frozen=True)
class Settings:
    """How documents are compressed.

    model, device, dtype: as `Dodo.from_pretrained` takes them; dtype by name.
    ratio: tokens per nugget; or nuggets: their number; neither: the model's own ratio.
    storage: type of keys and values in the files; None keeps the model's.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    ratio: float | None = None
    nuggets: int | None = None
    storage: Any = None


@dataclass
class Report:
    """What a run did. rows: of the documents that are done, in the order of the corpus; skipped: how many were done before."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: int = 0
    failures: list[Failure] = field(default_factory=list)


def compress_corpus(
    source: Path,
    out: Path,
    settings: Settings,
    *,
    workers: int = 1,
    initializer: Callable[[], None] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Compress every document of a file or folder.

    Args:
        source: a folder, or one file of a kind in `documents.SUFFIXES`.
        out: a folder, made if it is not there; may lie inside `source`.
        settings: how.
        workers: processes, each with a model of its own; 1: this process.
        initializer: called in each process first; picklable.
        progress: told how many documents are done or have failed.

    Returns:
        A report. Documents that can't be read or compressed are in it, and stop nothing.

    Raises:
        InputError: no such source, nothing in it, or no such model.
        DodoError: another run is writing to `out`, a file can't be written, or a worker died; what is done stays done.
    """
    files = files_of(source, besides=out)
    report = Report()
    with _held(out), _executor(workers, initializer) as executor, Index(out) as index:
        threads = None if workers == 1 else max(1, (os.cpu_count() or 1) // workers)
        model: str = executor.submit(_fingerprint, settings, threads).result()
        waiting: deque[tuple[Document | Failure, str, Future[dict[str, Any]] | None]] = deque()
        running: dict[str, Future[dict[str, Any]]] = {}

        def finish() -> None:
            document, key, future = waiting.popleft()
            running.pop(key, None)
            if isinstance(document, Failure):
                report.failures.append(document)
            else:
                try:
                    made = None if future is None else future.result()
                    report.rows.append(index.put(document.name, key, made))
                    report.skipped += future is None
                except InputError as error:
                    report.failures.append(Failure(document.name, str(error)))
            progress(len(report.rows) + len(report.failures))

        for document in documents(files, source):
            if isinstance(document, Failure):
                waiting.append((document, "", None))
            else:
                key = _key(document.text, model, settings)
                if not index.has(key) and key not in running:
                    running[key] = executor.submit(_compress, settings, threads, document.text, out / f"{key}.nuggets")
                waiting.append((document, key, running.get(key)))
            while len(waiting) > _AHEAD * workers:
                finish()
        while waiting:
            finish()
    return report


# -- in a worker


@lru_cache(maxsize=1)
def _model(settings: Settings, threads: int | None) -> "Dodo":
    import torch

    from dodo.model import Dodo

    if threads is not None:
        torch.set_num_threads(threads)
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return Dodo.from_pretrained(settings.model, device=settings.device, dtype=dtype)


def _fingerprint(settings: Settings, threads: int | None) -> str:
    dodo = _model(settings, threads)
    return json.dumps([asdict(dodo.fingerprint), str(dodo.compressor.config)])


def _compress(settings: Settings, threads: int | None, text: str, path: Path) -> dict[str, Any]:
    dodo = _model(settings, threads)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", DodoWarning)
        made = dodo.compress(text, ratio=settings.ratio, nuggets=settings.nuggets)
    made.save(path, storage=settings.storage)
    return {
        "n": int(made.lengths),
        "k": int(made.k),
        "states": int(made.states),
        "ratio": made.achieved_ratio,
        "bytes": path.stat().st_size,
        **asdict(made.fingerprint),
        "warnings": [str(one.message) for one in heard if issubclass(one.category, DodoWarning)],
    }


def _start(initializer: Callable[[], None] | None) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


# -- in the parent


def _key(text: str, model: str, settings: Settings) -> str:
    telling = [text, model, settings.ratio, settings.nuggets, settings.storage, settings.dtype]
    return hashlib.sha256(json.dumps(telling).encode()).hexdigest()


@contextmanager
def _held(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock", blocking=False):
            for left in out.glob(".*.nuggets.*.part"):
                left.unlink(missing_ok=True)
            yield
    except Timeout:
        raise DodoError(f"another run is writing to {out}; wait for it, or give another folder") from None


@contextmanager
def _executor(workers: int, initializer: Callable[[], None] | None) -> Iterator[Executor]:
    if workers == 1:
        executor: Executor = ThreadPoolExecutor(1, initializer=initializer)
    else:
        spawn = multiprocessing.get_context("spawn")  # a forked torch may hang
        executor = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start, initargs=(initializer,))
    try:
        yield executor
    except BrokenExecutor:
        raise DodoError("a worker died, perhaps for want of memory; run the same again with fewer workers: it goes on") from None
    finally:
        executor.shutdown(cancel_futures=True)
        _model.cache_clear()
