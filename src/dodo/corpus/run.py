"""Compress many documents into a folder, by several processes, and go on where an earlier run was cut off: see `output`."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dodo.corpus.documents import Document, Failure, documents, files_of, pieces
from dodo.corpus.output import Report, opened
from dodo.corpus.work import Outcome, Settings, compress, fingerprint, forget, key_of
from dodo.errors import DodoError

__all__ = ["compress_corpus"]

_AHEAD = 2
"""Pieces of work for each worker: one that it does, and the next one."""

_Taken = tuple[Document | Failure, str, Future[dict[str, Outcome]] | None]
"""A document, its key, and the piece of work that compresses it; None if its file is there."""


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
    with opened(out) as index, _executor(workers, initializer) as executor:
        threads = None if workers == 1 else max(1, (os.cpu_count() or 1) // workers)
        model: str = executor.submit(fingerprint, settings, threads).result()
        waiting: deque[list[_Taken]] = deque()
        running: dict[str, Future[dict[str, Outcome]]] = {}

        def finish() -> None:
            found = [_outcome(*taken) for taken in waiting.popleft()]
            for one in sorted(found, key=lambda one: "stop" in one):  # what is done stays done
                running.pop(one["key"], None)
                report.take(one, index, source)
            progress(report.done)

        for piece in pieces(documents(files, source)):
            keys = ["" if isinstance(one, Failure) else key_of(one.text, model, settings) for one in piece]
            texts = {
                key: one.text
                for one, key in zip(piece, keys, strict=True)
                if not isinstance(one, Failure) and not index.has(key) and key not in running
            }
            if texts:
                running |= dict.fromkeys(texts, executor.submit(compress, settings, threads, texts, out))
            waiting.append([(one, key, running.get(key)) for one, key in zip(piece, keys, strict=True)])
            while waiting and (len(waiting) > _AHEAD * workers or all(not at or at.done() for _, _, at in waiting[0])):
                finish()
        while waiting:
            finish()
    return report


def _outcome(document: Document | Failure, key: str, piece: Future[dict[str, Outcome]] | None) -> dict[str, Any]:
    """As `Report.take` takes it."""
    if isinstance(document, Failure):
        return {"document": document.name, "key": key, "error": document.error}
    return {"document": document.name, "key": key, **({"made": None} if piece is None else piece.result()[key])}


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
        forget()


# -- in a worker


def _start(initializer: Callable[[], None] | None) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()


def _leave_with_parent() -> None:
    """A worker whose parent was killed would wait for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
