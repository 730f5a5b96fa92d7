"""Dodo as an autoregressive LM: the parallel pass, for training and for scoring texts that fit the window.

Paper: Section 2.2. Tokens whose score exceeds a threshold are kept (Eq. 8) and projected with phi, all others with theta; a token
attends to recent tokens uncompressed and to kept ones further back (Eq. 9 and 10), tokens of a segment sharing the index at which
the text is split. `streaming` computes the same function a piece at a time, in bounded memory.

Shapes: B texts, T tokens, V vocabulary, d width.
"""

import copy
import itertools
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from dodo.architecture import FeatureLayers, backbone, device_of, layer_windows
from dodo.attention import attention_masks, cache_argument, check_gradient_backend, retain, turn
from dodo.compressor import Compressor
from dodo.errors import InputError, UnsupportedModelError, WindowError
from dodo.thresholds import Pace

__all__ = ["Autoregressive", "FeatureStream", "held_bytes"]


@dataclass(frozen=True, eq=False)
class Autoregressive:
    """A compressor used as a language model with bounded memory, and the settings of that use.

    A token in the segment that starts at position a sees, of what is not behind it: every token from a - `window` on; the kept
    tokens before that, the latest that `max_states` has room for; and, with the configuration's `keep_first`, the first token
    always, which counts as kept.

    compressor: base, adapters and scorer.
    threshold: Lambda, in the unit of the scores; -inf keeps all tokens, inf none. See `thresholds`. A `Pace` gives each segment
        its own, by what was kept of the text before it.
    window: tau, tokens before a segment that are seen uncompressed, at least 1.
    segment: tokens that share a splitting index, at least 1.
    feature_window: tokens that each layer below the scorer looks back on, itself counted; at most half the base's window. Of
        texts no longer than it, scores are exactly those of `Compressor.score`.
    max_states: tokens held at most: nuggets, window and segment; None: as many as the base's window holds.

    Raises:
        InputError: a setting is out of range.
        UnsupportedModelError: the attention backend takes no mask of its own.
    """

    compressor: Compressor
    threshold: float | Pace
    window: int = 128
    segment: int = 64
    feature_window: int = 512
    max_states: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "segment", "feature_window"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"{name} must be a whole number of at least 1, not {getattr(self, name)!r}")
        if not isinstance(self.threshold, Pace) and not (
            isinstance(self.threshold, numbers.Real) and not math.isnan(self.threshold)
        ):
            raise InputError(f"the threshold must be a number, not {self.threshold!r}")
        half = self.compressor.window // 2
        if self.window + self.segment > half:
            raise InputError(
                f"window and segment are {self.window + self.segment:,} tokens together; they can be at most {half:,}, half the "
                "base's window"
            )
        least = self.window + self.segment + self.keep_first + 1
        if self.max_states is not None and (type(self.max_states) is not int or self.max_states < least):
            raise InputError(
                f"max_states must be a whole number of at least {least:,} (window, segment, one nugget), not {self.max_states!r}"
            )
        backend = self.compressor.base.config._attn_implementation
        if backend not in ("sdpa", "eager"):
            raise UnsupportedModelError(f"attention backend {backend!r} takes no mask of what was kept; use 'sdpa' or 'eager'")
        object.__setattr__(self, "feature_window", min(self.feature_window, half))

    @property
    def keep_first(self) -> bool:
        """Whether the first token is always seen."""
        return self.compressor.config.keep_first

    @property
    def capacity(self) -> int:
        """Nuggets held at most, the first token not counted."""
        return (self.max_states or self.compressor.window) - self.window - self.segment - self.keep_first

    @property
    def longest(self) -> int:
        """Tokens of the longest text for the parallel pass: the whole segments that the base's window holds."""
        return self.compressor.window // self.segment * self.segment

    # -- selection

    def score(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Scores from features that look back on the last `feature_window` tokens in each layer. Paper: Eq. 6.

        They do not depend on what is kept, so all of a text can be scored at once.

        Args:
            input_ids: int64 [B, T]; of any length without a mask.
            attention_mask: [B, T], 0 for padding on either side.

        Returns:
            fp32 [B, T], with gradient to the scorer only.

        Raises:
            WindowError: a padded text is longer than the base's window.
        """
        scorer = self.compressor.scorer
        if attention_mask is None:
            return scorer(FeatureStream(self)(input_ids))
        real = attention_mask.bool()
        positions = _positions(real)
        if int(positions.max()) >= self.compressor.window:
            raise WindowError(
                f"padded texts can't be longer than the base's window of {self.compressor.window:,}; score them singly"
            )
        masks = _feature_masks(self, positions, positions, real)
        features = FeatureLayers(self.compressor.base, self.compressor.config.feature_layer)
        with self.compressor.adapters.use(None):
            return scorer(features(input_ids, attention_mask=masks, position_ids=positions))

    def threshold_at(self, owed: float) -> float:
        """Lambda of a segment before which so many nuggets are owed; see `owed_behind`."""
        return self.threshold.at(owed) if isinstance(self.threshold, Pace) else self.threshold

    def owed_behind(self, owed: float, *, tokens: int, kept: int) -> float:
        """Nuggets owed behind a segment, see `Pace.settle`; nothing where the threshold does not follow the text."""
        return self.threshold.settle(owed, tokens=tokens, kept=kept) if isinstance(self.threshold, Pace) else 0.0

    def keep(self, scores: Tensor, real: Tensor | None = None, *, origin: int = 0) -> Tensor:
        """Which tokens are kept for their score, alpha of Eq. 8.

        Args:
            scores: floating [B, T].
            real: bool [B, T], false for padding on either side.
            origin: a position at which a segment starts.

        Returns:
            bool [B, T].
        """
        if not isinstance(self.threshold, Pace):
            return scores > self.threshold
        own = scores.detach().cpu()  # one copy, for each segment hangs on those before it
        if bool(own.isnan().any()):
            raise InputError("the scorer gives scores that are no numbers: its weights, or the base's, are damaged")
        kept = torch.zeros_like(own, dtype=torch.bool)
        rows = [slice(None)] * len(own) if real is None else list(real.cpu())
        for row, places in enumerate(rows):
            kept[row, places] = self._keep_one(own[row, places], origin)
        return kept.to(scores.device)

    def _keep_one(self, scores_T: Tensor, origin: int) -> Tensor:
        kept = torch.zeros_like(scores_T, dtype=torch.bool)
        starts = range(origin % self.segment, len(scores_T), self.segment)
        owed = 0.0
        for start, end in itertools.pairwise(sorted({0, *starts, len(scores_T)})):
            kept[start:end] = scores_T[start:end] > self.threshold_at(owed)
            compete = max(start, int(self.keep_first))
            owed = self.owed_behind(owed, tokens=end - compete, kept=int(kept[compete:end].sum()))
        return kept

    @torch.no_grad()
    def sampled_scores(self, texts: Iterable[Sequence[int]]) -> Tensor:
        """Scores of all tokens of some texts, kept first ones left out: what thresholds are estimated from, and tried on.

        Args:
            texts: token ids, of any length; those of none, or of a kept first one alone, have no scores.

        Returns:
            fp32 [n].
        """
        device = device_of(self.compressor.base)
        rows = (torch.tensor([list(text)], device=device) for text in texts if len(text) > self.keep_first)
        scores = [self.score(row)[0, self.keep_first :] for row in rows]
        return torch.cat(scores) if scores else torch.empty(0, device=device)

    # -- the parallel pass

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scores: Tensor | None = None,
        kept: Tensor | None = None,
        origin: int = 0,
        states: bool = False,
    ) -> Tensor:
        """Logits of the token behind each token, in one pass over whole texts. Paper: Eq. 8 to 10, and Eq. 18 with gradients.

        The straight-through term stands on the attention to nuggets left of the window; not on that to the first token, which
        `keep_first` shows whatever its score.

        Args:
            input_ids: int64 [B, T].
            attention_mask: [B, T], 0 for padding on either side.
            scores: fp32 [B, T], takes the place of the scorer's.
            kept: bool [B, T], takes the place of Eq. 8's choice, whatever the scores, which still get the term.
            origin: a position at which a segment starts.
            states: leave out the language-model head, and return the states that it would read.

        Returns:
            [B, T, V], or [B, T, d] for states, in the base's dtype; at padding without meaning.

        Raises:
            WindowError: a text is longer than `longest`.
            UnsupportedModelError: the attention backend takes no such mask, or would drop the straight-through term.
        """
        compressor, base = self.compressor, self.compressor.base
        check_gradient_backend(base)
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if int(real.sum(-1).max()) > self.longest:
            raise WindowError(
                f"a text of {int(real.sum(-1).max()):,} tokens is longer than the {self.longest:,} that fit the base's window "
                "in one pass; stream it"
            )
        if scores is None:
            scores = self.score(input_ids, attention_mask)
        positions = _positions(real)
        first = real & (positions == 0) & self.keep_first
        kept = (self.keep(scores, real, origin=origin) if kept is None else kept) & real
        left = (positions - origin).div(self.segment, rounding_mode="floor") * self.segment + origin - self.window
        recent = positions[:, None, :] >= left[:, :, None]  # [B, queries, keys]: left is where each query's window starts
        nuggets = self._nuggets((kept & ~first)[:, None, :] & ~recent)
        masks = attention_masks(
            base,
            query_positions=positions,
            key_positions=positions,
            key_mask=real[:, None, :] & (recent | nuggets | first[:, None, :]),
            scores=scores if torch.is_grad_enabled() and scores.requires_grad else None,
            scored=nuggets,
        )
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": masks,
            "position_ids": positions,
            "use_cache": False,
        }
        with compressor.adapters.mixed(kept | first):
            if states:
                hidden: Tensor = backbone(base)(**inputs).last_hidden_state
                return hidden
            logits: Tensor = base(**inputs).logits
        return logits

    def _nuggets(self, candidates: Tensor) -> Tensor:
        """Of kept tokens left of each query's window, bool [B, queries, keys], the latest that there is room for."""
        if self.max_states is None:
            return candidates
        later = candidates.sum(-1, keepdim=True) - candidates.cumsum(-1)
        return candidates & (later < self.capacity)


class FeatureStream:
    """The scorer's features of texts that come in pieces, under causal attention over the last tokens, in bounded memory.

    Args:
        lm: whose base and `feature_window`.
    """

    def __init__(self, lm: Autoregressive) -> None:
        self._lm = lm
        self._layers = FeatureLayers(lm.compressor.base, lm.compressor.config.feature_layer)
        self._cache = DynamicCache()
        self._next_position = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "FeatureStream":
        """A copy of what is held; the model is the same."""
        memo |= {id(self._lm): self._lm, id(self._layers): self._layers}
        copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @property
    def states(self) -> int:
        """Tokens held."""
        return self._cache.get_seq_length()

    @property
    def nbytes(self) -> int:
        """Memory of the keys and values held."""
        return held_bytes(self._cache)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """Features of the tokens that follow what has come so far.

        Args:
            input_ids: int64 [B, T], B the same in each call.

        Returns:
            [B, T, d], in the base's dtype, without gradient.
        """
        window = self._lm.feature_window
        most = min(2 * window, self._lm.compressor.window - window)  # masks grow with a piece's square
        with self._lm.compressor.adapters.use(None):
            return torch.cat([self._piece(piece) for piece in input_ids.split(most, dim=1)], dim=1)

    def _piece(self, input_ids: Tensor) -> Tensor:
        lm, T = self._lm, input_ids.shape[1]
        base = lm.compressor.base
        self._forget()
        if self._next_position + T > lm.compressor.window:
            self._turn_back(self._next_position - self.states)
        held = self.states
        start = self._next_position - held
        positions = torch.arange(start, self._next_position + T, device=device_of(base)).expand(input_ids.shape[0], -1)
        inputs: dict[str, Any] = {cache_argument(base): self._cache, "position_ids": positions[:, held:], "use_cache": True}
        if held + T > lm.feature_window or any(layer_windows(base.config)):
            inputs["attention_mask"] = _feature_masks(lm, positions[:, held:], positions, torch.ones_like(positions).bool())
        self._next_position += T
        return self._layers(input_ids, **inputs)

    def _forget(self) -> None:
        too_many = self.states - (self._lm.feature_window - 1)
        if too_many > 0:
            retain(self._cache, slice(too_many, None))

    def _turn_back(self, delta: int) -> None:
        turn(self._cache, torch.full((self.states,), -delta), self._lm.compressor.rotary)
        self._next_position -= delta


def held_bytes(cache: DynamicCache) -> int:
    """Memory of a cache's keys and values."""
    layers: Any = cache.layers
    return sum(x.nbytes for layer in layers for x in (layer.keys, layer.values) if x is not None)


def _feature_masks(lm: Autoregressive, queries: Tensor, keys: Tensor, real: Tensor) -> Any:
    near = keys[:, None, :] > queries[:, :, None] - lm.feature_window
    return attention_masks(lm.compressor.base, query_positions=queries, key_positions=keys, key_mask=near & real[:, None, :])


def _positions(real: Tensor) -> Tensor:
    return (real.cumsum(-1) - 1).clamp_min(0)
