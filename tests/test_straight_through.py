"""Laws of the straight-through term (Eq. 17 and 18), alone and inside a model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dodo.attention import check_gradient_backend
from dodo.errors import UnsupportedModelError
from dodo.nuggets import Nuggets
from dodo.straight_through import straight_through
from tests.conftest import Pair, stir, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e4, -1e4])
def test_it_is_exactly_zero_with_gradient_one(dtype: torch.dtype, size: float) -> None:
    scores = torch.full((3,), size, dtype=dtype, requires_grad=True)
    term = straight_through(scores)
    assert bool((term == 0).all())
    term.sum().backward()
    assert bool((scores.grad == 1).all())


def _loss(pair: Pair, scores: Tensor, made: Nuggets, ids: Tensor) -> Tensor:
    logits = pair.compressor.decode(dataclasses.replace(made, scores=scores), ids).float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("qwen2, sliding", "sdpa"),
        ("phi3", "sdpa"),
        ("gemma3", "sdpa"),
        ("gemma2", "eager"),  # its soft-capped logits exist in eager attention only
    ],
)
def test_the_scorers_gradient_is_that_of_equation_17(pair: Callable[..., Pair], attention: str, family: str) -> None:
    """Against a slow loop: the derivative of the loss by every attention logit xi, summed over layers, heads and queries."""
    made_pair = pair(family, attention="eager")
    compressor = stir(made_pair.compressor)
    ids = tokens(2, 18)
    with torch.no_grad():
        made = compressor.encode(ids, ratio=3)
    targets = tokens(2, 6, seed=5)

    # xi of every layer and head, through a leaf that is added to each layer's mask
    leaves: list[Tensor] = []
    handles = []
    for layer in compressor.base.base_model.layers:

        def add_leaf(_: Any, args: Any, kwargs: Any) -> Any:
            mask = kwargs["attention_mask"]
            heads = compressor.base.config.num_attention_heads
            leaf = torch.zeros(mask.shape[0], heads, *mask.shape[2:], requires_grad=True)
            leaves.append(leaf)
            return args, {**kwargs, "attention_mask": mask + leaf}

        handles.append(layer.self_attn.register_forward_pre_hook(add_leaf, with_kwargs=True))
    try:
        _loss(made_pair, made.scores.requires_grad_(True), made, targets).backward()
    finally:
        for handle in handles:
            handle.remove()
    expected = torch.zeros_like(made.scores)
    K = made.scores.shape[1]
    for leaf in leaves:
        for head in range(leaf.shape[1]):
            for query in range(leaf.shape[2]):
                expected += leaf.grad[:, head, query, :K]

    compressor.base.set_attn_implementation(attention)
    scores = made.scores.detach().clone().requires_grad_(True)
    _loss(made_pair, scores, made, targets).backward()
    assert float(expected.abs().max()) > 1e-4  # something is learned at all
    torch.testing.assert_close(scores.grad, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_forward_pass_is_bit_equal_to_one_without_the_term(
    pair: Callable[..., Pair], dtype: torch.dtype, size: float, attention: str
) -> None:
    made_pair = pair("llama", attention=attention)
    made_pair.compressor.base.to(dtype)
    ids = tokens(1, 20)
    made = made_pair.compressor.encode(ids, ratio=4)
    scores = torch.full_like(made.scores, size).requires_grad_(True)
    with_term = made_pair.compressor.decode(dataclasses.replace(made, scores=scores), ids)
    # in sdpa a mask that wants gradients has a kernel of its own, so compare within it: there a score of 0 is no term
    other = torch.zeros_like(scores).requires_grad_(attention == "sdpa")
    without = made_pair.compressor.decode(dataclasses.replace(made, scores=other), ids)
    assert torch.equal(with_term, without)
    with_term.float().logsumexp(-1).mean().backward()
    assert bool((scores.grad != 0).any())


def test_a_backend_that_would_drop_the_term_is_refused_in_training(pair: Callable[..., Pair]) -> None:
    made_pair = pair("llama")
    made_pair.compressor.base.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="flash_attention_2"):
        check_gradient_backend(made_pair.compressor.base)
