"""What is done with documents, in whichever process: their keys, their nuggets in files, and what their rows say.

Short texts are compressed several in a pass: on a GPU it takes as long for one of them as for many.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dodo.errors import DodoError, DodoWarning, InputError, is_out_of_memory
from dodo.loading import Loading

if TYPE_CHECKING:
    from dodo.model import Dodo
    from dodo.nuggets import Nuggets

__all__ = ["Outcome", "Settings", "compress", "file_of", "fingerprint", "forget", "key_of"]

TOKENS = 2048
"""Of a batch, padding too. More would gain little: by then a file takes longer to write than its share of a pass."""
PADDING = 0.2
"""The largest share of a batch that is padding."""

Outcome = dict[str, Any]
"""Of a text: `made`, what its row says; `error`, why it can't be compressed; or `stop`, why no file can be written."""


@dataclass(frozen=True)
class Settings:
    """How documents are compressed.

    loading: of the model.
    ratio: tokens per nugget; or nuggets: their number; neither: the model's own ratio.
    use: what they are compressed for.
    storage: type of keys and values in the files; None keeps the model's.
    """

    loading: Loading
    ratio: float | None = None
    nuggets: int | None = None
    use: Literal["questions", "text"] = "questions"
    storage: Any = None


def key_of(text: str, model: str, settings: Settings) -> str:
    """A hash of the text, the model's `fingerprint` and the settings."""
    telling = [text, model, settings.ratio, settings.nuggets, settings.storage, settings.loading.dtype]
    telling += [] if settings.use == "questions" else [settings.use]
    telling += [quantized] if (quantized := settings.loading.quantization) else []
    return hashlib.sha256(json.dumps(telling).encode()).hexdigest()


def file_of(out: Path, key: str) -> Path:
    """Where the nuggets of a key stand."""
    return out / f"{key}.nuggets"


def fingerprint(settings: Settings, threads: int | None) -> str:
    """What tells the model from others, and its own ratio where that one counts. Loads it.

    Args:
        settings: which.
        threads: of torch, in this process; None leaves them.
    """
    dodo = _model(settings, threads)
    own = None if settings.ratio or settings.nuggets else dodo.compressor.config.ratio
    return json.dumps([asdict(dodo.fingerprint), own])


def compress(settings: Settings, threads: int | None, texts: Mapping[str, str], out: Path) -> dict[str, Outcome]:
    """Write the nuggets of texts, in batches.

    Args:
        settings: how.
        threads: see `fingerprint`.
        texts: by their keys.
        out: the folder.

    Returns:
        What came of each text, by its key. A text that can't be compressed, or not in this memory, takes no other with it. Where
        a file can't be written, that is what came of the texts behind it too.
    """
    dodo = _model(settings, threads)
    found: dict[str, Outcome] = {}
    rows: dict[str, list[int]] = {}
    for key, text in texts.items():
        try:
            rows[key] = dodo.document_ids(text)
        except InputError as error:
            found[key] = {"error": str(error)}
    for batch in _batches({key: len(row) for key, row in rows.items()}, dodo.compressor.window):
        for key, made in zip(batch, _made(dodo, [rows[key] for key in batch], settings), strict=True):
            if isinstance(made, str):
                found[key] = {"error": made}
                continue
            try:
                found[key] = {"made": _written(*made, file_of(out, key), settings)}
            except InputError as error:
                found[key] = {"error": str(error)}
            except (DodoError, OSError) as error:
                return {key: {"stop": str(error)} for key in texts} | found
    return found


def _batches(lengths: Mapping[str, int], window: int) -> Iterator[list[str]]:
    """Keys of texts that are compressed in one pass, shortest first. Texts longer than the window, which would have all texts of
    their batch encoded as they are, stand alone."""
    batch: list[str] = []
    for key in sorted(lengths, key=lengths.__getitem__):
        tokens = sum(lengths[other] for other in (*batch, key))
        padded = lengths[key] * (len(batch) + 1)
        if batch and (padded > TOKENS or tokens < (1 - PADDING) * padded or lengths[key] > window):
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def _made(dodo: "Dodo", rows: list[list[int]], settings: Settings) -> "list[tuple[Nuggets, list[str]] | str]":
    """Of each row of token ids the nuggets, on the CPU, and what is to be warned of; or why there are none."""
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always", DodoWarning)
            made = dodo.compress_ids(rows, ratio=settings.ratio, nuggets=settings.nuggets, use=settings.use).to(device="cpu")
        told = [str(one.message) for one in heard if issubclass(one.category, DodoWarning)]
        singles = [made[i] for i in range(len(rows))]
        return [(one, [*told, *filter(None, [dodo.warning_of(one)])]) for one in singles]
    except (InputError, MemoryError, RuntimeError) as error:
        if len(rows) == 1:
            if is_out_of_memory(error):
                return [f"there is too little memory for its {len(rows[0]):,} tokens; split it"]
            if isinstance(error, InputError):
                return [str(error)]
            raise
    return [_made(dodo, [row], settings)[0] for row in rows]  # out of the handler, which holds on to what the batch took


def _written(made: "Nuggets", told: list[str], path: Path, settings: Settings) -> dict[str, Any]:
    """What the row of a document says of its file."""
    made.save(path, storage=settings.storage)
    return {
        "n": int(made.lengths),
        "k": int(made.k),
        "states": int(made.states),
        "ratio": made.achieved_ratio,
        "bytes": path.stat().st_size,
        **asdict(made.fingerprint),
        "warnings": told,
    }


def forget() -> None:
    """Let go of the model."""
    _model.cache_clear()


@lru_cache(maxsize=1)
def _model(settings: Settings, threads: int | None) -> "Dodo":
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return settings.loading.load()
