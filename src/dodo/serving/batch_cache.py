"""The cache of a running batch: rows of different lengths that come and go between tokens.

Each layer holds one block of memory, [rows, H, capacity, D]. A new token's keys and values are written where they belong in
it and the layer sees a view, so that nothing is copied per token. Both sides of the block grow by doubling, and shrink when
no more than a quarter is used.

Shapes: R rows, S columns in use (the longest row), H key/value heads, D head width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from dodo.attention import NuggetCache

__all__ = ["BatchCache"]


class BatchCache(Cache):
    """Keys, values and positions of R rows, of which each has its own length.

    As with `NuggetCache`, `extend` comes before each forward pass, which must be of one token per row.

    Args:
        layers: number of the base's layers.

    Attributes:
        lengths: states that each row holds.
    """

    def __init__(self, layers: int) -> None:
        self.lengths: list[int] = []
        self._positions = torch.zeros(0, 0, dtype=torch.long)
        self._rows: list[_Layer] = [_Layer() for _ in range(layers)]
        super().__init__(layers=list(self._rows))

    @property
    def allocated(self) -> tuple[int, int]:
        """Rows and columns that there is memory for."""
        return self._positions.shape[0], self._positions.shape[1]

    @property
    def key_positions(self) -> Tensor:
        """int64 [R, S], undefined where `key_mask` is false."""
        return self._positions[: len(self.lengths), : max(self.lengths, default=0)]

    @property
    def key_mask(self) -> Tensor:
        """bool [R, S], false behind a row's end."""
        lengths = torch.tensor(self.lengths, device=self._positions.device)
        return torch.arange(max(self.lengths, default=0), device=lengths.device) < lengths[:, None]

    def join(self, row: NuggetCache) -> None:
        """Copy a single text's cache into a new last row."""
        length, place = row.get_seq_length(), len(self.lengths)
        self._fit(place + 1, max([length, *self.lengths]), like=row)
        given: list[Any] = row.layers
        for own, theirs in zip(self._rows, given, strict=True):
            own.write((place, slice(None), slice(length)), theirs.keys[0], theirs.values[0])
        self._positions[place, :length] = row.key_positions[0]
        self.lengths.append(length)

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        last, length = len(self.lengths) - 1, self.lengths[-1]
        if row != last:
            for layer in self._rows:
                layer.write((row, slice(None), slice(length)), layer.keys[last, :, :length], layer.values[last, :, :length])
            self._positions[row, :length] = self._positions[last, :length]
            self.lengths[row] = length
        self.lengths.pop()
        self._fit(len(self.lengths), max(self.lengths, default=0))

    def extend(self, positions: Tensor) -> None:
        """Make room for one more token in each row.

        Args:
            positions: int64 [R, 1], of the tokens that the coming forward pass appends.
        """
        self._fit(len(self.lengths), max(self.lengths) + 1)
        columns = torch.tensor(self.lengths, device=self._positions.device)
        rows = torch.arange(len(self.lengths), device=columns.device)
        self._positions[rows, columns] = positions[:, 0]
        self.lengths = [length + 1 for length in self.lengths]
        for layer in self._rows:
            layer.coming = rows, columns, max(self.lengths)

    def clear(self) -> None:
        """Forget all rows and free the memory."""
        self.lengths = []
        self._fit(0, 0)

    def _fit(self, rows: int, columns: int, *, like: NuggetCache | None = None) -> None:
        """Reallocate where the block is too small, or far too large."""
        wanted = _room(self.allocated[0], rows), _room(self.allocated[1], columns)
        if not rows or not columns:
            wanted = 0, 0
        if wanted == self.allocated:
            return
        used = len(self.lengths), max(self.lengths, default=0)
        before = self._positions if like is None else self._positions.to(like.key_positions.device)
        self._positions = _moved(before, before.new_zeros(wanted), used)
        for i, layer in enumerate(self._rows):
            layer.resize(*wanted, used, like=layer if like is None else like.layers[i])


class _Layer(DynamicLayer):
    keys: Any
    values: Any

    coming: tuple[Tensor, Tensor, int]
    """Rows and columns where the next token's states belong, and columns in use with them."""

    def write(self, place: tuple[Any, ...], keys: Tensor, values: Tensor) -> None:
        self.keys[place], self.values[place] = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, columns, width = self.coming
        # between two indices a slice goes last: the place is of shape [R, H, D]
        self.write((rows, slice(None), columns), key_states[:, :, 0], value_states[:, :, 0])
        return self.keys[: len(rows), :, :width], self.values[: len(rows), :, :width]

    def resize(self, rows: int, columns: int, used: tuple[int, int], *, like: Any) -> None:
        """Zeros where nothing is held: what a mask hides must still be finite."""
        H, D = like.keys.shape[1], like.keys.shape[3]
        old = (None, None) if self.keys is None else (self.keys, self.values)
        self.keys = _moved(old[0], like.keys.new_zeros(rows, H, columns, D), used)
        self.values = _moved(old[1], like.values.new_zeros(rows, H, columns, like.values.shape[3]), used)
        self.is_initialized = True


def _moved(old: Tensor | None, new: Tensor, used: tuple[int, int]) -> Tensor:
    """`new` with the used part of `old` in it; rows are its first dimension, columns its last or, of four, its third."""
    if old is not None:
        rows, columns = used
        place = (slice(rows), slice(columns)) if new.ndim == 2 else (slice(rows), slice(None), slice(columns))
        new[place] = old[place]
    return new


def _room(allocated: int, needed: int) -> int:
    if needed > allocated or 4 * needed <= allocated:
        return 1 << (needed - 1).bit_length() if needed else 0
    return allocated
