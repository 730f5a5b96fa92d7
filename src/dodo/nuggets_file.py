"""The `.nuggets` file: safetensors, with everything else about the nuggets as JSON in its header.

Versioned, checksummed, written to one side and moved into place. Nothing in it is executed: there is no pickle.
Keys and values are stored as they are, in another floating type, or as int8 with one scale per layer, text, head and channel.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dodo.config import PositionScheme, Use, is_number
from dodo.errors import InputError, NuggetsFileError
from dodo.files import replacing
from dodo.nuggets import Fingerprint, Nuggets
from dodo.rotary import Rotary

__all__ = ["FORMAT_VERSION", "StorageType", "load", "save"]

FORMAT_VERSION = 2
"""The checksum of version 1, which is read too, was of the tensors alone."""
StorageType = Literal["float32", "bfloat16", "float16", "int8"]

_SHORT: dict[str, StorageType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_HEADER_KEY = "dodo_nuggets"
_INTEGERS = ("positions", "indices", "token_ids", "lengths", "next_positions", "sinks")


def save(nuggets: Nuggets, path: str | Path, *, storage: StorageType | None = None) -> None:
    """Write nuggets, whole or not at all.

    Args:
        nuggets: what to write; moved to the CPU for it.
        path: where to; an existing file is replaced once the new one is complete.
        storage: type of keys and values in the file, float32, bfloat16, float16 (or fp32, bf16, fp16) or int8; None keeps their
            own.

    Raises:
        InputError: unknown storage type, or the values do not fit it.
        NuggetsFileError: the file could not be written (no such folder, disk full, ...); what stood there is unchanged.
    """
    path = Path(path)
    stored = _SHORT.get(storage or "", storage) or _name(nuggets.dtype)
    if stored not in get_args(StorageType):
        raise InputError(f"storage must be one of {', '.join(get_args(StorageType))}, not {stored!r}")
    here = nuggets.to(device="cpu")
    tensors: dict[str, Tensor] = {name: getattr(here, name).to(torch.int32) for name in _INTEGERS}
    tensors |= {"scores": here.scores.float(), "mask": here.mask}
    tensors |= {f"rotary.{i}": frequencies for i, frequencies in enumerate(here.rotary.frequencies)}
    for name in ("keys", "values"):
        tensors |= _stored(name, getattr(here, name).detach(), stored)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    header = {
        "version": FORMAT_VERSION,
        "dtype": _name(nuggets.dtype),
        "storage": stored,
        "n": here.lengths.tolist(),
        "k": here.k.tolist(),
        "ratio": here.ratio,
        **({"use": here.use} if here.use else {}),
        "scheme": here.scheme,
        "rotary_layers": list(here.rotary.layers),
        "fingerprint": vars(here.fingerprint),
    }
    _write(path, tensors, {**header, "checksum": _checksum(tensors, header)})


def load(path: str | Path) -> Nuggets:
    """Read nuggets onto the CPU, keys and values in the dtype they had before they were stored.

    Raises:
        NuggetsFileError: no such file, not a nuggets file, truncated, damaged, or of a later version.
    """
    path = Path(path)
    if path.is_dir():
        raise NuggetsFileError(f"{path} is a directory, not a nuggets file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _HEADER_KEY not in metadata:
                raise NuggetsFileError(f"{path} is a safetensors file but holds no nuggets")
            header = json.loads(metadata[_HEADER_KEY])
            version = header["version"]
            if type(version) is not int or version < 1:
                raise ValueError(f"its format version is {version!r}")
            if version > FORMAT_VERSION:
                raise NuggetsFileError(f"{path} has format version {version}; this dodo reads up to {FORMAT_VERSION}: upgrade it")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise NuggetsFileError(f"there is no file {path}") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NuggetsFileError(f"{path} is not a nuggets file, or is damaged or truncated ({error})") from None
    try:
        if header.pop("checksum") != _checksum(tensors, header):
            raise NuggetsFileError(f"{path} is damaged: its contents do not match its checksum; make it again")
        return _assemble(header, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise NuggetsFileError(f"{path} is damaged: {error!r}") from None


def _assemble(header: dict[str, Any], tensors: dict[str, Tensor]) -> Nuggets:
    dtype = _dtype(header["dtype"])
    if header.get("use") not in (None, *get_args(Use)):
        raise ValueError(f"it says that it was compressed for {header['use']!r}")
    if header["scheme"] not in get_args(PositionScheme) or tensors["keys"].dtype != _dtype(header["storage"]):
        raise ValueError("its header does not describe its contents")
    rotations = [tensors[f"rotary.{i}"] for i in range(sum(name.startswith("rotary.") for name in tensors))]
    nuggets = Nuggets(
        keys=_restored("keys", tensors, dtype),
        values=_restored("values", tensors, dtype),
        **{name: tensors[name].long() for name in _INTEGERS},
        scores=tensors["scores"],
        mask=tensors["mask"],
        scheme=header["scheme"],
        ratio=header["ratio"],
        use=header.get("use"),
        rotary=Rotary(frequencies=tuple(rotations), layers=tuple(header["rotary_layers"])),
        fingerprint=Fingerprint(**header["fingerprint"]),
    )
    if not _fits_together(nuggets) or (header["n"], header["k"]) != (nuggets.lengths.tolist(), nuggets.k.tolist()):
        raise ValueError("its header does not describe its contents")
    return nuggets


def _fits_together(nuggets: Nuggets) -> bool:
    """Whether shapes, types and values are those of nuggets, which a checksum of whoever made the file does not show."""
    layers, texts, _, states, width = nuggets.keys.shape
    rows = (nuggets.positions, nuggets.indices, nuggets.scores, nuggets.token_ids, nuggets.mask)
    singles = (nuggets.lengths, nuggets.next_positions, nuggets.sinks)
    shapes = nuggets.values.shape[:4] == nuggets.keys.shape[:4] and all(row.shape == (texts, states) for row in rows)
    if not shapes or any(single.shape != (texts,) for single in singles) or nuggets.mask.dtype != torch.bool:
        return False
    floating = all(tensor.is_floating_point() for tensor in (nuggets.keys, nuggets.values, nuggets.scores))
    held_scores = nuggets.scores[nuggets.mask]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (nuggets.keys, nuggets.values, held_scores))
    turns = nuggets.rotary.frequencies
    known = len(nuggets.rotary.layers) == layers and all(type(i) is int and -1 <= i < len(turns) for i in nuggets.rotary.layers)
    turned = all(turn.ndim == 1 and turn.is_floating_point() and 2 * len(turn) <= width for turn in turns)
    held = bool((nuggets.sinks >= 0).all()) and bool((nuggets.k > 0).all())
    return floating and finite and known and turned and held and (nuggets.ratio is None or is_number(nuggets.ratio))


def _stored(name: str, states: Tensor, storage: str) -> dict[str, Tensor]:
    if not bool(torch.isfinite(states).all()):
        raise InputError(
            f"the {name} are not all finite: the base or its adapters are broken, or its type is too narrow for them"
        )
    if storage != "int8":
        stored = states.to(_dtype(storage))
        if not bool(torch.isfinite(stored).all()):
            raise InputError(f"the {name} do not fit {storage}; store them as bfloat16 or float32")
        return {name: stored}
    scale = states.float().abs().amax(dim=3, keepdim=True) / 127  # [L, B, H, 1, D], one per channel
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return {name: (states.float() / scale).round().to(torch.int8), f"{name}.scale": scale}


def _restored(name: str, tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    states = tensors[name]
    if states.dtype == torch.int8:
        states = states.float() * tensors[f"{name}.scale"]
    return states.to(dtype)


def _checksum(tensors: dict[str, Tensor], header: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    alone = header["version"] == 1
    if not alone:
        digest.update(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        kind = "" if alone else f" {tensors[name].dtype}"
        digest.update(f"{name} {list(tensors[name].shape)}{kind}".encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    try:
        with replacing(path) as part:
            save_file(tensors, part, metadata={_HEADER_KEY: json.dumps(header)})
            with open(part, "r+b") as written:  # "rb" can not be synced on Windows
                os.fsync(written.fileno())
    except (OSError, SafetensorError) as error:
        raise NuggetsFileError(f"could not write {path}: {error}; nothing was changed") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
