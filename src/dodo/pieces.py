"""Text as its tokens come, in fixed memory and time for each.

transformers' own streamer decodes everything since the last line break again for each token; this one the last few tokens.
"""

from collections.abc import Iterator
from queue import SimpleQueue

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

__all__ = ["Pieces"]

FEW = 12
"""Tokens that are decoded again, so that the next one's text stands behind theirs: 12 bytes are whole characters of 1 to 4."""

UNKNOWN = "\ufffd"
"""What bytes are decoded to that are no character, or none yet."""


class Pieces(BaseStreamer):
    """A streamer for `generate`, in one thread, whose pieces are read in another; one for each token, maybe empty.

    Joined they are the text of all the tokens, special ones left out. A character whose bytes come in several tokens is held back
    until it is whole.

    Args:
        tokenizer: which decodes.
        skip_prompt: the first tokens that come are not new.
        behind: the token that the text goes on behind: some tokenizers leave out a text's first space. None: a text of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_prompt: bool, behind: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_prompt
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._ids: list[int] = []  # the last tokens
        self._given = ""  # what was given of their text
        if behind is not None and UNKNOWN not in (before := self._decoded([behind])):
            self._ids, self._given = [behind], before

    def put(self, value: Tensor) -> None:
        """Take the prompt, or the next tokens of one text."""
        if self._skip:
            self._skip = False
            return
        self._ids += value.flatten().tolist()
        text = self._decoded(self._ids)
        whole = text.rstrip(UNKNOWN)
        if len(text) - len(whole) > FEW:  # too many bytes for a character that is still to come
            whole = text[:-1]
        self._give(whole)
        if len(self._ids) > 2 * FEW:
            self._forget(text)

    def end(self) -> None:
        """Give what was held back, and end."""
        self._give(self._decoded(self._ids))
        self.stop()

    def stop(self) -> None:
        """End."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queue.get, None)

    def _give(self, text: str) -> None:
        more = text.startswith(self._given)  # else a character that was whole waits for the bytes behind it
        self._queue.put(text[len(self._given) :] if more else "")
        if more:
            self._given = text

    def _forget(self, text: str) -> None:
        """All but the last few tokens, where these have the same text by themselves."""
        tail = self._decoded(self._ids[-FEW:])
        given = len(tail) - (len(text) - len(self._given))
        if given > 0 and text.startswith(self._given) and text.endswith(tail):
            self._ids, self._given = self._ids[-FEW:], tail[:given]

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
