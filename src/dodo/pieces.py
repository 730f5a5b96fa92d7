"""Text as its tokens come, in fixed memory and time for each.

transformers' own streamer decodes everything since the last line break again for each token; this one the last few tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from queue import SimpleQueue

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

__all__ = ["IncrementalText", "Pieces"]

FEW = 12
"""Tokens that are decoded again, so that the next one's text stands behind theirs: 12 bytes are whole characters of 1 to 4."""

LONGEST = 4
"""Bytes of a character, at most."""

UNKNOWN = "\ufffd"
"""What bytes are decoded to that are no character, or none yet."""


class IncrementalText:
    """The text of tokens that come one after another, in complete characters.

    What `push` returns for each token and `rest` in the end, joined, is the text of all the tokens, special ones left out. A
    character whose bytes come in several tokens is held back until it is whole.

    Args:
        tokenizer: which decodes.
        behind: the token that the text goes on behind: some tokenizers leave out a text's first space. None: a text of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, behind: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the last tokens
        self._given = ""  # what was given of their text
        self._pushed = 0  # tokens since their text began with that
        if behind is not None and UNKNOWN not in (before := self._decoded([behind])):
            self._ids, self._given = [behind], before

    def push(self, token: int) -> str:
        """What is certain with one token more, and was not before; often empty."""
        self._ids.append(token)
        text = self._decoded(self._ids)
        whole = text.rstrip(UNKNOWN)
        if len(text) - len(whole) > FEW:  # too many bytes for a character that is still to come
            whole = text[:-1]
        new = self._more(whole, unknown=text.endswith(UNKNOWN))
        if len(self._ids) > 2 * FEW:
            self._forget(text)
        return new

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        return self._more(self._decoded(self._ids), unknown=False)

    def _more(self, text: str, *, unknown: bool) -> str:
        """unknown: whether bytes that are no character come last."""
        if text.startswith(self._given):
            self._pushed = 0
        else:  # some decoders take characters that were whole for unknown bytes, until those behind them are a character too
            self._pushed += 1
            if unknown and self._pushed < LONGEST:
                return ""
            same = takewhile(bool, (one == two for one, two in zip(text, self._given, strict=False)))
            self._given = self._given[: sum(same)]  # and these will not be
        new, self._given = text[len(self._given) :], text
        return new

    def _forget(self, text: str) -> None:
        """All but the last few tokens, where these have the same text by themselves."""
        tail = self._decoded(self._ids[-FEW:])
        given = len(tail) - (len(text) - len(self._given))
        if given > 0 and text.startswith(self._given) and text.endswith(tail):
            self._ids, self._given = self._ids[-FEW:], tail[:given]

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Pieces(BaseStreamer):
    """A streamer for `generate`, in one thread, whose pieces are read in another: one for each token, maybe empty, and the rest.

    Args:
        tokenizer, behind: see `IncrementalText`.
        skip_prompt: the first tokens that come are not new.
        ends: tokens that are no text: they end it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, skip_prompt: bool, behind: int | None = None, ends: Sequence[int] = ()
    ) -> None:
        self._text = IncrementalText(tokenizer, behind=behind)
        self._skip = skip_prompt
        self._ends = frozenset(ends)
        self._queue: SimpleQueue[str | None] = SimpleQueue()

    def put(self, value: Tensor) -> None:
        """Take the prompt, or the next tokens of one text."""
        if self._skip:
            self._skip = False
            return
        for token in value.flatten().tolist():
            self._queue.put("" if token in self._ends else self._text.push(token))

    def end(self) -> None:
        """Give what was held back, and end."""
        self._queue.put(self._text.rest())
        self.stop()

    def stop(self) -> None:
        """End."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queue.get, None)
