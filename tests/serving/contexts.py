"""Nuggets without a model, for tests of where they are kept."""

import torch

from dodo.nuggets import Fingerprint, Nuggets
from dodo.rotary import Rotary


def made_up(*, seed: int = 0, states: int = 5, tokens: int = 20, width: int = 8) -> Nuggets:
    """Random nuggets of one text in 2 layers of 2 heads."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 1, 2, states, width, generator=generator)
    places = torch.arange(states)[None] * (tokens // states)
    return Nuggets(
        keys=keys,
        values=values,
        positions=places,
        indices=places,
        scores=torch.randn(1, states, generator=generator),
        token_ids=torch.randint(0, 50, (1, states), generator=generator),
        mask=torch.ones(1, states, dtype=torch.bool),
        lengths=torch.tensor([tokens]),
        next_positions=torch.tensor([tokens]),
        sinks=torch.tensor([0]),
        scheme="original",
        ratio=4.0,
        rotary=Rotary(frequencies=(torch.rand(width // 2, generator=generator),), layers=(0, 0)),
        fingerprint=Fingerprint(base="b", tokenizer="t", adapter="a"),
    )
