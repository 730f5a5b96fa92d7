"""One answer in the making: from the next token's logits to a piece of text.

Each request has a generator of its own. Text comes in complete characters; stop texts never show.

Shapes: V vocabulary, K likeliest tokens.
"""

import math
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dodo.errors import DodoError
from dodo.pieces import IncrementalText
from dodo.serving.request import Piece, Request

__all__ = ["Answer", "StopTexts", "nucleus"]


COLDEST = 1e-5
"""Temperature below which the likeliest token is taken: divided by less, logits are no numbers any more."""


class Answer:
    """What a request has brought so far.

    Args:
        request: what was asked.
        tokenizer: the base's.
        ends: end tokens.
    """

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> None:
        self._request, self._ends = request, frozenset(ends) | request.ends
        self._tokens = self._length = 0
        behind = request.input_ids[-1] if request.goes_on and request.input_ids else None
        self._text, self._stops = IncrementalText(tokenizer, behind=behind), StopTexts(request.stop)
        self._greedy = request.temperature < COLDEST
        self._generator = torch.Generator()  # on the CPU wherever the model is, so that a seed means the same everywhere
        if request.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(request.seed)

    def take(self, logits: Tensor, *, highest: float, likeliest: int) -> tuple[int, Piece]:
        """Choose the next token.

        Args:
            logits: fp32 [V].
            highest: of them; NaN if one of them is.
            likeliest: the token that has it.

        Returns:
            The token, and what it brings.

        Raises:
            DodoError: the logits are no numbers.
        """
        if not math.isfinite(highest):
            raise DodoError(
                "the model gives logits that are no numbers: its weights are broken, or its type is too narrow for them"
            )
        token = likeliest if self._greedy else self._sample(logits)
        if token in self._ends:
            return token, Piece(None, self._rest()[0], finish="stop")
        self._tokens += 1
        offset, new = self._length, self._text.push(token)
        self._length += len(new)
        text, stopped = self._stops.push(new)
        last = not stopped and self._tokens == self._request.max_new_tokens
        if last:
            more, stopped = self._rest()
            text += more
        finish: Literal["stop", "length"] | None = "stop" if stopped else "length" if last else None
        if self._request.top_logprobs is None:
            return token, Piece(token, text, finish=finish, offset=offset)
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(self._request.top_logprobs, len(logits)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return token, Piece(token, text, float(logprobs[token]), top, finish, offset)

    def _rest(self) -> tuple[str, bool]:
        """What was held back, when no more tokens come, and whether a stop text ended it."""
        text, stopped = self._stops.push(self._text.rest())
        return (text, True) if stopped else (text + self._stops.rest(), False)

    def _sample(self, logits: Tensor) -> int:
        """By one random number, over the tokens in the vocabulary's order: so logits that differ by a rounding, as they do in
        other company or on another device, hardly ever give another token."""
        probabilities = (logits.cpu() / self._request.temperature).softmax(-1)
        tokens = nucleus(probabilities, self._request.top_p)
        reached = probabilities[tokens].double().cumsum(-1)
        chance = torch.rand(1, dtype=torch.float64, generator=self._generator) * reached[-1]
        return int(tokens[torch.searchsorted(reached, chance, right=True)])


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens, as few as have this much of the probability together.

    Args:
        probabilities: fp32 [V].
        top_p: above 0; 1: all that are possible.

    Returns:
        Token ids, int64 [K], ascending; at least one.

    >>> nucleus(torch.tensor([0.1, 0.5, 0.0, 0.4]), 0.8).tolist()
    [1, 3]
    """
    tokens = (probabilities > (1 - top_p) / len(probabilities)).nonzero()[:, 0]  # the others together have less than 1 - top_p
    if top_p == 1:
        return tokens
    likeliest, order = probabilities[tokens].sort(descending=True)
    before = likeliest.cumsum(-1) - likeliest
    return tokens[order[before < top_p].sort().values]


class StopTexts:
    """Holds back what may turn out to begin a stop text.

    >>> stops = StopTexts(["END"])
    >>> stops.push("the E"), stops.push("N"), stops.push("D of it")
    (('the ', False), ('', False), ('', True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What can be given with this much more text, and whether a stop text ended it."""
        text, self._held = self._held + text, ""
        if found := [at for stop in self._stops if (at := text.find(stop)) >= 0]:
            return text[: min(found)], True
        lengths = range(min(len(text), self._longest), 0, -1)
        if n := next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0):
            text, self._held = text[:-n], text[-n:]
        return text, False

    def rest(self) -> str:
        """What was held back, when the answer ends without a stop text."""
        held, self._held = self._held, ""
        return held
