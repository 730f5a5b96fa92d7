"""Laws of the compressor, for every family: what one function of the base must be, computed in two ways."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dodo.architecture import layer_windows
from dodo.attention import attention_masks
from dodo.coverage import prefer_runs
from dodo.errors import DodoWarning, InputError, UnsupportedModelError, WindowError
from dodo.nuggets import Nuggets
from tests.conftest import FAMILIES, VOCABULARY, Pair, stir, tiny_model, tokens

Maker = Callable[..., Pair]
family = pytest.mark.parametrize("family", FAMILIES)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    """fp32 through a few layers of large random weights: sums in another order differ by some 1e-5."""
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# -- r = 1 with fresh adapters is the base: position and mask faults show here


@family
@pytest.mark.parametrize("keep_first", [False, True])
def test_ratio_one_with_fresh_adapters_equals_the_base_model(pair: Maker, family: str, keep_first: bool) -> None:
    made = pair(family, keep_first=keep_first)
    ids = tokens(2, 37)
    with torch.no_grad():
        nuggets = made.compressor.encode(ids[:, :25], ratio=1)
        logits = made.compressor.decode(nuggets, ids[:, 25:])
        close(logits, made.base(ids).logits[:, 25:])


@family
def test_the_head_never_reads_a_slice_of_states(pair: Maker, family: str) -> None:
    """Torch on a CPU copies the head's matrix once for each text of such a batch."""
    made, seen = pair(family), []
    head = made.compressor.base.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    with torch.no_grad():
        made.compressor.base(tokens(3, 11), logits_to_keep=1)
    handle.remove()
    assert [(states.shape[:2], states.is_contiguous()) for states in seen] == [((3, 1), True)]


@family
def test_ratio_one_in_segments_equals_one_piece(pair: Maker, family: str) -> None:
    made = pair(family)
    stir(made.compressor)
    ids = tokens(1, 40)
    with torch.no_grad():
        whole = made.compressor.encode(ids, ratio=1)
        for segment in (1, 7, 13, 39):
            pieces = made.compressor.encode(ids, ratio=1, segment=segment)
            close(pieces.keys, whole.keys)
            close(pieces.values, whole.values)
            assert torch.equal(pieces.positions, whole.positions)


@family
def test_ratio_one_compact_equals_the_base_model(pair: Maker, family: str) -> None:
    """Without gaps, compact positions are the original ones."""
    made = pair(family, positions="compact")
    ids = tokens(1, 30)
    with torch.no_grad():
        for segment in (None, 8):
            nuggets = made.compressor.encode(ids[:, :20], ratio=1, segment=segment)
            close(made.compressor.decode(nuggets, ids[:, 20:]), made.base(ids).logits[:, 20:])


# -- encoding against a slow reference


@family
def test_nuggets_are_the_selected_tokens_of_a_full_cache_in_every_layer(pair: Maker, family: str) -> None:
    made = pair(family)
    stir(made.compressor)
    compressor = made.compressor
    ids = tokens(1, 33)
    with torch.no_grad():
        nuggets = compressor.encode(ids, ratio=4)
        with compressor.adapters.use("phi"):
            from transformers import DynamicCache

            from dodo.attention import cache_argument

            cache = DynamicCache()
            compressor.base(ids, use_cache=True, **{cache_argument(compressor.base): cache})
    chosen = nuggets.indices[0]
    assert len(cache.layers) == nuggets.keys.shape[0]
    for i, layer in enumerate(cache.layers):
        close(nuggets.keys[i], layer.keys[:, :, chosen])
        close(nuggets.values[i], layer.values[:, :, chosen])


@family
def test_features_are_hidden_states_after_layer_iota_with_adapters_off(pair: Maker, family: str) -> None:
    made = pair(family, feature_layer=2)
    stir(made.compressor)
    ids = tokens(2, 21)
    with torch.no_grad():
        expected = made.base(ids, output_hidden_states=True).hidden_states[2]
        close(made.compressor._features(ids), expected)
        torch.testing.assert_close(made.compressor.score(ids), made.compressor.scorer(expected), atol=1e-4, rtol=1e-4)


@family
def test_a_decoder_sees_nuggets_at_their_positions_within_each_layers_window(pair: Maker, family: str) -> None:
    """Against the base run on the whole text, its masks restricted by hand to the selected tokens."""
    made = pair(family)
    ids, n = tokens(1, 34), 24
    with torch.no_grad():
        nuggets = made.compressor.encode(ids[:, :n], ratio=3)
        chosen = nuggets.indices[0]
        logits = made.compressor.decode(nuggets, ids[:, n:])
        expected = _masked_reference(made, ids, n, chosen)
    close(logits, expected)


def _masked_reference(made: Pair, ids: Tensor, n: int, chosen: Tensor) -> Tensor:
    """One pass of the base over all tokens, tokens from n on seeing only `chosen` of those before."""
    T = ids.shape[1]
    query, key = torch.arange(T)[:, None], torch.arange(T)[None, :]
    seen = (key <= query) & ((query < n) | (key >= n) | torch.isin(key, chosen))

    def additive(window: int | None) -> Tensor:
        allowed = seen if window is None else seen & (query - key < window)
        return torch.zeros(1, 1, T, T).masked_fill(~allowed, torch.finfo(torch.float32).min)

    windows = layer_windows(made.base.config)
    kinds = getattr(made.base.config, "layer_types", None)
    mask = additive(windows[0]) if kinds is None else {kind: additive(windows[kinds.index(kind)]) for kind in set(kinds)}
    return made.base(ids, attention_mask=mask, position_ids=torch.arange(T)[None]).logits[:, n:]


# -- batches


@family
@pytest.mark.parametrize("keep_first", [False, True])
def test_padded_rows_on_either_side_equal_single_rows(pair: Maker, family: str, keep_first: bool) -> None:
    made = pair(family, keep_first=keep_first)
    compressor = stir(made.compressor)
    texts, prompts = [tokens(1, n, seed=n)[0] for n in (31, 12, 2)], [tokens(1, m, seed=m + 50)[0] for m in (4, 7, 1)]
    with torch.no_grad():
        alone = [compressor.encode(text[None], ratio=3) for text in texts]
        expected = [compressor.decode(a, prompt[None])[0] for a, prompt in zip(alone, prompts, strict=True)]
        for left in (False, True):
            ids, mask = padded(texts, left=left)
            batch = compressor.encode(ids, mask, ratio=3)
            for i, single in enumerate(alone):
                assert batch[i].indices.tolist() == single.indices.tolist()
                close(batch[i].keys, single.keys)
            ids, mask = padded(prompts, left=left)
            logits = compressor.decode(batch, ids, mask)
            for i, want in enumerate(expected):
                close(logits[i][mask[i].bool()], want)


def padded(rows: list[Tensor], *, left: bool) -> tuple[Tensor, Tensor]:
    """Rows of a batch, filled up with a token that would show."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), VOCABULARY - 1)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


@family
@pytest.mark.parametrize("positions", ["original", "compact"])
def test_a_text_of_one_token_leaves_the_others_their_first_token(
    pair: Maker, family: str, positions: str, tmp_path: Path
) -> None:
    """It has no first token to keep beside its nugget; its neighbours do, and files, stacks and joins count for each."""
    compressor = stir(pair(family, keep_first=True, positions=positions).compressor)
    texts = [tokens(1, n, seed=n)[0] for n in (1, 31, 12, 2)]
    with torch.no_grad():
        for segment in (None, 8):
            alone = [compressor.encode(text[None], ratio=3, segment=segment) for text in texts]
            assert [a.indices[0, 0].item() for a in alone] == [0, 0, 0, 0]
            assert [a.states.item() for a in alone] == [1, 11, 5, 2]
            for left in (False, True):
                batch = compressor.encode(*padded(texts, left=left), ratio=3, segment=segment)
                batch.save(tmp_path / "f")
                for made in (batch, Nuggets.load(tmp_path / "f"), Nuggets.stack(list(batch)), Nuggets.stack(alone)):
                    assert made.sinks.tolist() == [0, 1, 1, 1]
                    assert made.k.tolist() == [1, 10, 4, 1]
                    assert made.lengths.tolist() == [1, 30, 11, 1]
                    assert made.achieved_ratio == 46 / 19
                    assert made.mask.shape == (4, 11)
                    for row, single in zip(made, alone, strict=True):
                        _close_nuggets(row, single)
                joined = Nuggets.cat(list(batch))
                _close_nuggets(joined, Nuggets.cat(alone))
                assert (joined.sinks.tolist(), joined.k.tolist(), joined.lengths.tolist()) == ([3], [16], [43])


def _close_nuggets(a: Nuggets, b: Nuggets) -> None:
    for field in dataclasses.fields(Nuggets):
        if isinstance(getattr(b, field.name), Tensor):
            close(getattr(a, field.name), getattr(b, field.name))  # integers are small: equal


def test_padding_cannot_change_anything(pair: Maker) -> None:
    made = pair("llama")
    ids, mask = padded([tokens(1, 20)[0], tokens(1, 9)[0]], left=True)
    with torch.no_grad():
        first = made.compressor.encode(ids, mask, ratio=2)
        second = made.compressor.encode(ids.masked_fill(mask == 0, 5), mask, ratio=2)
    assert torch.equal(first.keys, second.keys)
    assert torch.equal(first.indices, second.indices)


# -- counting


@pytest.mark.parametrize("ratio", [1, 2.5, 5, 10, 1000])
@pytest.mark.parametrize("keep_first", [False, True])
def test_the_result_reports_what_was_kept(pair: Maker, ratio: float, keep_first: bool) -> None:
    made = pair("llama", keep_first=keep_first)
    with torch.no_grad():
        nuggets = made.compressor.encode(tokens(1, 41), ratio=ratio)
    n = 41 - keep_first
    assert nuggets.lengths.tolist() == [n]
    assert nuggets.k.tolist() == [math.ceil(n / ratio)]
    assert nuggets.states.tolist() == [math.ceil(n / ratio) + keep_first]
    assert nuggets.achieved_ratio == pytest.approx(41 / int(nuggets.states))
    assert nuggets.nbytes == nuggets.keys.numel() * 4 * 2
    assert nuggets.full_cache_nbytes * int(nuggets.states) == nuggets.nbytes * 41
    assert int(nuggets.indices[0, -1]) == 40
    assert bool((nuggets.indices.diff() > 0).all())


def test_an_absolute_number_of_nuggets_is_kept(pair: Maker) -> None:
    with torch.no_grad():
        nuggets = pair("llama").compressor.encode(tokens(2, 30), nuggets=7)
    assert nuggets.k.tolist() == [7, 7]
    assert nuggets.ratio is None


def test_the_first_token_is_kept_beyond_the_k_nuggets(pair: Maker) -> None:
    with torch.no_grad():
        nuggets = pair("llama", keep_first=True).compressor.encode(tokens(1, 31), ratio=10)
    assert nuggets.indices[0, 0] == 0
    assert nuggets.k.tolist() == [3]
    assert nuggets.sinks.tolist() == [1]


def test_one_token_is_one_nugget(pair: Maker) -> None:
    for keep_first in (False, True):
        with torch.no_grad():
            nuggets = pair("llama", keep_first=keep_first).compressor.encode(tokens(1, 1), ratio=10)
        assert (nuggets.k.tolist(), nuggets.lengths.tolist(), nuggets.indices.tolist()) == ([1], [1], [[0]])
        assert nuggets.sinks.tolist() == [0]


def test_a_text_without_tokens_is_refused(pair: Maker) -> None:
    made = pair("llama")
    with pytest.raises(InputError, match="no tokens"):
        made.compressor.encode(tokens(2, 5), torch.tensor([[1] * 5, [0] * 5]))


@pytest.mark.parametrize("arguments", [{"ratio": 0.5}, {"ratio": float("nan")}, {"nuggets": 0}, {"ratio": 2, "nuggets": 3}])
def test_a_bad_ratio_or_number_is_refused(pair: Maker, arguments: dict[str, float]) -> None:
    with pytest.raises(InputError):
        pair("llama").compressor.encode(tokens(1, 9), **arguments)  # type: ignore[arg-type]


def test_given_scores_select_instead_of_the_scorers(pair: Maker) -> None:
    scores = torch.zeros(1, 12)
    scores[0, [2, 5, 7]] = 1
    with torch.no_grad():
        nuggets = pair("llama").compressor.encode(tokens(1, 12), nuggets=4, scores=scores)
    assert nuggets.indices.tolist() == [[2, 5, 7, 11]]


def test_selection_by_density_is_a_setting(pair: Maker) -> None:
    compressor = pair("llama", selection="density", keep_first=True).compressor
    with torch.no_grad():
        evenly = compressor.encode(tokens(2, 41), ratio=5, scores=torch.zeros(2, 41))
        nuggets = compressor.encode(tokens(2, 41), ratio=5)
        given = compressor.encode(tokens(2, 41), ratio=5, select_by=-torch.arange(41.0).expand(2, 41))
    assert evenly.indices.tolist() == [[0, *range(5, 41, 5)]] * 2
    assert nuggets.k.tolist() == [8, 8]
    assert nuggets.indices[:, -1].tolist() == [40, 40]
    assert given.indices.tolist() == [[*range(8), 40]] * 2  # the highest of the given values, spread or not


def test_selection_by_coverage_is_a_setting(pair: Maker) -> None:
    """Each text gets the nuggets that it gets alone, however long its companion is; the first token stands outside."""
    compressor = pair("llama", selection="coverage", reach=4.0, keep_first=True).compressor
    ids, mask = tokens(2, 41), torch.ones(2, 41, dtype=torch.long)
    mask[1, 17:] = 0
    with torch.no_grad():
        nuggets = compressor.encode(ids, mask, ratio=5)
        alone = [compressor.encode(ids[:1], ratio=5), compressor.encode(ids[1:, :17], ratio=5)]
        top_k = pair("llama", keep_first=True).compressor.encode(ids, mask, ratio=5)
    assert nuggets.k.tolist() == [8, 4]
    for row, single in enumerate(alone):
        assert nuggets.indices[row][nuggets.mask[row]].tolist() == single.indices[0].tolist()
        assert single.indices[0, 0] == 0
    assert [nuggets.indices[0, -1].item(), alone[1].indices[0, -1].item()] == [40, 16]
    assert nuggets.indices.tolist() != top_k.indices.tolist()


def test_runs_are_a_setting_for_the_text_alone(pair: Maker) -> None:
    """Questions get the nuggets that they had; the file says which they are."""
    settings: dict[str, Any] = {"selection": "coverage", "reach": 4.0, "keep_first": True}
    plain, running = pair("llama", **settings).compressor, pair("llama", **settings, runs=True).compressor
    ids, scores = tokens(2, 81), 3 * torch.randn(2, 81, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor([8, 8])
    best = prefer_runs(scores, wanted, torch.ones(2, 81, dtype=torch.bool).index_fill(1, torch.tensor([0]), False), reach=4.0)
    real = torch.ones(2, 81, dtype=torch.bool)
    for use in ("questions", "text"):
        before, after = (made.select(scores, real, ratio=10, use=use)[0].indices for made in (plain, running))
        assert torch.equal(before, after) == (use == "questions")
    assert after[:, 1:].tolist() == best.topk(8).indices.sort().values.tolist()
    with torch.no_grad():
        assert [running.encode(ids, ratio=10, use=use).use for use in ("questions", "text")] == ["questions", "text"]
        assert plain.encode(ids, ratio=10, use="text").use is None  # one selection serves both


# -- segments


@pytest.mark.parametrize("positions", ["original", "compact"])
def test_selection_does_not_depend_on_the_segments(pair: Maker, positions: str) -> None:
    made = pair("llama", positions=positions)
    ids = tokens(1, 90)
    with torch.no_grad():
        whole = made.compressor.encode(ids, ratio=6)
        for segment in (10, 33, 64):
            assert made.compressor.encode(ids, ratio=6, segment=segment).indices.tolist() == whole.indices.tolist()


def test_segments_equal_a_slow_reference(pair: Maker) -> None:
    """Each token sees its own piece and the nuggets before it; pieces end at nuggets."""
    made = pair("llama")
    compressor = stir(made.compressor)
    ids = tokens(1, 50)
    with torch.no_grad():
        nuggets = compressor.encode(ids, ratio=5, segment=17)
        chosen = nuggets.indices[0].tolist()
        ends, begin = [], 0
        while begin < 50:
            inside = [i for i in chosen if begin <= i < min(begin + 17, 50)]
            begin = 50 if begin + 17 >= 50 else (inside or [i for i in chosen if i >= begin])[-1] + 1
            ends.append(begin)
        piece_of = torch.tensor([next(p for p, end in enumerate(ends) if i < end) for i in range(50)])
        query, key = torch.arange(50)[:, None], torch.arange(50)[None, :]
        same_piece = piece_of[:, None] == piece_of[None, :]
        seen = (key <= query) & (same_piece | torch.isin(key, torch.tensor(chosen)))
        mask = torch.zeros(1, 1, 50, 50).masked_fill(~seen, torch.finfo(torch.float32).min)
        from transformers import DynamicCache

        from dodo.attention import cache_argument

        cache = DynamicCache()
        with compressor.adapters.use("phi"):
            compressor.base(ids, attention_mask=mask, use_cache=True, **{cache_argument(compressor.base): cache})
    assert len(ends) > 2
    for i, layer in enumerate(cache.layers):
        close(nuggets.keys[i], layer.keys[:, :, nuggets.indices[0]])
        close(nuggets.values[i], layer.values[:, :, nuggets.indices[0]])


def test_a_text_longer_than_the_window_is_refused_in_original_positions(pair: Maker) -> None:
    with pytest.raises(WindowError, match="256 positions"):
        pair("llama").compressor.encode(tokens(1, 257), ratio=4)


def test_a_text_many_windows_long_stays_within_the_window_in_compact_positions(pair: Maker) -> None:
    compressor = pair("llama", positions="compact").compressor
    seen = _record_positions(compressor)
    with torch.no_grad():
        nuggets = compressor.encode(tokens(1, 1500), ratio=20)
    assert nuggets.k.tolist() == [75]
    assert nuggets.positions[0].tolist() == list(range(75))
    assert nuggets.next_positions.tolist() == [75]
    assert max(seen) < 256


@pytest.mark.parametrize("segment", [257, 2560])
def test_no_segment_is_longer_than_the_window(pair: Maker, segment: int) -> None:
    compressor = pair("llama", positions="compact").compressor
    seen, ids = _record_positions(compressor), tokens(1, 300)
    with torch.no_grad():
        compressor.encode(ids, ratio=20, segment=segment)
        compressor.encode(ids[:, :100], ratio=20, start=200)
    assert max(seen) < 256


def test_a_segment_without_a_nugget_is_read_with_the_next_one(pair: Maker) -> None:
    compressor = stir(pair("llama", positions="compact").compressor)
    ids, by = tokens(1, 300), torch.zeros(1, 300)
    by[0, [0, 20, 190, 299]] = 1.0
    other = ids.clone()
    other[0, 100:110] = (other[0, 100:110] + 1) % 90
    with torch.no_grad():
        one, two = (compressor.encode(text, nuggets=4, select_by=by, segment=64) for text in (ids, other))
    assert one.indices[0].tolist() == [0, 20, 190, 299]
    assert torch.equal(one.keys[..., :2, :], two.keys[..., :2, :])
    assert (one.keys[1:, ..., 2, :] - two.keys[1:, ..., 2, :]).abs().max() > 1e-3  # the nugget behind what changed


def test_tokens_that_no_nugget_can_hold_are_told_of(pair: Maker) -> None:
    compressor = pair("llama", positions="compact").compressor
    seen, by = _record_positions(compressor), torch.zeros(1, 700)
    by[0, [0, 20, 690, 699]] = 1.0
    with torch.no_grad(), pytest.warns(DodoWarning, match="416 tokens from the 22th on are lost"):
        nuggets = compressor.encode(tokens(1, 700), nuggets=4, select_by=by)
    assert nuggets.indices[0].tolist() == [0, 20, 690, 699]
    assert max(seen) < 256


def _record_positions(compressor: object) -> list[int]:
    seen: list[int] = []
    backbone = compressor.base.base_model  # type: ignore[attr-defined]
    backbone.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int((kwargs.get("position_ids", args[-1])).max())), with_kwargs=True
    )
    return seen


def test_nuggets_that_would_fill_the_window_are_refused(pair: Maker) -> None:
    with pytest.raises(WindowError, match="higher ratio"):
        pair("llama", positions="compact").compressor.encode(tokens(1, 600), ratio=1)


def test_only_one_segment_of_keys_is_held_while_encoding(pair: Maker) -> None:
    """Memory is bounded: what attention sees is one segment and the nuggets so far."""
    compressor = pair("llama", positions="compact").compressor
    widths: list[int] = []
    attention = compressor.base.base_model.layers[0].self_attn
    attention.register_forward_hook(
        lambda _, args, kwargs, out: widths.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
    )
    with torch.no_grad():
        compressor.encode(tokens(1, 900), ratio=10, segment=64)
    encoder = [w for w in widths if w <= 64]
    assert sum(encoder) >= 900 - 256
    assert max(w for w in widths) <= 256  # features: at most one window


# -- numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral, sliding"])
def test_half_precision_is_finite_with_padding_everywhere(pair: Maker, dtype: torch.dtype, family: str) -> None:
    compressor = pair(family).compressor
    compressor.base.to(dtype)
    ids, mask = padded([tokens(1, 23)[0], tokens(1, 3)[0]], left=True)
    nuggets = compressor.encode(ids, mask, ratio=2)
    logits = compressor.decode(nuggets, ids, mask)
    assert bool(torch.isfinite(logits).all())
    logits.float().logsumexp(-1).mean().backward()
    for name, parameter in compressor.named_parameters():
        assert parameter.grad is None or bool(torch.isfinite(parameter.grad).all()), name


@family
def test_starting_later_equals_shifting(pair: Maker, family: str) -> None:
    made = pair(family)
    compressor = stir(made.compressor)
    ids = tokens(2, 26)
    with torch.no_grad():
        shifted = compressor.encode(ids, ratio=3).shift(40)
        later = compressor.encode(ids, ratio=3, start=40)
    close(shifted.keys, later.keys)
    close(shifted.values, later.values)
    assert torch.equal(shifted.positions, later.positions)
    assert torch.equal(shifted.next_positions, later.next_positions)


def test_decoding_does_not_change_the_nuggets(pair: Maker) -> None:
    compressor = pair("llama").compressor
    with torch.no_grad():
        nuggets = compressor.encode(tokens(1, 30), ratio=4)
        before = dataclasses.replace(nuggets, keys=nuggets.keys.clone(), values=nuggets.values.clone())
        first = compressor.decode(nuggets, tokens(1, 5))
        second = compressor.decode(nuggets, tokens(1, 5))
    assert torch.equal(first, second)
    _same(before, nuggets)


def _same(a: Nuggets, b: Nuggets) -> None:
    for field in dataclasses.fields(Nuggets):
        left, right = getattr(a, field.name), getattr(b, field.name)
        assert torch.equal(left, right) if isinstance(left, Tensor) else left == right, field.name


def test_the_soft_token_stands_before_the_decoded_tokens(pair: Maker) -> None:
    made = pair("llama")
    compressor = made.compressor
    ids = tokens(1, 12)
    with torch.no_grad():
        nuggets = compressor.encode(ids, ratio=1)
        logits = compressor.decode(nuggets, ids, soft_token=True)
        embedded = made.base.get_input_embeddings()(torch.cat([ids, ids], dim=1))
        embedded = torch.cat([embedded[:, :12], compressor.soft_token.expand(1, 1, -1), embedded[:, 12:]], dim=1)
        expected = made.base(inputs_embeds=embedded).logits[:, 12:]
    assert logits.shape[1] == 13
    close(logits, expected)


def test_input_of_the_wrong_shape_or_place_is_one_clear_error(pair: Maker) -> None:
    compressor = pair().compressor
    ids = tokens(2, 12)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids[:, :0]}, "nothing to compress"),
        ({"input_ids": ids[:0]}, "nothing to compress"),
        ({"input_ids": ids, "start": -5}, "start must be a position"),
        ({"input_ids": ids, "scores": torch.zeros(2, 5)}, "scores have shape"),
        ({"input_ids": ids, "select_by": torch.zeros(1, 12)}, "select_by have shape"),
        ({"input_ids": ids, "ratio": 10**400}, "ratio must be a number"),
    ]
    for arguments, said in wrong:
        with pytest.raises(InputError, match=said):
            compressor.encode(**{"ratio": 3, **arguments})
    nuggets = compressor.encode(ids, ratio=3)
    for arguments, said in (((ids[:, :0],), "no tokens to decode"), ((ids, torch.ones(2, 5)), "attention_mask has shape")):
        with pytest.raises(InputError, match=said):
            compressor.decode(nuggets, *arguments)


@pytest.mark.parametrize(("family", "window"), [("llama", 256), ("phi3, longrope", 128)])
def test_what_is_decoded_beyond_the_window_is_refused(family: str, window: int, pair: Maker) -> None:
    compressor = pair(family).compressor
    with torch.no_grad():
        nuggets = compressor.encode(tokens(1, window - 5), ratio=8)
        assert compressor.decode(nuggets, tokens(1, 5)).isfinite().all()
        with pytest.raises(WindowError, match=f"position {window} does not fit the base's window of {window}"):
            compressor.decode(nuggets, tokens(1, 6))
        with pytest.raises(WindowError):
            compressor.decode(nuggets.shift(10**6), tokens(1, 1))
        compressor.decode(nuggets.compact(), tokens(1, 25))


def test_gradients_through_a_backend_that_drops_them_are_refused(pair: Maker) -> None:
    compressor = pair().compressor
    nuggets = compressor.encode(tokens(1, 12), ratio=3)
    for backend in ("flash_attention_2", "kernels-community/flash-attn2", "paged|flash_attention_2", "flex_attention"):
        compressor.base.config._attn_implementation = backend
        with pytest.raises(UnsupportedModelError, match="drops the score term"):
            compressor.decode(nuggets, tokens(1, 4))
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match="takes no masks by position"):
            compressor.decode(nuggets, tokens(1, 4))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_which_nothing_may_be_seen_are_finite(dtype: torch.dtype, backend: str) -> None:
    model = tiny_model(attention=backend).to(dtype)
    positions = torch.arange(3)[None]
    scores = torch.full((1, 3), 1e4, requires_grad=True)
    seen = torch.tensor([[False, False, True]])
    masks = attention_masks(model, query_positions=positions, key_positions=positions, key_mask=seen, scores=scores)
    assert isinstance(masks, torch.Tensor) and masks.isfinite().all()
    assert (masks[0, 0, 0] == masks[0, 0, 0, 0]).all()  # the first query sees nothing, so all alike
    hidden = model.model(input_ids=tokens(1, 3), attention_mask=masks, position_ids=positions).last_hidden_state
    hidden.float().sum().backward()
    assert hidden.isfinite().all() and scores.grad is not None and scores.grad.isfinite().all()
