"""Dodo: context compression for decoder-only language models.

Names are imported when they are first used, so that `import dodo` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dodo.compressor import Compressor
    from dodo.config import DodoConfig, LoraSettings
    from dodo.errors import DodoError
    from dodo.model import Dodo
    from dodo.nuggets import Nuggets

__version__ = "0.1.0"

_HOMES = {
    "Compressor": "dodo.compressor",
    "Dodo": "dodo.model",
    "DodoConfig": "dodo.config",
    "DodoError": "dodo.errors",
    "LoraSettings": "dodo.config",
    "Nuggets": "dodo.nuggets",
}

__all__ = ["Compressor", "Dodo", "DodoConfig", "DodoError", "LoraSettings", "Nuggets", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dodo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
