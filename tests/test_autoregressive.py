"""Laws of the autoregressive LM's parallel pass (Section 2.2), for every family."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dodo.adapters import PHI, THETA
from dodo.architecture import layer_windows
from dodo.attention import attention_masks, cache_argument
from dodo.autoregressive import Autoregressive, FeatureStream
from dodo.compressor import Compressor
from dodo.config import LoraSettings
from dodo.errors import InputError, UnsupportedModelError, WindowError
from dodo.thresholds import Pace, Thresholds
from dodo.training.fused import fused_lora
from tests.conftest import FAMILIES, VOCABULARY, Pair, stir, tokens

Maker = Callable[..., Pair]
family = pytest.mark.parametrize("family", FAMILIES)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    """fp32 through a few layers of large random weights: sums in another order differ by some 1e-5."""
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def language_model(compressor: Compressor, ids: Tensor | None = None, **settings: Any) -> Autoregressive:
    """Small settings; with `ids`, the threshold that keeps a third of their tokens, far from any score."""
    lm = Autoregressive(compressor, **({"threshold": 0.0, "window": 5, "segment": 4, "feature_window": 16} | settings))
    if ids is None:
        return lm
    ordered = lm.score(ids).detach().flatten().sort(descending=True).values
    middle = slice(len(ordered) // 4, len(ordered) // 2)
    i = middle.start + int((ordered[middle] - ordered[middle.start + 1 : middle.stop + 1]).argmax())
    return dataclasses.replace(lm, threshold=float(ordered[i] + ordered[i + 1]) / 2)


# -- the parallel pass against a slow loop


def seen(lm: Autoregressive, kept: list[bool], t: int, *, origin: int = 0, nuggets_only: bool = False) -> list[int]:
    """Eq. 9 and 10 by hand: the tokens that token t sees, or those of them that it sees for being kept."""
    start = t - (t - origin) % lm.segment
    left = max(0, start - lm.window)
    first = 1 if lm.keep_first else 0
    nuggets = [j for j in range(first, left) if kept[j]]
    if lm.max_states is not None:
        nuggets = nuggets[-(lm.max_states - lm.window - lm.segment - first) :]
    if nuggets_only:
        return nuggets
    return sorted({*range(first), *nuggets, *range(left, t + 1)})


def slow(lm: Autoregressive, ids: Tensor, kept: list[bool], origin: int = 0) -> Tensor:
    """Token by token over a cache of everything, each with its adapter and a mask of what it sees."""
    compressor, T = lm.compressor, ids.shape[1]
    cache, logits = DynamicCache(), []
    for t in range(T):
        mask = torch.zeros(1, t + 1, dtype=torch.bool)
        mask[0, seen(lm, kept, t, origin=origin)] = True
        here, before = torch.tensor([[t]]), torch.arange(t + 1)[None]
        masks = attention_masks(compressor.base, query_positions=here, key_positions=before, key_mask=mask)
        with torch.no_grad(), compressor.adapters.use(PHI if kept[t] or (lm.keep_first and t == 0) else THETA):
            inputs = {"attention_mask": masks, "position_ids": here, cache_argument(compressor.base): cache}
            logits.append(compressor.base(ids[:, t : t + 1], use_cache=True, **inputs).logits)
    return torch.cat(logits, dim=1)


@family
@pytest.mark.parametrize(("keep_first", "max_states"), [(False, None), (True, 12)])
def test_the_parallel_pass_equals_a_slow_loop(pair: Maker, family: str, keep_first: bool, max_states: int | None) -> None:
    compressor = stir(pair(family, keep_first=keep_first).compressor)
    ids = tokens(1, 30)
    lm = language_model(compressor, ids, max_states=max_states)
    with torch.no_grad():
        kept = (lm.score(ids) > lm.threshold)[0].tolist()
        assert 5 < sum(kept) < 20
        close(lm.forward(ids), slow(lm, ids, kept))


@pytest.mark.parametrize("origin", [2, 7])
def test_segments_can_start_at_any_position(pair: Maker, origin: int) -> None:
    compressor = stir(pair(keep_first=True).compressor)
    ids = tokens(1, 30)
    lm = language_model(compressor, ids, max_states=12)
    with torch.no_grad():
        kept = (lm.score(ids) > lm.threshold)[0].tolist()
        close(lm.forward(ids, origin=origin), slow(lm, ids, kept, origin))


@family
@pytest.mark.parametrize("keep_first", [False, True])
def test_all_kept_with_fresh_adapters_is_the_base_model(pair: Maker, family: str, keep_first: bool) -> None:
    made = pair(family, keep_first=keep_first)
    ids = tokens(2, 41)
    with torch.no_grad():
        close(language_model(made.compressor, threshold=-math.inf).forward(ids), made.base(ids).logits)


@family
def test_nothing_kept_is_a_sliding_window_of_tau_and_segment(pair: Maker, family: str) -> None:
    made = pair(family)
    ids, T = tokens(2, 33), 33
    lm = language_model(made.compressor, threshold=math.inf)
    query, key = torch.arange(T)[:, None], torch.arange(T)[None, :]
    near = (key <= query) & (key >= query // 4 * 4 - 5)
    assert int(near.sum(-1).max()) == lm.window + lm.segment

    def additive(window: int | None) -> Tensor:
        allowed = near if window is None else near & (query - key < window)
        return torch.zeros(1, 1, T, T).masked_fill(~allowed, torch.finfo(torch.float32).min)

    windows, kinds = layer_windows(made.base.config), getattr(made.base.config, "layer_types", None)
    mask = additive(windows[0]) if kinds is None else {kind: additive(windows[kinds.index(kind)]) for kind in set(kinds)}
    with torch.no_grad():
        expected = made.base(ids, attention_mask=mask, position_ids=torch.arange(T)[None]).logits
        close(lm.forward(ids), expected)


@family
def test_a_later_token_changes_nothing_before_it(pair: Maker, family: str) -> None:
    compressor = stir(pair(family, keep_first=True).compressor)
    ids = tokens(1, 40)
    lm = language_model(compressor, ids, max_states=13)
    places = (4, 8, 21, 39)
    changed = ids.repeat(len(places), 1)
    for row, t in enumerate(places):
        changed[row, t:] = (changed[row, t:] + 1) % VOCABULARY
    with torch.no_grad():
        plain, after = lm.forward(ids)[0], lm.forward(changed)
    for row, t in enumerate(places):
        close(after[row, :t], plain[:t], 1e-5)
        assert not torch.allclose(after[row, t], plain[t], atol=1e-3)


@family
@pytest.mark.parametrize("left", [False, True])
def test_padded_rows_on_either_side_equal_single_rows(pair: Maker, family: str, left: bool) -> None:
    compressor = stir(pair(family, keep_first=True).compressor)
    texts = [tokens(1, n, seed=n)[0] for n in (29, 18, 1)]
    lm = language_model(compressor, texts[0][None], max_states=12)
    ids, mask = torch.full((3, 29), VOCABULARY - 1), torch.zeros(3, 29, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(29 - len(text), None) if left else slice(0, len(text))
        ids[row, place], mask[row, place] = text, 1
    with torch.no_grad():
        logits, scores = lm.forward(ids, mask), lm.score(ids, mask)
        assert bool(torch.isfinite(logits).all())
        for row, text in enumerate(texts):
            close(scores[row][mask[row].bool()], lm.score(text[None])[0], 1e-5)
            close(logits[row][mask[row].bool()], lm.forward(text[None])[0])


def test_a_score_equal_to_the_threshold_is_not_kept(pair: Maker) -> None:
    lm = language_model(pair("llama").compressor, threshold=0.5)
    assert lm.keep(torch.tensor([[0.25, 0.5, 0.75]])).tolist() == [[False, False, True]]


def pace_of(lm: Autoregressive, ids: Tensor, ratio: float = 3) -> Pace:
    """Thresholds of some tokens' own scores, for ratios near to each other."""
    scores = lm.score(ids).flatten()
    return Pace(Thresholds.estimate(scores, feature_window=lm.feature_window, ratios=(1.5, 2, 3, 4, 6)), ratio)


@pytest.mark.parametrize("origin", [0, 3])
@pytest.mark.parametrize("keep_first", [False, True])
def test_a_pace_counts_what_was_kept_before_each_segment(pair: Maker, keep_first: bool, origin: int) -> None:
    compressor = stir(pair("llama", keep_first=keep_first).compressor)
    lm, ids = language_model(compressor), tokens(3, 30)
    pace = pace_of(lm, ids)
    lm = dataclasses.replace(lm, threshold=pace)
    scores = lm.score(ids)
    kept = lm.keep(scores, origin=origin).tolist()
    thresholds = set()
    for row, values in enumerate(scores.tolist()):
        owed, start = 0.0, 0
        for t, score in enumerate(values):
            if t and (t - origin) % lm.segment == 0:
                competed = kept[row][max(start, int(keep_first)) : t]
                owed, start = pace.settle(owed, tokens=len(competed), kept=sum(competed)), t
            threshold = pace.at(owed)
            thresholds.add(threshold)
            assert kept[row][t] == (score > threshold)
    assert len(thresholds) > 5


@pytest.mark.parametrize("left", [False, True])
def test_a_pace_takes_no_count_of_padding(pair: Maker, left: bool) -> None:
    lm = language_model(stir(pair("llama", keep_first=True).compressor))
    lm = dataclasses.replace(lm, threshold=pace_of(lm, tokens(3, 30)))
    scores, real = torch.randn(2, 30, generator=torch.Generator().manual_seed(3)), torch.ones(2, 30, dtype=torch.bool)
    places = slice(11, None) if left else slice(0, 19)
    real[1] = False
    real[1, places] = True
    kept = lm.keep(scores, real)
    assert kept[0].tolist() == lm.keep(scores[:1])[0].tolist()
    assert kept[1, places].tolist() == lm.keep(scores[1:, places])[0].tolist()
    assert not kept[~real].any()


def test_states_are_what_the_head_reads(pair: Maker) -> None:
    compressor = stir(pair("llama").compressor)
    lm, ids = language_model(compressor), tokens(2, 20)
    with torch.no_grad():
        states = lm.forward(ids, states=True)
        assert states.shape == (2, 20, 32)
        close(compressor.base.lm_head(states), lm.forward(ids), 1e-6)


def test_given_scores_and_choices_take_the_scorers_place(pair: Maker) -> None:
    compressor = stir(pair("llama").compressor)
    lm, ids = language_model(compressor), tokens(1, 20)
    scores = -torch.arange(20.0)[None] % 3 - 0.5
    with torch.no_grad():
        close(lm.forward(ids, scores=scores), slow(lm, ids, (scores > 0)[0].tolist()))
        close(lm.forward(ids, kept=scores > 0), lm.forward(ids, scores=scores), 1e-6)


# -- features


@family
def test_features_look_back_on_a_fixed_window(pair: Maker, family: str) -> None:
    """In pieces of any size, they are the base's own under a mask; of a short text, they are the compressor's."""
    made = pair(family)
    compressor = stir(made.compressor)
    ids, T, W = tokens(2, 40), 40, 7
    lm = language_model(compressor, feature_window=W)
    query, key = torch.arange(T)[:, None], torch.arange(T)[None, :]

    def additive(window: int | None) -> Tensor:
        allowed = (key <= query) & (query - key < min(W, window or W))
        return torch.zeros(1, 1, T, T).masked_fill(~allowed, torch.finfo(torch.float32).min)

    windows, kinds = layer_windows(made.base.config), getattr(made.base.config, "layer_types", None)
    mask = additive(windows[0]) if kinds is None else {kind: additive(windows[kinds.index(kind)]) for kind in set(kinds)}
    with torch.no_grad():
        inputs = {"attention_mask": mask, "position_ids": torch.arange(T)[None], "output_hidden_states": True}
        expected = made.base(ids, **inputs).hidden_states[2]
        for piece in (1, 13, T):
            stream = FeatureStream(lm)
            close(torch.cat([stream(part) for part in ids.split(piece, dim=1)], dim=1), expected)
        close(lm.score(ids), compressor.scorer(expected))
        assert torch.equal(lm.score(ids[:, :W]), compressor.score(ids[:, :W]))


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3, sliding, partial rotation", "smollm3"])
def test_features_of_texts_many_windows_long_equal_those_of_a_larger_window(pair: Maker, family: str) -> None:
    small, large = pair(family), pair(family)
    small.compressor.window = 32
    ids = tokens(1, 200)
    with torch.no_grad():
        expected = language_model(large.compressor, feature_window=8).score(ids)
        close(language_model(small.compressor, feature_window=8).score(ids), expected)


# -- learning


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "sdpa"), ("llama", "eager"), ("qwen2, sliding", "sdpa"), ("gemma3", "sdpa"), ("gemma2", "eager")],
)
def test_the_scorers_gradient_is_that_of_the_logits_of_attention_to_nuggets(pair: Maker, family: str, attention: str) -> None:
    """Against a slow loop over layers, heads and queries, as for the compressor (Eq. 17)."""
    compressor = stir(pair(family, attention="eager", keep_first=True).compressor)
    ids = tokens(2, 26)
    lm = language_model(compressor, ids, max_states=12)
    scores = lm.score(ids).detach()
    kept = (scores > lm.threshold).tolist()

    def loss(given: Tensor) -> Tensor:
        logits = lm.forward(ids, scores=given).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    leaves: list[Tensor] = []

    def add_leaf(_: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"]
        leaf = torch.zeros(mask.shape[0], compressor.base.config.num_attention_heads, *mask.shape[2:], requires_grad=True)
        leaves.append(leaf)
        return args, {**kwargs, "attention_mask": mask + leaf}

    layers = compressor.base.base_model.layers
    handles = [layer.self_attn.register_forward_pre_hook(add_leaf, with_kwargs=True) for layer in layers]
    loss(scores.clone().requires_grad_(True)).backward()
    for handle in handles:
        handle.remove()
    expected = torch.zeros_like(scores)
    for leaf in leaves:
        for row in range(2):
            for t in range(26):
                for j in seen(lm, kept[row], t, nuggets_only=True):
                    expected[row, j] += leaf.grad[row, :, t, j].sum()

    compressor.base.set_attn_implementation(attention)
    given = scores.clone().requires_grad_(True)
    loss(given).backward()
    assert float(expected.abs().max()) > 1e-4
    torch.testing.assert_close(given.grad, expected, atol=1e-6, rtol=1e-4)


def _gradients(compressor: Compressor, lm: Autoregressive, ids: Tensor) -> dict[str, Tensor]:
    compressor.zero_grad()
    logits = lm.forward(ids).float()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in compressor.named_parameters() if p.grad is not None}


def test_one_backward_pass_reaches_both_adapters_and_the_scorer_by_every_way_of_training(pair: Maker) -> None:
    everywhere = LoraSettings(rank=2, alpha=4, targets="all-linear")
    wider = LoraSettings(rank=3, alpha=2)
    compressor = stir(pair("llama", encoder=everywhere, decoder=wider).compressor)
    ids = tokens(2, 26)
    lm = language_model(compressor, ids)
    plain = _gradients(compressor, lm, ids)
    for part in (".phi.", ".theta.", "scorer."):
        assert all(bool(gradient.any()) for name, gradient in plain.items() if part in name)
        assert any(part in name for name in plain)
    assert not any("soft_token" in name or "base_layer" in name for name in plain)
    with fused_lora(compressor.base):
        fused = _gradients(compressor, lm, ids)
    compressor.adapters.checkpoint_gradients()
    for other in (fused, _gradients(compressor, lm, ids)):
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-6)


def test_a_backend_that_would_drop_the_term_is_refused(pair: Maker) -> None:
    compressor = pair("llama").compressor
    lm = language_model(compressor)
    compressor.base.config._attn_implementation = "flash_attention_2"
    for use in (lambda: language_model(compressor), lambda: lm.forward(tokens(1, 9))):
        with pytest.raises(UnsupportedModelError, match="flash_attention_2"):
            use()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_finite_with_padding(pair: Maker, dtype: torch.dtype) -> None:
    compressor = stir(pair("gemma3").compressor, scale=0.01)
    compressor.base.to(dtype)
    ids = tokens(2, 22)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    logits = language_model(compressor).forward(ids, mask)
    assert bool(torch.isfinite(logits).all())
    logits.float().logsumexp(-1).mean().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in compressor.parameters() if p.grad is not None)


# -- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": float("nan")}, "threshold"),
        ({"window": 0}, "window"),
        ({"segment": 2.5}, "segment"),
        ({"feature_window": 0}, "feature_window"),
        ({"window": 120, "segment": 9}, "at most 128"),
        ({"max_states": 9}, "at least 10"),
    ],
)
def test_settings_out_of_range_are_refused(pair: Maker, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        language_model(pair("llama").compressor, **settings)


def test_a_text_longer_than_the_window_is_refused(pair: Maker) -> None:
    lm = language_model(pair("llama").compressor, segment=7)
    with torch.no_grad():
        assert lm.forward(tokens(1, 252)).shape[1] == 252
    with pytest.raises(WindowError, match="252"):
        lm.forward(tokens(1, 253))
