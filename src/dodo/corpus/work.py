"""What is done with one document, in whichever process: its key, its nuggets in a file, and what its row says."""

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dodo.errors import DodoWarning, InputError, is_out_of_memory

if TYPE_CHECKING:
    from dodo.model import Dodo

__all__ = ["Settings", "compress", "file_of", "fingerprint", "forget", "key_of"]


@dataclass(frozen=True)
class Settings:
    """How documents are compressed.

    model, device, dtype: as `Dodo.from_pretrained` takes them; dtype by name.
    ratio: tokens per nugget; or nuggets: their number; neither: the model's own ratio.
    use: what they are compressed for.
    storage: type of keys and values in the files; None keeps the model's.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    ratio: float | None = None
    nuggets: int | None = None
    use: Literal["questions", "text"] = "questions"
    storage: Any = None


def key_of(text: str, model: str, settings: Settings) -> str:
    """A hash of the text, the model's `fingerprint` and the settings."""
    telling = [text, model, settings.ratio, settings.nuggets, settings.storage, settings.dtype]
    telling += [] if settings.use == "questions" else [settings.use]
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


def compress(settings: Settings, threads: int | None, text: str, path: Path) -> dict[str, Any]:
    """Write the nuggets of a text, and return what its row says of them.

    Raises:
        InputError: the text can't be compressed, or not in this memory.
        DodoError: the file can't be written.
    """
    dodo = _model(settings, threads)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", DodoWarning)
        try:
            made = dodo.compress(text, ratio=settings.ratio, nuggets=settings.nuggets, use=settings.use)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(f"there is too little memory for its {len(text):,} characters; split it") from None
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


def forget() -> None:
    """Let go of the model."""
    _model.cache_clear()


@lru_cache(maxsize=1)
def _model(settings: Settings, threads: int | None) -> "Dodo":
    import torch

    from dodo.model import Dodo

    if threads is not None:
        torch.set_num_threads(threads)
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return Dodo.from_pretrained(settings.model, device=settings.device, dtype=dtype)
