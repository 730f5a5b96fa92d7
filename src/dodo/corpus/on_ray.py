"""The same as `run`, on Ray: files are read by tasks, and documents compressed by actors, on any machine of a cluster.

    files -> read: a block for each piece of work -> compress: an actor with a model -> outcomes, in the order of the corpus

Ray Data moves the blocks, and reads no further ahead than they are compressed. Pieces travel as JSON, for a text may hold what
Arrow's strings may not. This process writes the index, as the rows come; files go to `out` from where they are made, so all
machines must see `source` and `out` under these names. A run that was cut off has rows for all documents up to some place, and
files beyond it, which are made again; so is a text that occurs twice in the corpus, which makes the same file.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dodo.cluster import joined
from dodo.corpus.documents import DOCUMENTS, Document, documents, files_of, pieces
from dodo.corpus.output import Report, opened
from dodo.corpus.work import Settings, compress, fingerprint, key_of
from dodo.errors import DodoError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["compress_corpus_on_ray"]

_READERS = 2
"""Files that are read at once."""


def compress_corpus_on_ray(
    source: Path,
    out: Path,
    settings: Settings,
    *,
    workers: int = 1,
    address: str | None = None,
    gpus: float = 0,
    initializer: Callable[[], None] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Compress every document of a file or folder; results and files are those of `run.compress_corpus`.

    Args:
        source, out, settings, initializer, progress: see there.
        workers: actors, each with a model and a CPU of its own.
        address: of a cluster; None: one that is started here, and ended.
        gpus: of each actor; a fraction shares one. 0: it sees none.

    Raises:
        InputError: no such source, or nothing in it; no cluster at the address.
        DodoError: no such model, Ray is not installed, another run is writing to `out`, a file can't be written, or a worker
            died; what is done stays done.
    """
    source, out = source.absolute(), out.absolute()
    settings = replace(settings, loading=settings.loading.from_anywhere())
    files = files_of(source, besides=out)
    report = Report()
    with opened(out) as index, joined(address, cpus=workers) as ray:
        data = _ray_data()
        context = data.DataContext.get_current().copy()
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        context.target_max_block_size = 1  # a block for each piece of work, so that each may go to another worker
        try:
            with data.DataContext.current(context):
                together = min(DOCUMENTS, -(-len(files) // workers))  # files that may hold one document each
                done = (
                    data.from_items([{"file": str(path)} for path in files], override_num_blocks=-(-len(files) // together))
                    .map_batches(
                        _read,
                        fn_kwargs={"source": source},
                        batch_format="pyarrow",
                        num_cpus=0,  # so that reading never waits for a CPU that all workers hold
                        compute=data.TaskPoolStrategy(size=_READERS),
                    )
                    .map_batches(
                        _Compress,
                        fn_constructor_args=(settings, out, index.done(), initializer),
                        batch_format="pyarrow",
                        num_cpus=1,
                        num_gpus=gpus or None,
                        compute=data.ActorPoolStrategy(size=workers),
                    )
                )
                for row in done.iter_rows():
                    for found in json.loads(row["piece"]):
                        report.take(found, index, source)
                    progress(report.done)
        except ray.exceptions.RayError as error:
            raise DodoError(f"a worker failed: {_reason(error)}; what is done stays done") from None
    return report


def _ray_data() -> Any:
    try:
        from ray import data
    except ImportError as error:
        raise DodoError(f"this needs {error.name}: pip install 'dodo-lm[ray]'") from None
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    return data


def _reason(error: Any) -> str:
    """What was first raised, and what may help."""
    from ray.exceptions import OutOfMemoryError, RayActorError, WorkerCrashedError

    first = error
    while (before := getattr(first, "cause", None) or first.__cause__) is not None and before is not first:
        first = before
    lines = str(first).strip().splitlines() or [""]
    died = isinstance(first, OutOfMemoryError | RayActorError | WorkerCrashedError)
    return f"{type(first).__name__}: {lines[-1]}{'; perhaps for want of memory: try fewer workers' if died else ''}"


# -- in a worker


def _read(batch: "pa.Table", *, source: Path) -> Iterator["pa.Table"]:
    """Documents and failures of files, each piece of work as a block of one row."""
    for piece in pieces(documents([Path(file) for file in batch["file"].to_pylist()], source)):
        yield _block(
            [
                {"document": one.name, **({"text": one.text} if isinstance(one, Document) else {"error": one.error})}
                for one in piece
            ]
        )


class _Compress:
    """An actor: compresses documents, a piece of work a call.

    Args:
        settings: how.
        out: where to.
        done: keys that are done.
        initializer: called first.
    """

    def __init__(self, settings: Settings, out: Path, done: frozenset[str], initializer: Callable[[], None] | None) -> None:
        self._settings, self._out, self._done = settings, out, done
        if initializer is not None:
            initializer()

    def __call__(self, batch: "pa.Table") -> Iterator["pa.Table"]:
        for piece in batch["piece"].to_pylist():
            found = self._outcomes(json.loads(piece))
            yield _block(sorted(found, key=lambda one: "stop" in one))  # what is done stays done

    def _outcomes(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What came of each document, as `Report.take` takes it."""
        try:
            model = fingerprint(self._settings, None)
            keys = [key_of(one["text"], model, self._settings) if "text" in one else "" for one in given]
            texts = {key: one["text"] for one, key in zip(given, keys, strict=True) if key and key not in self._done}
            made = compress(self._settings, None, texts, self._out)
        except (DodoError, OSError) as error:  # the model can't be loaded
            return [{"stop": str(error)}]
        return [{"made": None} | one | {"key": key} | made.get(key, {}) for one, key in zip(given, keys, strict=True)]


def _block(piece: list[dict[str, Any]]) -> "pa.Table":
    import pyarrow as pa

    return pa.table({"piece": [json.dumps(piece)]})
