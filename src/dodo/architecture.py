"""What Dodo needs to know of a base model: which families work, their layers, windows, rotations, projections.

Together with `attention` the only code that touches transformers' internals. A family is supported when it is in `FAMILIES`
and the tests hold for it; all others are refused by name, with the reason where there is one.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dodo.errors import InputError, UnsupportedModelError
from dodo.rotary import Rotary

__all__ = [
    "FAMILIES",
    "FeatureLayers",
    "backbone",
    "check_ids",
    "check_supported",
    "copy_before_head",
    "device_of",
    "key_shape",
    "layer_windows",
    "layers_of",
    "logits_of",
    "lora_targets",
    "rotary_of",
    "state_bytes",
    "token_nats",
    "window_of",
]

FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""`config.model_type` of the families that the tests cover."""

AT_ONCE = 512
"""Tokens whose logits stand in memory at once."""

_QKV = {"phi3": ("qkv_proj",)}
_MLP_AND_OUTPUT = {"phi3": ("o_proj", "gate_up_proj", "down_proj")}

_REASONS = {
    "gemma3": "it is the vision-language model; load its text model (model type gemma3_text)",
    "gpt2": "learned absolute positions: its nuggets could not be moved or joined",
}


def check_supported(config: PreTrainedConfig, *, allow_untested: bool = False) -> None:
    """Refuse a base whose keys and values can't stand for its past, or that has not been tested.

    Args:
        config: the base's configuration.
        allow_untested: let families outside `FAMILIES` through if nothing in their configuration speaks against them.

    Raises:
        UnsupportedModelError: names the family and the reason.
    """
    family = config.model_type
    reason = _REASONS.get(family) or _structural_reason(config)
    if reason:
        raise UnsupportedModelError(f"base models of type {family!r} can't hold nuggets: {reason}")
    if family not in FAMILIES and not allow_untested:
        raise UnsupportedModelError(
            f"base models of type {family!r} are not tested with dodo; tested are {', '.join(FAMILIES)} "
            "(pass allow_untested=True to try it)"
        )


def _structural_reason(config: PreTrainedConfig) -> str | None:
    layer_types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])
    if other := sorted(layer_types - {"full_attention", "sliding_attention"}):
        return f"it has layers of type {', '.join(other)}, whose state is not keys and values of single tokens"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its upper layers share the keys and values of lower ones"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if not getattr(config, "num_attention_heads", 0) or any(
        hasattr(config, name) for name in ("state_size", "mamba_d_state", "linear_num_key_heads", "attention_hidden_size")
    ):
        return "it is recurrent: its past is one state, not keys and values of single tokens"
    if getattr(config, "kv_lora_rank", None):
        return "its keys and values are stored in a compressed latent form"
    return None


def backbone(model: PreTrainedModel) -> nn.Module:
    """The transformer without its language-model head: embeddings, `.layers`, `.norm`, `.rotary_emb`.

    Raises:
        UnsupportedModelError: the model is laid out otherwise.
    """
    inner = model.base_model
    missing = [name for name in ("layers", "norm", "rotary_emb") if not hasattr(inner, name)]
    if missing:
        raise UnsupportedModelError(f"{type(model).__name__} has no {', '.join(missing)} where dodo expects them")
    return inner


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a base takes its tokens: the device of its embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.device


def check_ids(model: PreTrainedModel, rows: Iterable[Sequence[int]]) -> None:
    """Raise InputError if a row, of at least one token id each, has one that the base does not know."""
    known = model.config.vocab_size
    if any(min(row) < 0 or max(row) >= known for row in rows):
        raise InputError(f"token ids must be 0 to {known - 1:,}, as far as the base's vocabulary goes")


def check_id_tensor(model: PreTrainedModel, input_ids: Tensor) -> None:
    """Raise InputError unless these are rows of token ids that the base knows, int64 or int32 [B, T]."""
    if input_ids.ndim != 2:
        raise InputError(f"input_ids must be [batch, tokens], not of shape {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"input_ids must be whole numbers, torch.int64, not {input_ids.dtype}")
    if input_ids.numel():
        lowest, highest = torch.stack(torch.aminmax(input_ids)).tolist()
        check_ids(model, [(lowest, highest)])


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The base's transformer layers, lowest first."""
    layers = backbone(model).layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """What the language-model head makes of states behind the final norm, capped where the family caps them.

    Args:
        states: [..., d].

    Returns:
        fp32 [..., V].
    """
    logits: Tensor = model.get_output_embeddings()(states).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def token_nats(model: PreTrainedModel, states: Tensor, targets: Tensor) -> Tensor:
    """-log p of tokens, a few at a time, for the logits of many take more memory than the states.

    Args:
        states: [..., d], what the language-model head reads.
        targets: int64 [...].

    Returns:
        fp32 [...].
    """
    pairs = zip(states.reshape(-1, states.shape[-1]).split(AT_ONCE), targets.reshape(-1).split(AT_ONCE), strict=True)
    nats = [torch.nn.functional.cross_entropy(logits_of(model, some), wanted, reduction="none") for some, wanted in pairs]
    return torch.cat(nats).view(targets.shape)


def copy_before_head(model: PreTrainedModel) -> None:
    """Have the language-model head read packed states.

    Transformers gives it a slice, the last state of each text; torch on a CPU then copies the head's matrix once for each text,
    which in bf16 takes longer than all the layers. So it does of one text, whose slice counts as contiguous with the strides of
    the whole pass.
    """
    model.get_output_embeddings().register_forward_pre_hook(_packed)


def _packed(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    states = inputs[0]
    return states.contiguous().flatten(0, -2).view(states.shape), *inputs[1:]


def window_of(config: PreTrainedConfig) -> int:
    """Positions within which the base's rotations are fixed.

    `max_position_embeddings`; for LongRoPE (Phi) the original window, past which all its rotations change at once.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        return int(original)
    return int(config.max_position_embeddings)


def key_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Layers, key/value heads of each, and their width: what one token's keys are."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, width


def state_bytes(config: PreTrainedConfig, *, bytes_per_number: int) -> int:
    """What the keys and values of one token take in all layers together."""
    return 2 * math.prod(key_shape(config)) * bytes_per_number


def layer_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """For each layer, how many positions back its attention reaches (itself counted), or None for all.

    Mirrors how transformers applies `sliding_window`: by `layer_types` where there are any, else to every layer.
    """
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * config.num_hidden_layers
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return (int(window),) * config.num_hidden_layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)


def lora_targets(config: PreTrainedConfig, targets: str | tuple[str, ...]) -> list[str]:
    """Names of the modules that LoRA adapts, for 'qkv', 'all-linear' or names given as they are."""
    if isinstance(targets, tuple):
        return list(targets)
    qkv = _QKV.get(config.model_type, ("q_proj", "k_proj", "v_proj"))
    if targets == "qkv":
        return list(qkv)
    return [*qkv, *_MLP_AND_OUTPUT.get(config.model_type, ("o_proj", "gate_proj", "up_proj", "down_proj"))]


def rotary_of(model: PreTrainedModel) -> Rotary:
    """Read the rotation frequencies of every layer off a model.

    Works for every scaling whose frequencies are fixed within `window_of`, partial rotation (Phi), one rotation per layer
    type (Gemma 3) and layers without rotation (SmolLM3).

    Raises:
        UnsupportedModelError: a layout of dimensions other than two halves.
    """
    embedding: Any = backbone(model).rotary_emb
    config = model.config
    layers = config.num_hidden_layers
    types = getattr(embedding, "layer_types", None)
    per_layer = list(config.layer_types) if types else [""] * layers
    names = sorted(set(per_layer))
    frequencies = []
    for name in names:
        buffer: Tensor = getattr(embedding, f"{name}_inv_freq" if name else "inv_freq")
        _check_halves(embedding, buffer, name)
        frequencies.append(buffer.detach().float().cpu().clone())
    turns = [bool(getattr(layer.self_attn, "use_rope", True)) for layer in layers_of(model)]
    which = tuple(names.index(per_layer[i]) if turns[i] else -1 for i in range(layers))
    return Rotary(frequencies=tuple(frequencies), layers=which)


def _check_halves(embedding: nn.Module, frequencies: Tensor, name: str) -> None:
    """The model's own cosines must be those of `frequencies`, laid out as two equal halves."""
    if frequencies.device.type == "meta":
        return
    x = torch.zeros(1, 1, 1, dtype=torch.float32, device=frequencies.device)
    one = torch.ones(1, 1, dtype=torch.long, device=frequencies.device)
    cos, sin = embedding(x, one, name) if name else embedding(x, one)
    expected = torch.cat([frequencies, frequencies]).float()
    angle = torch.atan2(sin.flatten().float(), cos.flatten().float())
    if angle.shape != expected.shape or not torch.allclose(angle, expected, atol=1e-5):
        raise UnsupportedModelError("the base lays out its rotary dimensions in a way that dodo does not know")


class FeatureLayers:
    """The first iota layers of a base, sharing its modules: what the scorer reads.

    Paper: Section 2.1 (x^iota in Eq. 6). Layers above are not run, and the final norm is left out, so the result is what
    transformers calls `hidden_states[iota]`. The caller switches adapters off.
    """

    def __init__(self, model: PreTrainedModel, feature_layer: int) -> None:
        inner = backbone(model)
        depth = model.config.num_hidden_layers
        if not 1 <= feature_layer < depth:
            raise InputError(f"feature_layer must be 1 .. {depth - 1} for a base of {depth} layers, not {feature_layer}")
        view: Any = copy.copy(inner)
        view._modules = dict(inner._modules)
        view.layers = layers_of(model)[:feature_layer]
        view.norm = nn.Identity()
        view.config = _first_layers(model.config, feature_layer)
        self._view = view

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Hidden states after layer iota.

        Args:
            input_ids: int64 [B, T], right-padded (causal attention keeps pads out of real tokens) unless there is a mask.
            inputs: masks, positions and cache, as the base takes them.

        Returns:
            [B, T, d], in the base's dtype, without gradient.
        """
        features: Tensor = self._view(input_ids=input_ids, **{"use_cache": False, **inputs}).last_hidden_state
        return features


def _first_layers(config: PreTrainedConfig, layers: int) -> Any:
    shortened = copy.copy(config)
    shortened.num_hidden_layers = layers
    return shortened
