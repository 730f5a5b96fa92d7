"""Which model is loaded and how, in words that flags, settings files and other processes share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dodo.base import Quantization
    from dodo.model import Dodo
    from dodo.pull import Progress

__all__ = ["Loading"]


@dataclass(frozen=True)
class Loading:
    """What `Dodo.from_pretrained` is told.

    model: adapters (folder or hub id), or a base: alias, folder, `.gguf` file or hub id.
    base: the base, in place of the one that the adapters name; None leaves it to them.
    device: where to compute; None: a GPU if there is one.
    dtype: of the base's weights in memory, by name; "auto" as for `load_base`.
    quantization: "4bit" or "8bit" through bitsandbytes (an extra); None: none.
    """

    model: str = "smollm2-135m"
    base: str | None = None
    device: str | None = None
    dtype: str = "auto"
    quantization: "Quantization | None" = None

    def load(self, progress: "Progress" = lambda what, done, total: None) -> "Dodo":
        """The model.

        Args:
            progress: told about a download.

        Raises:
            InputError, FingerprintMismatch, DownloadError, UnsupportedModelError, DodoError: see `Dodo.from_pretrained`.
        """
        import torch

        from dodo.model import Dodo

        return Dodo.from_pretrained(
            self.model,
            base=self.base,
            device=self.device,
            dtype="auto" if self.dtype == "auto" else getattr(torch, self.dtype),
            quantization=self.quantization,
            progress=progress,
        )

    def from_anywhere(self) -> "Loading":
        """The same with whole paths in place of relative ones, for processes with another working directory. A name that a base
        or shipped adapters have stands for those, also where a folder is called so."""
        from dodo.adapter_files import SHIPPED
        from dodo.pull import BASES

        def whole(name: str) -> str:
            known = name in BASES or (Path(name).name == name and (SHIPPED / name).is_dir())
            return str(Path(name).resolve()) if Path(name).exists() and not known else name

        return replace(self, model=whole(self.model), base=self.base and whole(self.base))
