"""*Compressive*, the paper's baseline as a language model: past tokens pooled evenly, by the mean, in every layer.

Paper: Section 5.1, after Rae et al. (2020). The keys and values of each r consecutive past tokens become one state; recent
tokens are seen whole; a LoRA (theta) decodes. Where `Autoregressive` selects, this averages; the rest of the two is the same.
The mean is that of the keys before their rotation, turned to the last position of their group: averaging keys and values is
averaging the hidden states that they are projected from, as long as nothing but a projection is in between (Qwen 3 and Gemma 3
normalise keys first).

Nothing of a family's attention is replaced: the groups stand in a cache, in front of the tokens' own keys, under a mask by
position.

Shapes: B texts, T tokens, G groups, V vocabulary, d width, H key/value heads, D head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dodo.adapters import THETA
from dodo.architecture import backbone
from dodo.attention import attention_masks, cache_argument
from dodo.compressor import Compressor
from dodo.errors import InputError, UnsupportedModelError, WindowError
from dodo.rotary import Rotary

__all__ = ["Compressive"]


@dataclass(frozen=True, eq=False)
class Compressive:
    """A base with theta as a language model that averages its past, and the settings of that use.

    A token in the segment that starts at position a sees, of what is not behind it: every token from a - `window` on, those of a
    group that reaches into the window included, so `window` to `window` + r - 1; one state for each group before that, the latest
    `max_groups` of them; and, with the configuration's `keep_first`, the first token always, which is in no group. A layer with a
    sliding window sees the groups whose last token lies within it.

    compressor: base and theta; phi and scorer are not used.
    ratio: r, tokens in a group, at least 1.
    window: tau, tokens before a segment that are seen whole, at least 1.
    segment: tokens that share a splitting index, at least 1.
    max_groups: groups held at most; None: as many as there are.

    Raises:
        InputError: a setting is out of range.
        UnsupportedModelError: the attention backend takes no mask of its own.
    """

    compressor: Compressor
    ratio: int = 10
    window: int = 128
    segment: int = 64
    max_groups: int | None = None

    def __post_init__(self) -> None:
        for name in ("ratio", "window", "segment", "max_groups"):
            value = getattr(self, name)
            if not (name == "max_groups" and value is None) and (type(value) is not int or value < 1):
                raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")
        backend = self.compressor.base.config._attn_implementation
        if backend not in ("sdpa", "eager"):
            raise UnsupportedModelError(f"attention backend {backend!r} takes no mask of pooled states; use 'sdpa' or 'eager'")

    @property
    def keep_first(self) -> bool:
        """Whether the first token is always seen."""
        return self.compressor.config.keep_first

    def seen(self, tokens: int, *, origin: int = 0) -> Tensor:
        """What each token sees.

        Args:
            tokens: T.
            origin: a position at which a segment starts.

        Returns:
            bool [T, G + T]: groups, then tokens.
        """
        first, r = int(self.keep_first), self.ratio
        query = torch.arange(tokens)[:, None]
        left = (query - origin).div(self.segment, rounding_mode="floor") * self.segment + origin - self.window
        pooled = ((left - first).clamp_min(0) // r).clamp_max(self._groups(tokens))  # [T, 1], groups left of the window
        group, token = torch.arange(self._groups(tokens))[None], torch.arange(tokens)[None]
        groups = group < pooled
        if self.max_groups is not None:
            groups &= group >= pooled - self.max_groups
        whole = (token <= query) & ((token >= first + pooled * r) | (token < first))
        return torch.cat([groups, whole], dim=1)

    def forward(self, input_ids: Tensor, *, origin: int = 0, states: bool = False) -> Tensor:
        """Logits of the token behind each token, in one pass over whole texts, with gradient to theta.

        Args:
            input_ids: int64 [B, T], without padding on the left; on the right causal attention never sees it.
            origin: a position at which a segment starts.
            states: leave out the language-model head, and return the states that it would read.

        Returns:
            [B, T, V], or [B, T, d] for states, in the base's dtype.

        Raises:
            WindowError: a text is longer than the base's window.
        """
        base, (B, T) = self.compressor.base, input_ids.shape
        if self.compressor.window < T:
            raise WindowError(f"a text of {T:,} tokens is longer than the base's window of {self.compressor.window:,}")
        first, groups = int(self.keep_first), self._groups(T)
        positions = torch.arange(T, device=input_ids.device)
        lasts = first + self.ratio - 1 + self.ratio * torch.arange(groups, device=input_ids.device)
        masks = attention_masks(
            base,
            query_positions=positions[None],
            key_positions=torch.cat([lasts, positions])[None],
            key_mask=self.seen(T, origin=origin).to(input_ids.device)[None],
        )
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": masks,
            "position_ids": positions.expand(B, -1),
            "use_cache": True,
            cache_argument(base): _PoolingCache(self.compressor.rotary, ratio=self.ratio, first=first, groups=groups),
        }
        with self.compressor.adapters.use(THETA):
            if states:
                hidden: Tensor = backbone(base)(**inputs).last_hidden_state
                return hidden
            logits: Tensor = base(**inputs).logits
        return logits

    def _groups(self, tokens: int) -> int:
        return max(0, tokens - int(self.keep_first)) // self.ratio


class _PoolingCache(DynamicCache):
    """The cache of a single forward pass, which shows each layer its groups in front of its tokens, and holds nothing."""

    def __init__(self, rotary: Rotary, *, ratio: int, first: int, groups: int) -> None:
        super().__init__()
        self.layers: list[Any] = [_PoolingLayer(rotary, i, ratio, first, groups) for i in range(len(rotary.layers))]


class _PoolingLayer(DynamicLayer):
    def __init__(self, rotary: Rotary, layer: int, ratio: int, first: int, groups: int) -> None:
        super().__init__()
        self.rotary, self.layer, self.ratio, self.first, self.groups = rotary, layer, ratio, first, groups

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, G + T, D] of T tokens. Each key is turned to its group's last position: a mean of turned keys is
        the mean, turned."""
        if not self.groups:
            return key_states, value_states
        here = slice(self.first, self.first + self.groups * self.ratio)
        within = torch.arange(self.groups * self.ratio, device=key_states.device) % self.ratio
        turned = self.rotary.rotate(key_states[:, :, here], (self.ratio - 1 - within)[None], layer=self.layer)
        return torch.cat([self._mean(turned), key_states], 2), torch.cat([self._mean(value_states[:, :, here]), value_states], 2)

    def _mean(self, states: Tensor) -> Tensor:
        return states.unflatten(2, (self.groups, self.ratio)).mean(3)
