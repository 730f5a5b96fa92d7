"""Caches and masks: how nuggets enter a transformer's attention.

Paper: Eq. 13 (the decoder attends to nuggets and to its own past) and Eq. 18 (the straight-through term as part of the
mask). Everything is expressed by positions: a query sees a key that is not later than itself and not further back than the
layer's window. Where no window is in force and no row is padded, the base's own causal mask says the same and is used.

Shapes: B batch, Q queries, S keys, K nuggets, H key/value heads, D head width.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dodo.architecture import backbone, key_shape, layer_windows
from dodo.errors import UnsupportedModelError
from dodo.rotary import Rotary
from dodo.selection import gather_tokens
from dodo.straight_through import straight_through

__all__ = [
    "NuggetCache",
    "AllKept",
    "OnePassCache",
    "RoomyLayer",
    "attention_masks",
    "cache_argument",
    "check_gradient_backend",
    "retain",
    "roomy_cache",
    "turn",
    "windows_by_position",
]


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the keyword that takes a cache: `cache`, or `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(backbone(model).forward).parameters else "past_key_values"


def check_gradient_backend(model: PreTrainedModel) -> None:
    """Refuse attention backends that would drop the straight-through term or its gradient.

    Raises:
        UnsupportedModelError: the backend is neither 'sdpa' nor 'eager'.
    """
    backend = model.config._attn_implementation
    if backend not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"attention backend {backend!r} drops the score term that trains the scorer; "
            "train with attn_implementation='sdpa' or 'eager'"
        )


ROOM = 64
"""Tokens for which a `RoomyLayer` takes memory ahead when tokens come one at a time."""


class RoomyLayer(DynamicLayer):
    """A layer of a cache with room behind its keys and values, so that a new token does not copy all those before it.

    `keys` and `values` [B, H, S, D] are views of the first S tokens of larger tensors; when they are replaced, the room is taken
    anew. States with gradients are joined as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rooms: list[Tensor | None] = [None, None]
        self._views: list[Tensor | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            joined: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return joined
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self.get_seq_length()
        self.keys = self._append(0, self.keys, key_states, held)
        self.values = self._append(1, self.values, value_states, held)
        return self.keys, self.values

    def _append(self, i: int, states: Tensor | None, new: Tensor, held: int) -> Tensor:
        room, end = self._rooms[i], held + new.shape[2]
        if room is None or states is not self._views[i] or end > room.shape[2]:
            room = new.new_empty(*new.shape[:2], end + (ROOM if held and new.shape[2] == 1 else 0), new.shape[3])
            if held:
                assert states is not None
                room[:, :, :held] = states
        room[:, :, held:end] = new
        view = room[:, :, :end]
        self._rooms[i], self._views[i] = room, view
        return view


def roomy_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of `RoomyLayer`s."""
    cache = DynamicCache()
    cache.layers = [RoomyLayer() for _ in range(key_shape(model.config)[0])]
    return cache


class NuggetCache(DynamicCache):
    """A transformers cache that begins with nuggets and knows the position of every key it holds.

    key_positions: int64 [B, S]. key_mask: bool [B, S], false for padding. Both grow with `extend`.
    """

    def __init__(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], positions: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.layers = [RoomyLayer() for _ in keys]
        for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
            self.update(key, value, layer)
        self.key_positions = positions.clone()
        self.key_mask = mask.clone()

    def extend(self, positions: Tensor, mask: Tensor) -> None:
        """Note the positions of keys that the coming forward pass appends."""
        self.key_positions = torch.cat([self.key_positions, positions], dim=1)
        self.key_mask = torch.cat([self.key_mask, mask], dim=1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self.key_positions = self.key_positions.index_select(0, beam_idx.to(self.key_positions.device))
        self.key_mask = self.key_mask.index_select(0, beam_idx.to(self.key_mask.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.key_positions = self.key_positions.repeat_interleave(repeats, dim=0)
        self.key_mask = self.key_mask.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.key_positions = self.key_positions[indices]
        self.key_mask = self.key_mask[indices]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self.key_positions = self.key_positions[:, :length]
        self.key_mask = self.key_mask[:, :length]


class OnePassCache(DynamicCache):
    """The cache of a single forward pass: shows a past that it leaves as it is, and keeps selected tokens (Eq. 5, 7).

    The full keys and values of a layer live only while that layer runs, so encoding needs less memory than a prefill. Running
    a layer twice, as gradient checkpointing does, gives the same twice. Where tokens are kept, the pass ends with `AllKept` as
    soon as the last layer's are: nothing else of that layer is wanted.

    Args:
        layers: number of the base's layers.
        past: keys and values [L, B, H, K, D] that the coming tokens attend to, or None.
        keep: int64 [B, K'], which of the coming tokens to keep; None keeps none.
    """

    def __init__(self, layers: int, *, past: tuple[Tensor, Tensor] | None = None, keep: Tensor | None = None) -> None:
        super().__init__()
        self.layers: list[Any] = [_OnePassLayer(None if past is None else (past[0][i], past[1][i]), keep) for i in range(layers)]
        self.layers[-1].is_last = True

    def kept(self) -> tuple[Tensor, Tensor]:
        """Keys and values [L, B, H, K + K', D] of the past and, behind it, of the kept tokens."""
        keys, values = zip(*(layer.kept for layer in self.layers), strict=True)
        return torch.stack(keys), torch.stack(values)


class AllKept(Exception):
    """The last layer's keys and values are in: the rest of the forward pass would compute what nobody reads."""


class _OnePassLayer(DynamicLayer):
    is_last = False

    def __init__(self, past: tuple[Tensor, Tensor] | None, keep: Tensor | None) -> None:
        super().__init__()
        self.keep = keep
        self.kept: tuple[Tensor, Tensor] | None = None
        if past is not None:
            self.lazy_initialization(*past)
            self.keys, self.values = past

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keep is not None:
            self.kept = self._behind_past(gather_tokens(key_states, self.keep), gather_tokens(value_states, self.keep))
            if self.is_last:
                raise AllKept
        return self._behind_past(key_states, value_states)

    def _behind_past(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            return keys, values
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


def retain(cache: Cache, which: Tensor | slice) -> None:
    """Keep some of the keys and values that a cache holds, and drop the others.

    Args:
        cache: changed in every layer.
        which: int64 [S'], of S; or a slice, which copies nothing before the next tokens come.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        here = which if isinstance(which, slice) else which.to(layer.keys.device)
        layer.keys, layer.values = layer.keys[:, :, here], layer.values[:, :, here]


def turn(cache: Cache, delta: Tensor, rotary: Rotary) -> None:
    """Turn the keys that a cache holds to other positions.

    Args:
        cache: changed in every layer.
        delta: int64 [S], positions to add.
        rotary: the base's rotations.
    """
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        layer.keys = rotary.rotate(layer.keys, delta[None].to(layer.keys.device), layer=i)


def attention_masks(
    model: PreTrainedModel,
    *,
    query_positions: Tensor,
    key_positions: Tensor,
    key_mask: Tensor,
    scores: Tensor | None = None,
    scored: Tensor | None = None,
) -> Tensor | dict[str, Tensor]:
    """Additive masks by position, with the straight-through term on the first columns.

    A query at position p sees a key at position q if the key is real, q <= p, and p - q is less than the layer's window.
    A query that would see nothing (padding) sees everything, so that no row is empty.

    Args:
        model: the base; its config says which layers have a window.
        query_positions: int64 [B, Q].
        key_positions: int64 [B, S].
        key_mask: bool [B, S], or [B, Q, S] where it depends on the query.
        scores: fp32 [B, K], K <= S, of the nuggets that are the first K keys; with gradient in training.
        scored: bool [B, Q, K], which queries have the term on which of them; None: all on all.

    Returns:
        [B, 1, Q, S] in the base's dtype, or one such mask per layer type where the base's layers differ.

    Raises:
        UnsupportedModelError: the attention backend takes no such masks.
    """
    if (backend := str(model.config._attn_implementation)) not in ("sdpa", "eager"):
        raise UnsupportedModelError(f"attention backend {backend!r} takes no masks by position; take attn_implementation='sdpa'")
    dtype = model.dtype
    queries, keys = query_positions[:, :, None], key_positions[:, None, :]
    causal = (keys <= queries) & (key_mask[:, None, :] if key_mask.ndim == 2 else key_mask)  # [B, Q, S]
    bias = None
    if scores is not None:
        term = straight_through(scores).to(dtype)[:, None, None, :]
        if scored is not None:
            term = torch.where(scored[:, None], term, torch.zeros_like(term))
        bias = torch.nn.functional.pad(term, (0, key_positions.shape[1] - scores.shape[1]))

    def additive(window: int | None) -> Tensor:
        allowed = causal if window is None else causal & (keys > queries - window)
        allowed = allowed | ~allowed.any(-1, keepdim=True)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        mask = mask.masked_fill(~allowed, torch.finfo(dtype).min)[:, None]
        return mask if bias is None else torch.where(allowed[:, None], mask + bias, mask)

    layer_types = getattr(model.config, "layer_types", None)
    windows = layer_windows(model.config)
    if layer_types is None:  # then the family's forward takes one mask for all layers
        return additive(windows[0])
    return {kind: additive(windows[layer_types.index(kind)]) for kind in dict.fromkeys(layer_types)}


@contextmanager
def windows_by_position(model: PreTrainedModel) -> Iterator[None]:
    """Within it, forward passes over a `NuggetCache` apply sliding windows by position.

    transformers counts a window in cache entries, which nuggets, having gaps, would stretch. Without windows this does nothing.
    """
    if not any(layer_windows(model.config)):
        yield
        return
    name = cache_argument(model)

    def by_position(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = kwargs.get(name)
        if not isinstance(cache, NuggetCache):
            return args, kwargs
        positions: Tensor = kwargs["position_ids"]
        mask = kwargs.get("attention_mask")
        fresh = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask[:, -positions.shape[1] :].bool()
        cache.extend(positions, fresh)
        masks = attention_masks(model, query_positions=positions, key_positions=cache.key_positions, key_mask=cache.key_mask)
        return args, {**kwargs, "attention_mask": masks}

    handle = backbone(model).register_forward_pre_hook(by_position, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
