"""Laws of the baseline that averages its past (Section 5.1), for every family."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dodo.adapters import THETA
from dodo.attention import attention_masks, cache_argument
from dodo.compressive import Compressive
from dodo.compressor import Compressor
from dodo.errors import InputError, UnsupportedModelError, WindowError
from dodo.training.fused import fused_lora
from tests.conftest import FAMILIES, VOCABULARY, Pair, stir, tokens

Maker = Callable[..., Pair]
family = pytest.mark.parametrize("family", FAMILIES)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    """fp32 through a few layers of large random weights: sums in another order differ by some 1e-5."""
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def language_model(compressor: Compressor, **settings: Any) -> Compressive:
    return Compressive(compressor, **({"ratio": 3, "window": 5, "segment": 4} | settings))


def seen(lm: Compressive, t: int, origin: int) -> tuple[list[int], list[int]]:
    """By hand: the first tokens of the groups that token t sees, and the tokens that it sees whole."""
    first = 1 if lm.keep_first else 0
    left = t - (t - origin) % lm.segment - lm.window
    groups = [start for start in range(first, t, lm.ratio) if start + lm.ratio <= left]
    whole = [*range(first), *range(groups[-1] + lm.ratio if groups else first, t + 1)]
    return groups if lm.max_groups is None else groups[-lm.max_groups :], sorted(set(whole))


def slow(lm: Compressive, ids: Tensor, origin: int = 0) -> Tensor:
    """Token by token, over a cache that is put together for each of them: means of keys that are turned to 0 and back."""
    compressor, base, past, logits = lm.compressor, lm.compressor.base, DynamicCache(), []
    layers = range(base.config.num_hidden_layers)
    for t in range(ids.shape[1]):
        groups, whole = seen(lm, t, origin)
        shown, positions = DynamicCache(), [*(g + lm.ratio - 1 for g in groups), *whole]
        for i in layers if t else []:
            keys, values = past.layers[i].keys, past.layers[i].values
            plain = compressor.rotary.rotate(keys, -torch.arange(t)[None], layer=i)
            pooled = [plain[:, :, g : g + lm.ratio].mean(2, keepdim=True) for g in groups]
            pooled = [
                compressor.rotary.rotate(key, torch.tensor([[g + lm.ratio - 1]]), layer=i)
                for g, key in zip(groups, pooled, strict=True)
            ]
            means = [values[:, :, g : g + lm.ratio].mean(2, keepdim=True) for g in groups]
            shown.update(torch.cat([*pooled, keys[:, :, whole[:-1]]], 2), torch.cat([*means, values[:, :, whole[:-1]]], 2), i)
        here = torch.tensor([[t]])
        key_positions = torch.tensor([positions])
        masks = attention_masks(
            base, query_positions=here, key_positions=key_positions, key_mask=torch.ones_like(key_positions).bool()
        )
        with torch.no_grad(), compressor.adapters.use(THETA):
            inputs = {"attention_mask": masks, "position_ids": here, cache_argument(base): shown}
            logits.append(base(ids[:, t : t + 1], use_cache=True, **inputs).logits)
        for i in layers:
            past.update(shown.layers[i].keys[:, :, -1:], shown.layers[i].values[:, :, -1:], i)
    return torch.cat(logits, dim=1)


@family
@pytest.mark.parametrize(("keep_first", "max_groups", "origin"), [(False, None, 0), (True, 3, 2)])
def test_the_parallel_pass_equals_a_slow_loop(
    pair: Maker, family: str, keep_first: bool, max_groups: int | None, origin: int
) -> None:
    lm = language_model(stir(pair(family, keep_first=keep_first).compressor), max_groups=max_groups)
    ids = tokens(2, 30)
    with torch.no_grad():
        close(lm.forward(ids, origin=origin), slow(lm, ids, origin))


@family
def test_groups_of_one_with_fresh_adapters_are_the_base_model(pair: Maker, family: str) -> None:
    made = pair(family, keep_first=True)
    ids = tokens(2, 41)
    with torch.no_grad():
        close(language_model(made.compressor, ratio=1).forward(ids), made.base(ids).logits)


@family
def test_a_later_token_changes_nothing_before_it(pair: Maker, family: str) -> None:
    lm = language_model(stir(pair(family).compressor))
    ids, places = tokens(1, 40), (3, 9, 10, 21, 39)
    changed = ids.repeat(len(places), 1)
    for row, t in enumerate(places):
        changed[row, t:] = (changed[row, t:] + 1) % VOCABULARY
    with torch.no_grad():
        plain, after = lm.forward(ids)[0], lm.forward(changed)
    for row, t in enumerate(places):
        close(after[row, :t], plain[:t], 1e-5)
        assert not torch.allclose(after[row, t], plain[t], atol=1e-3)


@pytest.mark.parametrize("keep_first", [False, True])
def test_every_token_is_seen_once_whole_or_in_its_group(pair: Maker, keep_first: bool) -> None:
    lm, T = language_model(pair(keep_first=keep_first).compressor), 50
    first, visible = int(keep_first), lm.seen(50, origin=1)
    groups = visible.shape[1] - T
    for t in range(T):
        of_groups = [first + g * 3 + i for g in visible[t, :groups].nonzero()[:, 0].tolist() for i in range(3)]
        whole = visible[t, groups:].nonzero()[:, 0].tolist()
        assert sorted(of_groups + whole) == list(range(t + 1))
        assert len(whole) <= first + lm.window + lm.ratio - 1 + lm.segment


def test_the_gradient_goes_to_theta_alone_and_is_the_same_in_fused_arithmetic(pair: Maker) -> None:
    compressor = stir(pair(attention="eager").compressor)
    ids = tokens(2, 30)

    def gradients() -> dict[str, Tensor]:
        compressor.zero_grad(set_to_none=True)
        language_model(compressor).forward(ids).square().mean().backward()
        return {name: p.grad.clone() for name, p in compressor.named_parameters() if p.grad is not None}

    plain = gradients()
    assert {name.split(".")[-2] for name in plain} == {"theta"}
    assert all(bool(grad.abs().sum() > 0) for grad in plain.values())
    with fused_lora(compressor.base):
        fused = gradients()
    compressor.adapters.checkpoint_gradients()
    for other in (fused, gradients()):
        for name, grad in plain.items():
            torch.testing.assert_close(other[name], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [{"ratio": 2.5}, {"window": 0}, {"segment": 0}, {"max_groups": 0}])
def test_settings_out_of_range_are_refused(pair: Maker, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        language_model(pair().compressor, **settings)


def test_what_can_not_be_is_refused(pair: Maker) -> None:
    compressor = pair().compressor
    with pytest.raises(WindowError, match="257"):
        language_model(compressor).forward(tokens(1, 257))
    compressor.base.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="flex_attention"):
        language_model(compressor)
