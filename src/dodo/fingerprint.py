"""Short hashes that tell one base, tokenizer or adapter from another.

A base is known by evenly spaced samples of every weight as it is stored, so that loading it in another dtype, on another
device or quantised leaves its fingerprint the same, and a fine-tuned sibling has another one. A sibling that differs in a few
single numbers only is told apart if they are among the samples.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from dodo.architecture import layer_windows

__all__ = ["of_base", "of_files", "of_model", "of_tensors", "of_tokenizer"]

_SAMPLES = 64
_OF_EVERY_ROPE = ("rope_type", "rope_theta", "factor")
_TELLING = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "no_rope_layers",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
)
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def of_model(model: PreTrainedModel) -> str:
    """Fingerprint of a base from its parameters in memory; equal to `of_files` of its safetensors files if nothing was cast."""
    entries = []
    for name, parameter in model.named_parameters():  # tied ones once
        flat = parameter.detach().reshape(-1)
        picks = torch.from_numpy(_spread(flat.numel())).to(flat.device)
        raw = flat[picks].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        entries.append((name, _DTYPES.get(parameter.dtype, str(parameter.dtype)), list(parameter.shape), raw))
    return _digest(entries)


def of_files(paths: Iterable[Path]) -> str:
    """Fingerprint of a base from its safetensors files, read in a few small places.

    A GGUF file is hashed at evenly spaced places of the whole file instead.
    """
    entries = []
    for path in sorted(paths):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        if path.suffix != ".safetensors":
            entries.append((path.suffix, "file", [len(data)], data[_spread(len(data), 65536)].tobytes()))
            continue
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            count = int(np.prod(entry["shape"], dtype=np.int64))
            if count == 0:
                continue
            width = (end - begin) // count
            places = begin + _spread(count)[:, None] * width + np.arange(width)
            entries.append((name, entry["dtype"], entry["shape"], data[places].tobytes()))
    return _digest(entries)


def of_base(weights: str, config: PreTrainedConfig) -> str:
    """Fingerprint of a base's weights and of what its configuration makes of them: heads, windows, rotations.

    Args:
        weights: from `of_files` or `of_model`.
        config: the base's.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [value for _, value in sorted(rope.items()) if isinstance(value, dict)] or [rope]
    telling: list[Any] = [
        weights,
        [getattr(config, name, None) for name in ("model_type", "num_attention_heads", "rms_norm_eps")],
        layer_windows(config),
        [[rope.get(name) for name in _OF_EVERY_ROPE] for rope in ropes],
    ]
    if others := _unusual(config, ropes):
        telling.append(others)
    return hashlib.sha256(json.dumps(telling).encode()).hexdigest()[:16]


def _unusual(config: PreTrainedConfig, ropes: list[dict[str, Any]]) -> list[Any]:
    """What else changes keys, attention or logits, and is not as the family has it by default. Nothing for most bases."""
    usual = type(config)()
    fields = {
        name: getattr(config, name)
        for name in _TELLING
        if hasattr(config, name) and getattr(config, name) != getattr(usual, name, None)
    }
    scaled = [
        {name: value for name, value in sorted(rope.items()) if name not in _OF_EVERY_ROPE and value is not None}
        for rope in ropes
    ]
    return [fields, scaled] if fields or any(scaled) else []


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Fingerprint of a tokenizer: its vocabulary, and how it splits a probe."""
    probe = "Dodo 1234,\n\tcafé naïve 你好 🙂 don't"
    known = [sorted(tokenizer.get_vocab().items()), tokenizer(probe)["input_ids"], tokenizer.bos_token_id]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def of_tensors(tensors: Mapping[str, Tensor], *, settings: str = "") -> str:
    """Fingerprint of adapters and scorer: every byte of them, and their settings."""
    digest = hashlib.sha256(settings.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _spread(count: int, samples: int = _SAMPLES) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, samples)).astype(np.int64))


def _digest(entries: list[tuple[str, str, list[int], bytes]]) -> str:
    digest = hashlib.sha256()
    for name, dtype, shape, raw in sorted(entries):
        digest.update(f"{name} {dtype} {shape}".encode())
        digest.update(raw)
    return digest.hexdigest()[:16]
