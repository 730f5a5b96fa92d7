"""A set of adapters on disk: two PEFT folders, scorer and soft token, configuration, model card. The base is not among them.

phi/adapter_config.json    phi/adapter_model.safetensors
theta/adapter_config.json  theta/adapter_model.safetensors
scorer.safetensors         dodo_config.json  README.md
thresholds.json, if they have been estimated
memory.safetensors, if they are ICAE's
"""

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dodo import hub
from dodo.compressor import Compressor
from dodo.config import CONFIG_FILE
from dodo.errors import DodoWarning, InputError
from dodo.files import for_all_to_read
from dodo.memory import MemoryTokens
from dodo.thresholds import THRESHOLDS_FILE, Thresholds

__all__ = ["SHIPPED", "find", "load", "load_scorer", "load_thresholds", "save", "tensors_of"]

SCORER_FILE = "scorer.safetensors"
MEMORY_FILE = "memory.safetensors"
SHIPPED = Path(__file__).parent / "weights"
"""Trained adapters that come with the package, one folder for each name they ship under."""


def find(name: str, revision: str | None = None) -> Path | None:
    """Where the adapters called `name` are (shipped, a folder, on the hub), or None if `name` is a base.

    Raises:
        InputError: a folder that a set was not saved to in full; or see `hub.find_adapters`.
    """
    path = Path(name).expanduser()
    if path.name == name and (SHIPPED / name / CONFIG_FILE).is_file():
        if path.is_dir() and path.resolve() != (SHIPPED / name).resolve():
            told = f"{name} is taken for the adapters that ship; for the folder of this name say .{os.sep}{name}"
            warnings.warn(told, DodoWarning, stacklevel=3)
        return SHIPPED / name
    if path.is_dir():
        if (path / CONFIG_FILE).is_file():
            return path
        if (path / SCORER_FILE).is_file():
            raise InputError(f"{path} holds adapters without their {CONFIG_FILE}: saving them was cut short; save them again")
        if inside := [folder for folder in ("best", "last") if (path / folder / CONFIG_FILE).is_file()]:
            raise InputError(
                f"{path} is the folder of a run; its adapters are in {' and '.join(str(path / one) for one in inside)}"
            )
        return None
    return hub.find_adapters(name, revision) if hub.is_hub_id(name) else None


def load(compressor: Compressor, folder: Path) -> None:
    """Load adapters, scorer, soft token and, if there are any, memory tokens into a compressor of the same configuration.

    Raises:
        InputError: a file is missing, damaged, or does not fit.
    """
    memory = _memory_in(folder, width=compressor.soft_token.shape[-1])
    compressor.adapters.load(folder)
    soft_token = load_scorer(compressor, folder)
    with _fitting(folder), torch.no_grad():
        compressor.soft_token.copy_(soft_token.view_as(compressor.soft_token))
        learned = (*compressor.adapters.parameters(), *compressor.scorer.parameters(), compressor.soft_token)
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in learned)
    if not finite:
        raise InputError(f"{folder} holds adapters that are not all finite: they would answer nothing; train them again")
    compressor.memory = None if memory is None else memory.to(compressor.soft_token.device)


def load_scorer(compressor: Compressor, folder: Path) -> Tensor:
    """Load the scorer alone; the set may have been made with other LoRA settings.

    A scorer with one score for all uses starts both of one that has a score for each, and is started by its score for the text.

    Returns:
        The set's soft token, [d], which stands in the same file and is not loaded.

    Raises:
        InputError: its file is missing, damaged, or does not fit.
    """
    tensors = _scorer_in(folder)
    with _fitting(folder):
        soft_token = tensors.pop("soft_token")
        rows = compressor.scorer.output.out_features
        for name in ("scorer.output.weight", "scorer.output.bias"):
            if (len(tensors[name]), rows) in ((1, 2), (2, 1)):
                tensors[name] = tensors[name][:1].repeat(rows, *[1] * (tensors[name].ndim - 1))
        compressor.scorer.load_state_dict({name.removeprefix("scorer."): tensor for name, tensor in tensors.items()})
    return soft_token


def _scorer_in(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / SCORER_FILE)
    except FileNotFoundError:
        raise InputError(f"{folder} has no {SCORER_FILE}") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"{folder / SCORER_FILE} is damaged or truncated: {error}") from None


@contextmanager
def _fitting(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, RuntimeError, TypeError) as error:
        raise InputError(f"{folder / SCORER_FILE} does not fit this base: {str(error).splitlines()[0]}") from None


def load_thresholds(folder: Path) -> Thresholds | None:
    """The thresholds that belong to a set, if it has any.

    Raises:
        InputError: the file is damaged.
    """
    return Thresholds.load(folder / THRESHOLDS_FILE) if (folder / THRESHOLDS_FILE).is_file() else None


def save(
    compressor: Compressor,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    card: str | None = None,
    thresholds: Thresholds | None = None,
) -> None:
    """Write the set, each file whole or not at all. The configuration, without which it is none, is written last.

    Args:
        compressor: whose adapters, scorer, soft token, memory tokens and configuration.
        folder: made if it is not there.
        dtype: of the stored weights; None keeps their own.
        card: text of README.md; None writes a short one.
        thresholds: of this scorer; None takes away those that the folder has of another.

    Raises:
        InputError: the folder can't be written. A set that was there is unchanged, unless its files were being replaced: then
            there is none, so that nobody takes files of two sets for one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving.") as scratch:
            _write(compressor, Path(scratch), dtype, card)
            if thresholds is not None:
                (Path(scratch) / THRESHOLDS_FILE).write_text(thresholds.to_json(), encoding="utf-8")
            files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
            for name in (CONFIG_FILE, MEMORY_FILE, THRESHOLDS_FILE):
                (folder / name).unlink(missing_ok=True)
            for path in sorted(files, key=lambda path: path.name == CONFIG_FILE):
                target = folder / path.relative_to(scratch)
                target.parent.mkdir(exist_ok=True)
                for_all_to_read(path)
                path.replace(target)
    except (OSError, SafetensorError) as error:
        raise InputError(f"could not save to {folder}: {error}") from None


def tensors_of(compressor: Compressor) -> dict[str, Tensor]:
    """What is trained beside the adapters, by name."""
    memory = {} if compressor.memory is None else {"memory": compressor.memory.embeddings.detach()}
    return _scorer_tensors(compressor) | memory


def _scorer_tensors(compressor: Compressor) -> dict[str, Tensor]:
    """Scorer and soft token by the names they have in `scorer.safetensors`."""
    tensors = {f"scorer.{name}": tensor for name, tensor in compressor.scorer.state_dict().items()}
    return tensors | {"soft_token": compressor.soft_token.detach()}


def _memory_in(folder: Path, *, width: int) -> MemoryTokens | None:
    path = folder / MEMORY_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            embeddings, metadata = file.get_tensor("memory"), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is damaged or truncated: {error}") from None
    if embeddings.ndim != 2 or embeddings.shape[1] != width or metadata.get("fixed") not in ("true", "false"):
        raise InputError(f"{path} does not fit this base: memory tokens of width {width} are wanted, and whether they are fixed")
    return MemoryTokens(embeddings, fixed=metadata["fixed"] == "true", aligned=metadata.get("aligned") == "true")


def _write(compressor: Compressor, folder: Path, dtype: torch.dtype | None, card: str | None) -> None:
    compressor.adapters.save(folder)
    save_file({name: tensor.contiguous().cpu() for name, tensor in _scorer_tensors(compressor).items()}, folder / SCORER_FILE)
    if compressor.memory is not None:
        metadata = {name: "true" if getattr(compressor.memory, name) else "false" for name in ("fixed", "aligned")}
        save_file({"memory": compressor.memory.embeddings.detach().contiguous().cpu()}, folder / MEMORY_FILE, metadata)
    if dtype is not None:
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
            save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path, metadata)
    (folder / CONFIG_FILE).write_text(compressor.config.to_json(), encoding="utf-8")
    (folder / "README.md").write_text(card or _card(compressor), encoding="utf-8")


def _card(compressor: Compressor) -> str:
    config, memory = compressor.config, compressor.memory
    trained = f"{config.trained_ratios[0]:g} to {config.trained_ratios[1]:g}" if config.trained_ratios else "not trained"
    base = f"base_model: {config.base}\n" if hub.is_hub_id(str(config.base)) else ""  # the hub takes ids only
    slots = "" if memory is None else f"- memory tokens, for the baseline ICAE alone: {len(memory)}\n"
    return (
        f"---\nlibrary_name: dodo-lm\n{base}tags: [context-compression, dodo]\n---\n\n"
        f"# Dodo adapters for {config.base}\n\n"
        "LoRA adapters phi and theta, scorer and soft token that compress a context into nuggets "
        "(Qin et al., Dodo: Dynamic Contextual Compression for Decoder-only LMs).\n\n"
        f"- trained as: {config.trained_as or 'not said'}\n- ratios trained: {trained}\n"
        f"- selection: {config.selection}\n- positions: {config.positions}\n"
        f"- first token kept: {config.keep_first}\n- feature layer: {config.feature_layer}\n"
        f"- base weights: {config.base_fingerprint}\n{slots}\n"
        '```python\nfrom dodo import Dodo\n\ndodo = Dodo.from_pretrained("path or hub id of this folder")\n```\n'
    )
