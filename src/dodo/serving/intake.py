"""What comes in for the compressor: documents to keep or to look at, files of nuggets, long messages of a conversation."""

import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dodo.config import Use
from dodo.errors import FingerprintMismatch, InputError, NuggetsFileError, QueueFull
from dodo.inspection import Placed
from dodo.model import Dodo
from dodo.nuggets import Nuggets
from dodo.prompts import check_whole
from dodo.serving.engine import Engine
from dodo.serving.held import Held
from dodo.serving.progress import reporting
from dodo.serving.prompting import Prompting, Turn
from dodo.serving.settings import Settings
from dodo.serving.shared import Shared
from dodo.serving.store import full_disk_said

__all__ = ["Conversation", "Intake", "Scored", "TooLong"]

_TURN_MEMORY = 256 * 1024**2
"""Bytes of nuggets of messages; conversations come back with each turn."""

_SCORE_MEMORY, _TOKEN_BYTES = 64 * 1024**2, 400
"""Bytes of scored texts, which are looked at with one ratio after another; and of one token of these, about."""

_LEFT_OUT = "[...]"
"""In the place of a message that stands above as nuggets."""

T = TypeVar("T")


class TooLong(InputError):
    """A text has more tokens than the server takes."""


@dataclass(frozen=True)
class Scored:
    """T tokens of a text, and their scores, fp32 [T]."""

    placed: Placed
    scores: Tensor


@dataclass(frozen=True)
class Conversation:
    """What became of a conversation: the nuggets of its long messages, and the turns that are left."""

    nuggets: tuple[Nuggets, ...]
    turns: tuple[Turn, ...]


class Intake:
    """Compresses on the model's thread. For one event loop.

    Args:
        dodo, engine, prompting: the model, its thread, its tokenizer.
        settings: limits, and when and how messages are compressed.
        compressed: told the number of tokens of each text that was.
    """

    def __init__(
        self,
        dodo: Dodo,
        engine: Engine,
        prompting: Prompting,
        settings: Settings,
        *,
        compressed: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._dodo, self._engine, self._prompting, self._settings = dodo, engine, prompting, settings
        self._compressed = compressed
        self._waiting = 0
        self._messages: Held[Nuggets] = Held(_TURN_MEMORY)
        self._compressing: Shared[Nuggets] = Shared()
        self._scored: Held[Scored] = Held(_SCORE_MEMORY)

    async def document(
        self,
        text: str,
        *,
        ratio: float | None = None,
        nuggets: int | None = None,
        use: Use = "questions",
        begun: Callable[[int], None] = lambda tokens: None,
        report: Callable[[float], None] = lambda share: None,
    ) -> Nuggets:
        """Compress a text.

        Args:
            text: not only white space.
            ratio, nuggets, use: see `Dodo.compress`.
            begun: told the number of tokens, when they are known.
            report: told the share that is done; called on the model's thread.

        Raises:
            InputError: an empty text.
            TooLong: more tokens than the server takes.
            QueueFull: too many texts are waiting.
        """
        ids = await asyncio.to_thread(self._prompting.document, _filled(text))
        self._check_length(len(ids))
        begun(len(ids))

        def compress() -> Nuggets:
            with reporting(self._dodo.compressor, len(ids), report):
                return self._dodo.compress_ids([ids], ratio=ratio, nuggets=nuggets, use=use).to(device="cpu")

        made = await self._run(compress)
        self._compressed(len(ids))
        return made

    async def scored(self, text: str, use: Use = "questions") -> Scored:
        """A text's tokens and what the scorer thinks of each. Asked again for a text it has seen lately, it knows.

        Raises:
            InputError: an empty text, or a tokenizer that can't say where its tokens stand.
            TooLong, QueueFull: see `document`.
        """
        check_whole(text, "the text")
        key = f"{use} {hashlib.sha256(text.encode()).hexdigest()}"
        if (known := self._scored.get(key)) is not None:
            return known
        placed = await asyncio.to_thread(self._prompting.placed, _filled(text))
        self._check_length(len(placed.ids))

        def score() -> Tensor:
            with torch.no_grad():
                ids = torch.tensor([placed.ids], device=self._dodo.device)
                return self._dodo.compressor.score(ids, use)[0].cpu()

        made = Scored(placed, await self._run(score))
        self._scored.put(key, made, size=_TOKEN_BYTES * len(placed.ids))
        return made

    def _check_length(self, tokens: int) -> None:
        """Raise TooLong if a text has more tokens than the server takes."""
        if tokens > self._settings.max_document:
            raise TooLong(f"the text has {tokens:,} tokens, and this server takes {self._settings.max_document:,} at most")

    async def _run(self, work: Callable[[], T]) -> T:
        """Do some work on the model's thread, behind what waits for it."""
        if self._waiting >= self._settings.max_queue:
            raise QueueFull(self._waiting, retry_after=5.0)
        self._waiting += 1
        try:
            result: T = await asyncio.wrap_future(self._engine.run(work))
            return result
        finally:
            self._waiting -= 1

    async def file(self, data: bytes) -> Nuggets:
        """The nuggets in a file that somebody sent.

        Raises:
            NuggetsFileError: damaged, of several texts, or not what a compressor makes.
            FingerprintMismatch: another model made them.
            StoreFull: there is no room to put the file down.
        """
        return await asyncio.to_thread(self._read, data)

    def _read(self, data: bytes) -> Nuggets:
        with full_disk_said("make room for temporary files"), tempfile.TemporaryDirectory(prefix="dodo-sent-") as folder:
            path = Path(folder) / "sent.nuggets"
            path.write_bytes(data)
            try:
                nuggets = Nuggets.load(path)
            except NuggetsFileError as error:
                raise NuggetsFileError(str(error).replace(str(path), "the file")) from None
        if nuggets.batch_size != 1:
            raise NuggetsFileError(f"the file holds {nuggets.batch_size} texts; send one at a time: nuggets[i].save(...)")
        try:
            self._dodo.check(nuggets)
        except FingerprintMismatch as error:
            raise FingerprintMismatch(str(error).replace("or override if you know that they agree", "and send that")) from None
        if not _is_sound(nuggets, window=self._dodo.compressor.window, vocabulary=len(self._dodo.tokenizer)):
            raise NuggetsFileError("the file does not hold what this model makes of a text; compress the text again")
        return nuggets

    async def turns(self, turns: Sequence[Turn]) -> Conversation:
        """Compress the long messages of a conversation, if the server does that.

        Of the last message, the last line stays as it is: it is what is asked. Where the chat template can't show what is left,
        as those that want user and assistant in turns, a mark stands in the places of the others.

        Raises:
            InputError: the last line of the last message is itself too long.
            TooLong, QueueFull: see `document`.
        """
        limit, made, kept, marked = self._settings.compress_over, list[Nuggets](), list[Turn](), list[Turn]()
        for i, (role, text) in enumerate(turns):
            if limit is None or await self._tokens(text) <= limit:
                kept.append((role, text))
                marked.append((role, text))
                continue
            if i == len(turns) - 1:
                text, _, asked = text.rstrip().rpartition("\n")
                if not text.strip() or await self._tokens(asked) > limit:
                    raise InputError(
                        f"the last message is longer than {limit:,} tokens, from where messages are compressed, and does not end "
                        "with a question on a line of its own; put it there, or in a message of its own"
                    )
                kept.append((role, asked))
            marked.append((role, asked if i == len(turns) - 1 else _LEFT_OUT))
            made.append(await self._message(text))
        if len(kept) < len(turns) and not await asyncio.to_thread(self._prompting.shows, kept):
            kept = marked
        return Conversation(tuple(made), tuple(kept))

    async def _message(self, text: str) -> Nuggets:
        key = hashlib.sha256(text.encode()).hexdigest()
        if (known := self._messages.get(key)) is not None:
            return known
        nuggets = await self._compressing.get(key, lambda: self.document(text, ratio=self._settings.compress_ratio))
        self._messages.put(key, nuggets, size=nuggets.nbytes)
        return nuggets

    async def _tokens(self, text: str) -> int:
        return len(await asyncio.to_thread(self._prompting.continuation, text))


def _filled(text: str) -> str:
    if not text.strip():
        raise InputError("the document is empty: there is nothing to compress")
    return text


def _is_sound(nuggets: Nuggets, *, window: int, vocabulary: int) -> bool:
    """Whether nuggets of one text can be this model's; that a file's contents fit together was seen when it was loaded."""
    if not bool(nuggets.mask.all()):
        return False
    places = _within(nuggets.positions[0], int(nuggets.next_positions)) and int(nuggets.next_positions) <= window
    within = _within(nuggets.indices[0], int(nuggets.lengths + nuggets.sinks))
    return places and within and bool(((nuggets.token_ids >= 0) & (nuggets.token_ids < vocabulary)).all())


def _within(places: torch.Tensor, end: int) -> bool:
    """Whether places ascend, from 0 to below an end."""
    return bool((places.diff() > 0).all()) and int(places[0]) >= 0 and int(places[-1]) < end
