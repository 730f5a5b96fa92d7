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
from dodo.serving.request import Piece, Request

__all__ = ["Answer", "IncrementalText", "StopTexts", "nucleus"]


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
        self._request, self._ends, self._tokens = request, frozenset(ends) | request.ends, 0
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
            return token, Piece(None, self._stops.rest(), finish="stop")
        self._tokens += 1
        text, stopped = self._stops.push(self._text.push(token))
        finish: Literal["stop", "length"] | None = "stop" if stopped else None
        if finish is None and self._tokens == self._request.max_new_tokens:
            text, finish = text + self._stops.rest(), "length"
        if self._request.top_logprobs is None:
            return token, Piece(token, text, finish=finish)
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(min(self._request.top_logprobs, len(logits)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return token, Piece(token, text, float(logprobs[token]), top, finish)

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


class IncrementalText:
    """The text of a growing list of tokens, in complete characters.

    Joined, the pieces are the tokens' text, special tokens left out, but for an incomplete character at its end.

    Args:
        tokenizer: which decodes.
        behind: the token that the text goes on behind: some tokenizers leave out a text's first space. None: a text of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, behind: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = [] if behind is None else [behind]
        self._start = 0  # decoded are the tokens from here
        self._read = len(self._ids)  # those up to here are context, and known
        self._known = len(self._decode(0))  # characters of that which have been given
        if self._known and self._decode(0).endswith("\ufffd"):  # half a character
            self._ids, self._read, self._known = [], 0, 0

    def push(self, token: int) -> str:
        """What is certain with one token more, and was not before."""
        self._ids.append(token)
        whole = self._decode(self._start)
        certain = whole.rstrip("\ufffd")  # the beginning of a character shows as this mark
        new = certain[self._known :]
        self._known = max(self._known, len(certain))
        if new and certain == whole:
            self._start, self._read = self._read, len(self._ids)
            self._known = len(self._decode(self._start))
        return new

    def _decode(self, start: int) -> str:
        ids = self._ids[start:]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


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
