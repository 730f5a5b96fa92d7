"""Answers as OpenAI's clients read them: whole and in chunks, of chats and of plain texts.

A format turns pieces of one choice into what that choice's chunk holds (`part`) and all of them into the whole (`choice`).
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dodo.serving.request import Piece

__all__ = ["ChatFormat", "Format", "TextFormat", "Usage"]


@dataclass(frozen=True)
class Usage:
    """What a request took, in tokens.

    prompt: read as they are, for all prompts.
    compressed: states that stand for texts, counted once for each prompt; they are part of what the API calls prompt_tokens.
    original: tokens that these texts had.
    """

    prompt: int
    compressed: int
    original: int

    def shown(self, completion: int) -> dict[str, Any]:
        """As the API says it."""
        prompt = self.prompt + self.compressed
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"original_tokens": self.original, "compressed_tokens": self.compressed},
        }


class Format(Protocol):
    """How one kind of completion is written."""

    @property
    def id(self) -> str:
        """Of the completion."""

    @property
    def whole(self) -> str:
        """What a whole one is called."""

    @property
    def chunk(self) -> str:
        """What a chunk is called."""

    def begun(self, index: int) -> dict[str, Any] | None:
        """A chunk's choice before any piece, or None."""

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk's choice with one piece."""

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole choice."""


@dataclass(frozen=True)
class ChatFormat:
    """Of `/v1/chat/completions`. token: the text of a token id."""

    token: Callable[[int], str]
    whole: str = "chat.completion"
    chunk: str = "chat.completion.chunk"
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")

    def begun(self, index: int) -> dict[str, Any] | None:
        """The role comes first, by itself."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """The text in `delta`."""
        delta = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs([piece]), "finish_reason": piece.finish}

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The text in `message`."""
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(pieces), "finish_reason": pieces[-1].finish}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        shown = [
            {**self._entry(piece.token_id, piece.logprob), "top_logprobs": [self._entry(*one) for one in piece.top or ()]}
            for piece in pieces
            if piece.logprob is not None and piece.token_id is not None
        ]
        return {"content": shown, "refusal": None} if shown else None

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.token(token_id)
        # a part of a character shows as this mark, whose bytes are not the token's
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class TextFormat:
    """Of `/v1/completions`.

    Args:
        token: the text of a token id.
    """

    whole = chunk = "text_completion"

    def __init__(self, token: Callable[[int], str]) -> None:
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self._token = token

    def begun(self, index: int) -> dict[str, Any] | None:
        """Nothing comes before the text."""
        return None

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """The text, and where in the whole it begins."""
        return self.choice(index, [piece])

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The text in `text`."""
        tokens: list[str] = []
        offsets: list[int] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        for piece in pieces:
            if piece.logprob is None or piece.token_id is None:
                continue
            tokens.append(self._token(piece.token_id))
            offsets.append(piece.offset)
            values.append(piece.logprob)
            best: dict[str, float] = {}
            for token, logprob in piece.top or ():  # best first; tokens of the same text are one entry
                best.setdefault(self._token(token), logprob)
            best.setdefault(tokens[-1], piece.logprob)  # one more, where it is none of the likeliest
            tops.append(best)
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets} if tokens else None
        text = "".join(piece.text for piece in pieces)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": pieces[-1].finish}
