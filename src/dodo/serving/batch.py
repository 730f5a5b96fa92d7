"""Reading prompts and decoding many requests together: the model's part of continuous batching, without threads.

Paper: Eq. 13, for rows that each attend to nuggets of their own. A prompt is read in pieces into a cache of its own, so that
those who are decoding need not wait for a long one, and a prompt that fails spoils nothing; then its row joins the batch.

Shapes: R rows, M tokens, D width, V vocabulary.
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dodo.adapters import THETA
from dodo.architecture import device_of
from dodo.attention import NuggetCache, attention_masks, cache_argument
from dodo.compressor import Compressor
from dodo.serving.answer import Answer
from dodo.serving.batch_cache import BatchCache
from dodo.serving.request import Request, Ticket

__all__ = ["Batch", "Prompt", "Row"]


class Prompt:
    """A prompt that is being read behind its nuggets.

    Attributes:
        cache: what has been read so far.
        position: of the next token.
    """

    def __init__(self, compressor: Compressor, request: Request) -> None:
        self._compressor, self._nuggets = compressor, request.nuggets
        device = device_of(compressor.base)
        if request.input_ids is None:
            self._left = compressor.soft_token.detach().to(compressor.base.dtype).expand(1, 1, -1)
        else:
            self._left = torch.tensor([list(request.input_ids)], device=device)
        if request.nuggets is None:
            nothing = torch.zeros(1, 0, dtype=torch.long, device=device)
            self.cache, self.position = NuggetCache((), (), nothing, nothing.bool()), 0
        else:
            nuggets = request.nuggets[0]
            self.cache = nuggets.to_cache(device=device, dtype=compressor.base.dtype)
            self.position = int(nuggets.next_positions)

    def read(self, tokens: int) -> tuple[int, Tensor | None]:
        """Read so many tokens more.

        Returns:
            How many were read; and the next token's logits, fp32 [V], once the prompt has been read whole.
        """
        piece, self._left = self._left[:, :tokens], self._left[:, tokens:]
        read = piece.shape[1]
        positions = torch.arange(self.position, self.position + read, device=device_of(self._compressor.base))[None]
        self.cache.extend(positions, torch.ones_like(positions, dtype=torch.bool))
        logits = _forward(self._compressor, self.cache, piece, positions, with_theta=self._nuggets is not None)
        self.position += read
        return read, None if self._left.shape[1] else logits[0]


@dataclass
class Row:
    """A request that is being answered.

    states: how many it may come to hold.
    prompt: what is still being read, before it joins a batch.
    token: its latest, not read yet.
    position: that token's.
    begun: when, in seconds of the monotonic clock.
    """

    ticket: Ticket
    answer: Answer
    states: int
    prompt: Prompt | None = None
    token: int = -1
    position: int = -1
    begun: float = field(default_factory=time.monotonic)


class Batch:
    """Requests that are decoded together.

    Args:
        compressor: the model.
        with_theta: rows with nuggets are read with theta, rows without by the base as it is.
    """

    def __init__(self, compressor: Compressor, *, with_theta: bool) -> None:
        self._compressor, self._with_theta = compressor, with_theta
        self.cache = BatchCache(compressor.base.config.num_hidden_layers)
        self.rows: list[Row] = []

    @property
    def states(self) -> int:
        """States held."""
        return sum(self.cache.lengths)

    def join(self, row: Row, cache: NuggetCache) -> None:
        """Take in a request whose prompt has been read."""
        self.cache.join(cache)
        self.rows.append(row)

    def leave(self, i: int) -> None:
        """Forget a row; the last one takes its place."""
        self.cache.leave(i)
        last = self.rows.pop()
        if i < len(self.rows):
            self.rows[i] = last

    def step(self) -> Tensor:
        """Read each row's latest token.

        Returns:
            fp32 [R, V], the next tokens' logits.
        """
        device = device_of(self._compressor.base)
        ids = torch.tensor([[row.token] for row in self.rows], device=device)
        positions = torch.tensor([[row.position] for row in self.rows], device=device)
        self.cache.extend(positions)
        logits = _forward(self._compressor, self.cache, ids, positions, with_theta=self._with_theta)
        for row in self.rows:
            row.position += 1
        return logits

    def clear(self) -> None:
        """Forget all rows."""
        self.cache.clear()
        self.rows = []


@torch.no_grad()
def _forward(
    compressor: Compressor, cache: NuggetCache | BatchCache, tokens: Tensor, positions: Tensor, *, with_theta: bool
) -> Tensor:
    """Next logits, fp32 [R, V], behind tokens that are ids, int64 [R, M], or embeddings, [R, M, D]."""
    base: Any = compressor.base
    adapter: AbstractContextManager[None] = compressor.adapters.merged(THETA) if with_theta else compressor.adapters.use(None)
    inputs: dict[str, Any] = {
        "inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": attention_masks(
            base, query_positions=positions, key_positions=cache.key_positions, key_mask=cache.key_mask
        ),
        "use_cache": True,
        "logits_to_keep": 1,
        cache_argument(base): cache,
    }
    with adapter:
        logits: Tensor = base(**inputs).logits
    return logits[:, -1].float()
