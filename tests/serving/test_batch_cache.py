"""Laws of a batch's cache: each row is what a cache of its own would hold, and memory follows what is held."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dodo.attention import NuggetCache
from dodo.serving.batch_cache import BatchCache

LAYERS, H, D = 2, 3, 4


def a_row(length: int) -> NuggetCache:
    keys, values = (tuple(torch.randn(1, H, length, D) for _ in range(LAYERS)) for _ in range(2))
    return NuggetCache(keys, values, torch.arange(length)[None] * 2, torch.ones(1, length, dtype=torch.bool))


def made() -> BatchCache:
    return BatchCache((LAYERS, H, D), device=torch.device("cpu"), dtype=torch.float32)


def join(cache: BatchCache, row: NuggetCache) -> None:
    held: list[Any] = row.layers
    cache.join([layer.keys[0] for layer in held], [layer.values[0] for layer in held], row.key_positions[0])


def feed(cache: BatchCache, rows: list[NuggetCache], counts: list[int] | None = None) -> list[Tensor]:
    """Some tokens more for each, in both ways; the keys that each layer then sees."""
    counts = counts or [1] * len(rows)
    T = max(counts)
    ends = torch.tensor([[int(row.key_positions.max()) + count] for row, count in zip(rows, counts, strict=True)])
    positions = ends - torch.arange(T - 1, -1, -1)
    cache.extend(positions, counts)
    for row, position, count in zip(rows, positions, counts, strict=True):
        row.extend(position[None, T - count :], torch.ones(1, count, dtype=torch.bool))
    seen = []
    for layer in range(LAYERS):
        keys, values = torch.randn(2, len(rows), H, T, D)
        seen.append(cache.update(keys, values, layer)[0])
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            row.update(keys[i : i + 1, :, T - count :], values[i : i + 1, :, T - count :], layer)
    return seen


def test_each_row_holds_what_a_cache_of_its_own_would() -> None:
    torch.manual_seed(0)
    chance, cache, rows = random.Random(0), made(), []
    for _ in range(120):
        action = chance.random()
        if action < 0.3 or not rows:
            rows.append(a_row(chance.randint(1, 20)))
            join(cache, rows[-1])
        elif action < 0.55:
            i = chance.randrange(len(rows))
            cache.leave(i)
            last = rows.pop()
            if i < len(rows):
                rows[i] = last
            continue
        several = chance.random() < 0.5  # a prompt's tokens, or one of each answer
        seen = feed(cache, rows, [chance.randint(1, 6) for _ in rows] if several else None)
        assert cache.lengths == [row.get_seq_length() for row in rows]
        assert cache.key_mask.sum(-1).tolist() == cache.lengths
        for i, row in enumerate(rows):
            length = cache.lengths[i]
            assert torch.equal(cache.key_positions[i, :length], row.key_positions[0])
            for layer in range(LAYERS):
                assert torch.equal(seen[layer][i, :, :length], row.layers[layer].keys[0])
                assert torch.equal(cache.layers[layer].values[i, :, :length], row.layers[layer].values[0])
        assert all(bool(layer.isfinite().all()) for layer in seen)


def test_nothing_is_copied_but_when_the_room_doubles() -> None:
    cache, rows = made(), [a_row(5), a_row(9)]
    for row in rows:
        join(cache, row)
    places = {feed(cache, rows)[1].data_ptr() for _ in range(100)}
    assert cache.allocated == (2, 128)
    assert len(places) <= 4  # room for 16, 32, 64, 128


def test_memory_shrinks_with_what_is_held() -> None:
    cache = made()
    for length in (3, 3, 3, 3, 3, 3, 3, 200):
        join(cache, a_row(length))
    assert cache.allocated == (8, 256)
    cache.leave(7)
    assert cache.allocated == (8, 4)
    for _ in range(5):
        cache.leave(0)
    assert cache.allocated == (2, 4)
    cache.clear()
    assert (cache.allocated, cache.layers[0].keys.numel()) == ((0, 0), 0)


def test_a_row_that_does_not_fit_leaves_the_others_as_they_are() -> None:
    cache, row = made(), a_row(5)
    join(cache, row)
    other = a_row(7)
    layer: Any = other.layers[1]
    layer.values = layer.values[:, :, :3]
    with pytest.raises(RuntimeError):
        join(cache, other)
    assert cache.lengths == [5]
    assert torch.equal(feed(cache, [row])[0][0], row.layers[0].keys[0])


def test_a_row_moves_from_one_cache_to_another() -> None:
    one, other, row = made(), made(), a_row(6)
    join(one, a_row(3))
    join(one, row)
    join(other, a_row(9))
    other.join(*one.row(1))
    one.clear()
    assert other.lengths == [9, 6]
    assert torch.equal(other.key_positions[1, :6], row.key_positions[0])
    assert torch.equal(other.layers[1].keys[1, :, :6], row.layers[1].keys[0])
