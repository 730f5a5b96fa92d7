"""Reading many requests' tokens together: the model's part of continuous batching, without threads.

Paper: Eq. 13, for rows that each attend to nuggets of their own. Prompts are read in a batch of their own, so that those that
fail spoil nothing; then their rows join the batch of those that are decoding.

Shapes: R rows, T tokens, d width of the base, V vocabulary.
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dodo.adapters import THETA
from dodo.architecture import device_of, key_shape
from dodo.attention import attention_masks, cache_argument
from dodo.compressor import Compressor
from dodo.serving.answer import Answer
from dodo.serving.batch_cache import BatchCache
from dodo.serving.request import Request, Ticket

__all__ = ["Batch", "Row"]

SOFT_TOKEN = -1
"""Stands for the trained token that asks for the text itself, which has no id."""


@dataclass
class Row:
    """A request that is being answered.

    unread: tokens that the model has not read: its prompt's, then the latest of the answer.
    position: of the first of them.
    begun: when, in seconds of the monotonic clock.
    """

    ticket: Ticket
    answer: Answer
    unread: list[int] = field(init=False)
    position: int = field(init=False)
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        request = self.request
        self.unread = [SOFT_TOKEN] if request.input_ids is None else list(request.input_ids)
        self.position = 0 if request.nuggets is None else int(request.nuggets.next_positions)

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.ticket.request


class Batch:
    """Requests whose tokens are read together.

    Args:
        compressor: the model.
        with_theta: rows with nuggets are read with theta, rows without by the base as it is.
    """

    def __init__(self, compressor: Compressor, *, with_theta: bool) -> None:
        self._compressor, self.with_theta = compressor, with_theta
        base = compressor.base
        self._device = device_of(base)
        self.cache = BatchCache(key_shape(base.config), device=self._device, dtype=base.dtype)
        self.rows: list[Row] = []

    @property
    def states(self) -> int:
        """States held."""
        return sum(self.cache.lengths)

    def begin(self, row: Row) -> None:
        """Take in a request of which nothing has been read. If that fails, it is not in."""
        shape = key_shape(self._compressor.base.config)
        if row.request.nuggets is None:
            nothing = torch.zeros(shape[0], shape[1], 0, shape[2])
            self.cache.join(nothing, nothing, torch.zeros(0, dtype=torch.long))
        else:
            nuggets = row.request.nuggets[0]
            self.cache.join(nuggets.keys[:, 0], nuggets.values[:, 0], nuggets.positions[0])
        self.rows.append(row)

    def join(self, other: "Batch", i: int) -> None:
        """Take in a row of another batch, which keeps it."""
        self.cache.join(*other.cache.row(i))
        self.rows.append(other.rows[i])

    def leave(self, i: int) -> None:
        """Forget a row; the last one takes its place."""
        last = self.rows.pop()
        if i < len(self.rows):
            self.rows[i] = last
        self.cache.leave(i)

    def step(self, tokens: int = 1) -> Tensor:
        """Read unread tokens of each row, at most so many.

        Returns:
            fp32 [R, V], the logits of what follows.
        """
        pieces = [row.unread[:tokens] for row in self.rows]
        counts = [len(piece) for piece in pieces]
        T = max(counts)
        ids = torch.tensor([[0] * (T - len(piece)) + piece for piece in pieces], device=self._device)
        starts = torch.tensor([[row.position - T + count] for row, count in zip(self.rows, counts, strict=True)])
        positions = (starts + torch.arange(T)).clamp_min(0).to(self._device)
        self.cache.extend(positions, counts)
        logits = self._forward(ids, positions)
        for row, count in zip(self.rows, counts, strict=True):
            row.position += count
            del row.unread[:count]
        return logits

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = []
        self.cache.clear()

    @torch.no_grad()
    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        compressor, base = self._compressor, self._compressor.base
        adapters = compressor.adapters
        adapter: AbstractContextManager[None] = adapters.merged(THETA) if self.with_theta else adapters.use(None)
        inputs: dict[str, Any] = {
            "position_ids": positions,
            "attention_mask": attention_masks(
                base, query_positions=positions, key_positions=self.cache.key_positions, key_mask=self.cache.key_mask
            ),
            "use_cache": True,
            "logits_to_keep": 1,
            cache_argument(base): self.cache,
        }
        with adapter:
            if any(row.unread[0] == SOFT_TOKEN for row in self.rows):
                embedded: Tensor = base.get_input_embeddings()(ids.clamp_min(0))
                soft = compressor.soft_token.to(embedded.dtype)
                inputs["inputs_embeds"] = torch.where(ids[..., None] == SOFT_TOKEN, soft, embedded)  # [R, T, d]
            else:
                inputs["input_ids"] = ids
            logits: Tensor = base(**inputs).logits
        return logits[:, -1].float()
