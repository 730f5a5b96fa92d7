"""The cache of a running batch: rows of different lengths that come and go between tokens.

Each layer holds one block of memory, [rows, H, capacity, D]. New tokens' keys and values are written where they belong in
it and the layer sees a view, so that nothing is copied per token. Both sides of the block grow by doubling, and shrink when
no more than a quarter is used.

Shapes: R rows, T new tokens, S columns in use (the longest row), H key/value heads, D head width.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

__all__ = ["BatchCache"]


class BatchCache(Cache):
    """Keys, values and positions of R rows, of which each has its own length.

    As with `NuggetCache`, `extend` comes before each forward pass.

    Args:
        shape: layers, H, D.
        device, dtype: of keys and values.

    Attributes:
        lengths: states that each row holds.
    """

    def __init__(self, shape: tuple[int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.lengths: list[int] = []
        self._positions = torch.zeros(0, 0, dtype=torch.long, device=device)
        layers, heads, width = shape
        self._rows = [_Layer(torch.zeros(0, heads, 0, width, device=device, dtype=dtype)) for _ in range(layers)]
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

    def row(self, i: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """One row's keys, values and positions, as `join` takes them: views, good until something changes."""
        n = self.lengths[i]
        return (
            [layer.keys[i, :, :n] for layer in self._rows],
            [layer.values[i, :, :n] for layer in self._rows],
            self._positions[i, :n],
        )

    def join(self, keys: Iterable[Tensor], values: Iterable[Tensor], positions: Tensor) -> None:
        """Copy one text's states into a new last row. If that fails, there is no new row.

        Args:
            keys, values: [H, S, D] of each layer.
            positions: int64 [S].
        """
        length, place = positions.shape[0], len(self.lengths)
        self.reserve(place + 1, max([length, *self.lengths]))
        for layer, key, value in zip(self._rows, keys, values, strict=True):
            layer.write((place, slice(None), slice(length)), key, value)
        self._positions[place, :length] = positions
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
        self._shrink()

    def extend(self, positions: Tensor, counts: Sequence[int]) -> None:
        """Make room for more tokens in each row.

        Args:
            positions: int64 [R, T], of the tokens that the coming forward pass reads.
            counts: how many of them each row really has, the last ones; those before are padding, and leave nothing.
        """
        T, held = positions.shape[1], self.lengths
        grown = [length + count for length, count in zip(held, counts, strict=True)]
        self.reserve(len(grown), max(grown))
        places = [(row, T - count + i, held[row] + i) for row, count in enumerate(counts) for i in range(count)]
        rows, tokens, columns = torch.tensor(places, device=self._positions.device).unbind(1)
        self._positions[rows, columns] = positions[rows, tokens]
        self.lengths = grown
        for layer in self._rows:
            layer.coming = rows, tokens, columns, (len(grown), max(grown))

    def clear(self) -> None:
        """Forget all rows and free the memory."""
        self.lengths = []
        self._shrink()

    def reserve(self, rows: int, columns: int) -> None:
        """See to it that there is memory for so many rows and columns."""
        self._resize(*(_power(need) if need > has else has for need, has in zip((rows, columns), self.allocated, strict=True)))

    def _shrink(self) -> None:
        rows, columns = len(self.lengths), max(self.lengths, default=0)
        needs = (rows, columns) if rows and columns else (0, 0)
        self._resize(*(_power(need) if 4 * need <= has else has for need, has in zip(needs, self.allocated, strict=True)))

    def _resize(self, rows: int, columns: int) -> None:
        if (rows, columns) == self.allocated:
            return
        used = len(self.lengths), max(self.lengths, default=0)
        for layer in self._rows:
            layer.resize(rows, columns, used)
        self._positions = _moved(self._positions, self._positions.new_zeros(rows, columns), used)


class _Layer(DynamicLayer):
    keys: Any
    values: Any

    coming: tuple[Tensor, Tensor, Tensor, tuple[int, int]]
    """Rows of the new states, their places among the tokens that are read, their columns here; rows and columns in use with
    them."""

    def __init__(self, empty: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = empty, empty, True

    def write(self, place: tuple[Any, ...], keys: Tensor, values: Tensor) -> None:
        self.keys[place], self.values[place] = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, tokens, columns, (height, width) = self.coming
        # between two indices a slice goes last: the place is of shape [new states, H, D]
        self.write((rows, slice(None), columns), key_states[rows, :, tokens], value_states[rows, :, tokens])
        return self.keys[:height, :, :width], self.values[:height, :, :width]

    def resize(self, rows: int, columns: int, used: tuple[int, int]) -> None:
        """Zeros where nothing is held: what a mask hides must still be finite."""
        _, H, _, D = self.keys.shape
        self.keys = _moved(self.keys, self.keys.new_zeros(rows, H, columns, D), used)
        self.values = _moved(self.values, self.values.new_zeros(rows, H, columns, D), used)


def _moved(old: Tensor, new: Tensor, used: tuple[int, int]) -> Tensor:
    """`new` with the used part of `old` in it; rows are its first dimension, columns its last or, of four, its third."""
    rows, columns = used
    place = (slice(rows), slice(columns)) if new.ndim == 2 else (slice(rows), slice(None), slice(columns))
    new[place] = old[place]
    return new


def _power(needed: int) -> int:
    """The next power of two."""
    return 1 << (needed - 1).bit_length() if needed else 0
