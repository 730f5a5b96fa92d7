"""Laws of a batch's cache: each row is what a cache of its own would hold, and memory follows what is held."""

import random

import torch
from torch import Tensor

from dodo.attention import NuggetCache
from dodo.serving.batch_cache import BatchCache

LAYERS, H, D = 2, 3, 4


def a_row(length: int) -> NuggetCache:
    keys, values = (tuple(torch.randn(1, H, length, D) for _ in range(LAYERS)) for _ in range(2))
    return NuggetCache(keys, values, torch.arange(length)[None] * 2, torch.ones(1, length, dtype=torch.bool))


def feed(cache: BatchCache, rows: list[NuggetCache]) -> list[Tensor]:
    """One token more for all, in both ways; the keys that each layer then sees."""
    positions = torch.tensor([[int(row.key_positions.max()) + 1] for row in rows])
    cache.extend(positions)
    for row, position in zip(rows, positions, strict=True):
        row.extend(position[None], torch.ones(1, 1, dtype=torch.bool))
    seen = []
    for layer in range(LAYERS):
        keys, values = torch.randn(2, len(rows), H, 1, D)
        seen.append(cache.update(keys, values, layer)[0])
        for i, row in enumerate(rows):
            row.update(keys[i : i + 1], values[i : i + 1], layer)
    return seen


def test_each_row_holds_what_a_cache_of_its_own_would() -> None:
    torch.manual_seed(0)
    chance, cache, rows = random.Random(0), BatchCache(LAYERS), []
    for _ in range(120):
        action = chance.random()
        if action < 0.3 or not rows:
            rows.append(a_row(chance.randint(1, 20)))
            cache.join(rows[-1])
        elif action < 0.55:
            i = chance.randrange(len(rows))
            cache.leave(i)
            last = rows.pop()
            if i < len(rows):
                rows[i] = last
            continue
        seen = feed(cache, rows)
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
    cache, rows = BatchCache(LAYERS), [a_row(5), a_row(9)]
    for row in rows:
        cache.join(row)
    places = {feed(cache, rows)[1].data_ptr() for _ in range(100)}
    assert cache.allocated == (2, 128)
    assert len(places) <= 4  # room for 16, 32, 64, 128


def test_memory_shrinks_with_what_is_held() -> None:
    cache = BatchCache(LAYERS)
    for length in (3, 3, 3, 3, 3, 3, 3, 200):
        cache.join(a_row(length))
    assert cache.allocated == (8, 256)
    cache.leave(7)
    assert cache.allocated == (8, 4)
    for _ in range(5):
        cache.leave(0)
    assert cache.allocated == (2, 4)
    cache.clear()
    assert (cache.allocated, cache.layers[0].keys.numel()) == ((0, 0), 0)
