"""Ways to write on with a bounded number of states of the text before: the whole of its end, selected, or averaged.

Paper: Section 5 (Dodo, Compressive, Full). A row is a stretch of history, read afresh, and behind it a segment whose next
tokens are scored. Before the segment a method holds at most S states, and with `keep_first` one more, the text's first token,
for every method alike; the segment's own earlier tokens are seen in addition.

Shapes: B rows, T tokens of a row, M tokens of its segment, V vocabulary, d width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dodo.adapters import THETA
from dodo.architecture import backbone, token_nats
from dodo.autoregressive import Autoregressive
from dodo.compressive import Compressive
from dodo.errors import InputError
from dodo.model import Dodo
from dodo.selection import count_nuggets, every
from dodo.thresholds import Pace

__all__ = [
    "LANGUAGE_MODELS",
    "Averaged",
    "LanguageModel",
    "Scored",
    "Selected",
    "Tail",
    "history_of",
    "make_language_model",
    "whole_of",
]


@dataclass(frozen=True)
class Scored:
    """What a language model makes of rows.

    nats: fp32 [B, M], -log p of each target. states: int64 [B], held before the segment.
    """

    nats: Tensor
    states: Tensor


class LanguageModel(Protocol):
    """What the perplexity task needs."""

    name: str

    def history(self, states: int) -> int:
        """Tokens before a segment that are read to hold S states; the text's first token is not counted where it is kept."""
        ...

    def score(self, rows: Tensor, targets: Tensor, states: int) -> Scored:
        """Read rows, int64 [B, T], and score what follows each of their last M tokens, int64 [B, M], with S states held."""
        ...


class Tail:
    """Full: the last S tokens and no others; by the base, or with theta."""

    def __init__(self, dodo: Dodo, *, name: str = "full", theta: bool = False) -> None:
        self.dodo, self.name, self.theta = dodo, name, theta

    def history(self, states: int) -> int:
        return states

    @torch.no_grad()
    def score(self, rows: Tensor, targets: Tensor, states: int) -> Scored:
        compressor, M = self.dodo.compressor, targets.shape[1]
        with compressor.adapters.use(THETA if self.theta else None):
            read: Any = backbone(compressor.base)(input_ids=rows, use_cache=False)
        return Scored(_nats(self.dodo, read.last_hidden_state, targets), torch.full((len(rows),), rows.shape[1] - M))


class Selected:
    """Dodo: the last tau tokens whole, and up to S - tau nuggets of the r (S - tau) tokens before them.

    Args:
        ratio: r, a whole number.
        share: tau / S.
        choice: by a threshold that follows the text (`Pace`), or by one and the same for all texts (Eq. 8): the number of nuggets
            varies, the latest S - tau are held at most; the r-th part with the highest scores, so that there are exactly S - tau
            of a whole history; or every r-th token.

    Attributes:
        threshold: Lambda, fixed or following; None where it does not select.

    Raises:
        InputError: there are no thresholds.
    """

    def __init__(
        self,
        dodo: Dodo,
        *,
        ratio: int,
        share: float = 0.5,
        choice: Literal["dodo", "threshold", "top-k", "stride"] = "dodo",
    ) -> None:
        self.dodo, self.ratio, self.share = dodo, ratio, share
        self.name: str = choice
        self.threshold: float | Pace | None = None
        known = dodo.thresholds
        self._features = 512 if known is None else known.feature_window
        if choice in ("dodo", "threshold"):
            if known is None:
                raise InputError(
                    f"these adapters have no thresholds, by which method {choice} selects: estimate them with dodo calibrate, "
                    "or take --method top-k"
                )
            self.threshold = Pace(known, ratio) if choice == "dodo" and ratio > 1 else known.at(ratio)

    def history(self, states: int) -> int:
        return history_of(states, self.share, self.ratio)

    @torch.no_grad()
    def score(self, rows: Tensor, targets: Tensor, states: int) -> Scored:
        compressor, M = self.dodo.compressor, targets.shape[1]
        first, start = int(compressor.config.keep_first), rows.shape[1] - M
        lm = Autoregressive(
            compressor,
            threshold=-math.inf if self.threshold is None else self.threshold,
            window=whole_of(states, self.share),
            segment=M,
            feature_window=self._features,
            max_states=states + M + first,
        )
        left = max(0, start - lm.window)
        scores = lm.score(rows)
        kept = self._kept(lm, scores, slice(first, max(first, left)), origin=start)
        hidden = lm.forward(rows, scores=scores, kept=kept, origin=start, states=True)
        nuggets = kept[:, first : max(first, left)].sum(-1).clamp_max(lm.capacity)
        return Scored(_nats(self.dodo, hidden, targets), (min(first, left) + nuggets + start - left).cpu())

    def _kept(self, lm: Autoregressive, scores: Tensor, history: slice, *, origin: int) -> Tensor:
        """bool [B, T]; `history` are the tokens whose selection counts for the segment, which starts at `origin`."""
        if self.threshold is not None:
            return lm.keep(scores, origin=origin)
        if self.name == "stride":
            places = torch.arange(scores.shape[1], device=scores.device) - history.start
            return every(places, ratio=self.ratio).expand(scores.shape)
        before = scores[:, history]
        if not before.shape[1]:
            return torch.zeros_like(scores, dtype=torch.bool)
        least = before.topk(count_nuggets(before.shape[1], ratio=self.ratio)).values[:, -1:]
        return scores >= least


class Averaged:
    """Compressive: the last tau tokens whole, and S - tau means of r tokens each. Of a short history, the oldest tokens
    that would make less than a group are left out: whole, they would be states beyond S.

    Args:
        ratio: r, a whole number.
        share: tau / S.
    """

    def __init__(self, dodo: Dodo, *, ratio: int, share: float = 0.5) -> None:
        self.dodo, self.ratio, self.share, self.name = dodo, ratio, share, "compressive"

    def history(self, states: int) -> int:
        return history_of(states, self.share, self.ratio)

    @torch.no_grad()
    def score(self, rows: Tensor, targets: Tensor, states: int) -> Scored:
        M, whole, first = targets.shape[1], whole_of(states, self.share), int(self.dodo.config.keep_first)
        start = rows.shape[1] - M
        odd = max(0, start - whole - first) % self.ratio
        rows, start = torch.cat([rows[:, :first], rows[:, first + odd :]], dim=1), start - odd
        lm = Compressive(self.dodo.compressor, ratio=self.ratio, window=whole, segment=M, max_groups=states - whole)
        held = int(lm.seen(rows.shape[1], origin=start)[start].sum()) - 1  # but for the segment's first token itself
        hidden = lm.forward(rows, origin=start, states=True)
        return Scored(_nats(self.dodo, hidden, targets), torch.full((len(rows),), held))


LANGUAGE_MODELS: dict[str, Callable[[Dodo, int, float], LanguageModel]] = {
    "dodo": lambda dodo, ratio, share: Selected(dodo, ratio=ratio, share=share),
    "threshold": lambda dodo, ratio, share: Selected(dodo, ratio=ratio, share=share, choice="threshold"),
    "top-k": lambda dodo, ratio, share: Selected(dodo, ratio=ratio, share=share, choice="top-k"),
    "stride": lambda dodo, ratio, share: Selected(dodo, ratio=ratio, share=share, choice="stride"),
    "compressive": lambda dodo, ratio, share: Averaged(dodo, ratio=ratio, share=share),
    "full": lambda dodo, ratio, share: Tail(dodo),
    "theta": lambda dodo, ratio, share: Tail(dodo, name="theta", theta=True),
}
"""By name: from a model, a ratio and the share of whole tokens."""


def make_language_model(name: str, dodo: Dodo, ratio: float, share: float = 0.5) -> LanguageModel:
    """A language model by its name.

    Raises:
        InputError: there is none of that name, a ratio that is not a whole number, or no thresholds for it.
    """
    if name not in LANGUAGE_MODELS:
        raise InputError(f"method {name!r} can't do task perplexity; methods are {', '.join(LANGUAGE_MODELS)}")
    if ratio != int(ratio):
        raise InputError(f"perplexity needs a whole number of tokens per state, not ratio {ratio:g}")
    return LANGUAGE_MODELS[name](dodo, int(ratio), share)


def whole_of(states: int, share: float) -> int:
    """tau: how many of S states are whole tokens.

    Raises:
        InputError: that is no whole number, or none of them is whole, or all are.

    >>> whole_of(64, 0.875)
    56
    """
    whole = round(states * share)
    if not 0 < whole < states or abs(whole - states * share) > 1e-6:
        raise InputError(f"of {states} states, a share of {share:g} can't be whole tokens: that makes {states * share:g} of them")
    return whole


def history_of(states: int, share: float, ratio: float) -> int:
    """Tokens that S states are made of, tau of them whole, of the others r in each."""
    whole = whole_of(states, share)
    return int(whole + ratio * (states - whole))


def _nats(dodo: Dodo, hidden: Tensor, targets: Tensor) -> Tensor:
    """fp32 [B, M], of hidden states [B, T, d] whose last M are those of the segment."""
    return token_nats(dodo.compressor.base, hidden[:, -targets.shape[1] :], targets).cpu()
