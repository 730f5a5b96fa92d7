"""A conversation without end in bounded memory: the autoregressive LM (paper, Section 2.2), turn by turn.

    chat = Chat(dodo, dodo.autoregressive(ratio=10))
    for piece in chat.reply("Who are you?"):
        print(piece, end="")

The stream is kept from turn to turn, so nothing is read twice. The tokenizer's chat template is asked what stands between turns.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from dodo.autoregressive import Autoregressive
from dodo.errors import InputError
from dodo.generation import end_ids
from dodo.model import Dodo
from dodo.prompts import MESSAGE, check_whole, first_turn, next_turn, turn_ids
from dodo.streaming import StreamingCache, settings_of

__all__ = ["Chat"]


class Chat:
    """A conversation.

    Args:
        dodo: whose base has a chat template.
        lm: see `Dodo.autoregressive`; None: with the configured ratio.
        system: a message of the system, before the first turn.

    Attributes:
        cache: of all that was said, but for the last token of the last reply.
        complete: whether the last reply came to its end by itself.

    Raises:
        InputError: there is no chat template, or it takes no system message.
    """

    def __init__(self, dodo: Dodo, lm: Autoregressive | None = None, *, system: str | None = None) -> None:
        check_whole(system or "", "the system message")
        first_turn(dodo.tokenizer, MESSAGE, system=system)
        next_turn(dodo.tokenizer, MESSAGE)
        self.cache = StreamingCache(lm or dodo.autoregressive())
        self.complete = True
        self._dodo = dodo
        self._system = system
        self._unread: list[int] = []  # tokens of the conversation that are not in the cache
        self._ends = dodo.answer_ends

    def reply(self, message: str, *, max_new_tokens: int = 256, **generation: Any) -> Generator[str, None, None]:
        """Answer a message, piece by piece as the text comes. Closing the iterator ends the reply; the next turn follows it.

        Args:
            message: the user's; names of special tokens in it are text.
            max_new_tokens: at most so many tokens.
            generation: see `Dodo.write`.

        Raises:
            InputError: see `Dodo.write`; or the message has half a character in it. It is then not part of the conversation.
        """
        if self._ends and generation.get("eos_token_id") is None:
            generation["eos_token_id"] = self._ends
        settings, _ = settings_of(self.cache.lm, max_new_tokens, 0, generation)
        ids, before = self._turn(message), self.cache.tokens
        last, ends = _Last(), end_ids(settings.eos_token_id)
        generation["stopping_criteria"] = [*(generation.get("stopping_criteria") or ()), last]
        pieces = self._dodo.stream_text(ids, cache=self.cache, max_new_tokens=max_new_tokens, **generation)
        refused = False
        try:
            yield from pieces
        except InputError:
            refused = self.cache.tokens == before
            raise
        finally:
            pieces.close()
            if not refused:
                self._said(ids, before, last, ends)

    def _said(self, ids: list[int], before: int, last: "_Last", ends: list[int]) -> None:
        """Note what a reply leaves to be read by the next turn."""
        self._unread = ids[self.cache.tokens - before :]
        self.complete = last.token in ends
        if last.token is not None and not self.complete:
            self._unread = [last.token]

    def _turn(self, message: str) -> list[int]:
        """Token ids of all that is to be read before the reply."""
        tokenizer = self._dodo.tokenizer
        if self.cache.tokens or self._unread:
            return self._unread + turn_ids(tokenizer, next_turn(tokenizer, MESSAGE), message)
        return self._dodo.with_bos(turn_ids(tokenizer, first_turn(tokenizer, MESSAGE, system=self._system), message))


class _Last(StoppingCriteria):
    """Stops nothing, but knows the last token that was made."""

    def __init__(self) -> None:
        self.token: int | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.token = int(input_ids[0, -1])
        return torch.zeros(1, dtype=torch.bool, device=input_ids.device)
