"""Laws of streaming: the parallel pass's numbers, in bounded memory, for endless text and with transformers' own generation."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.cache_utils import DynamicLayer

from dodo.adapters import Adapters
from dodo.attention import ROOM, RoomyLayer, cache_argument
from dodo.autoregressive import Autoregressive
from dodo.compressor import Compressor
from dodo.config import DodoConfig, LoraSettings
from dodo.errors import DodoWarning, InputError
from dodo.model import Dodo
from dodo.streaming import StreamingCache, feed, generate_ids, streaming
from dodo.thresholds import REACH, Pace, Thresholds, realised_ratio
from tests.conftest import FAMILIES, Pair, small_config, stir, tiny_model, tokens
from tests.standins.models import byte_tokenizer, tiny_llama
from tests.test_autoregressive import close, language_model, pace_of

Maker = Callable[..., Pair]
family = pytest.mark.parametrize("family", FAMILIES)
NEVER = 10_000  # no token's id


def stream(lm: Autoregressive, ids: Tensor, piece: int) -> Tensor:
    cache = StreamingCache(lm)
    return torch.cat([feed(cache, part) for part in ids.split(piece, dim=1)], dim=1)


def small_window(window: int, family: str = "llama", **config: Any) -> Compressor:
    """Rotations do not depend on the window, so the same weights serve for any."""
    model = tiny_model(family)
    model.config.max_position_embeddings = window
    return stir(Compressor(model, small_config(**config)).eval())


# -- streaming is the parallel pass


@family
@pytest.mark.parametrize(("keep_first", "max_states", "pieces"), [(False, None, (5, 36)), (True, 13, (1, 7))])
def test_pieces_of_any_size_give_the_parallel_pass(
    pair: Maker, family: str, keep_first: bool, max_states: int | None, pieces: tuple[int, ...]
) -> None:
    compressor = stir(pair(family, keep_first=keep_first).compressor)
    ids = tokens(1, 36)
    lm = language_model(compressor, ids, max_states=max_states)
    with torch.no_grad():
        expected = lm.forward(ids)
    for piece in pieces:
        close(stream(lm, ids, piece), expected)


@family
def test_all_kept_with_fresh_adapters_streams_the_base_model(pair: Maker, family: str) -> None:
    made = pair(family, keep_first=True)
    ids = tokens(1, 40)
    with torch.no_grad():
        close(stream(language_model(made.compressor, threshold=-math.inf), ids, 9), made.base(ids).logits)


@pytest.mark.parametrize("reach", [REACH, 4])
@pytest.mark.parametrize("keep_first", [False, True])
def test_a_threshold_that_follows_the_text_is_the_same_in_any_pieces(
    pair: Maker, keep_first: bool, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what is owed reaches its bounds."""
    monkeypatch.setattr("dodo.thresholds.REACH", reach)
    compressor = stir(pair("llama", keep_first=keep_first).compressor)
    ids, lm = tokens(1, 61), language_model(compressor)
    lm = dataclasses.replace(lm, threshold=pace_of(lm, tokens(4, 61, seed=5)))
    with torch.no_grad():
        expected, kept = lm.forward(ids), lm.keep(lm.score(ids))[0, int(keep_first) :]
    seen = set()
    for piece in (1, 7, 61):
        cache, logits = StreamingCache(lm), []
        for part in ids.split(piece, dim=1):
            logits.append(feed(cache, part))
            seen.add(cache.owed)
        close(torch.cat(logits, dim=1), expected)
        assert cache.chosen == int(kept.sum())
    assert bool({-reach / 3, 2 * reach / 3} & seen) == (reach == 4)
    assert 61 / 3 - 4 < cache.chosen < 61 / 3 + 4


def test_the_last_logits_can_be_had_alone(pair: Maker) -> None:
    lm, ids = language_model(stir(pair("llama").compressor)), tokens(1, 23)
    whole = stream(lm, ids, 23)
    for wanted in (1, 3, 9):
        close(feed(StreamingCache(lm), ids, logits_to_keep=wanted), whole[:, -wanted:], 1e-5)


def test_a_single_token_is_read_with_merged_weights_and_the_base_stays(pair: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = stir(pair("llama").compressor)
    lm, ids = language_model(compressor, tokens(1, 20)), tokens(1, 20)
    before = {name: p.detach().clone() for name, p in compressor.named_parameters()}
    calls: list[int] = []
    for name, module in compressor.base.named_modules():
        if name.endswith(("lora_A.phi", "lora_A.theta")):
            module.register_forward_hook(lambda *_: calls.append(1))
    merged = Adapters.merged
    used: list[str] = []
    monkeypatch.setattr(Adapters, "merged", lambda self, name: used.append(name) or merged(self, name))
    stream(lm, ids, 1)
    assert not calls
    assert set(used) == {"phi", "theta"}
    assert all(torch.equal(before[name], p) for name, p in compressor.named_parameters())


# -- what is held


def test_a_layer_with_room_copies_what_it_holds_only_when_the_room_is_full_or_the_states_are_replaced() -> None:
    layer, plain, moved, place = RoomyLayer(), DynamicLayer(), [], 0
    new = torch.randn(2 * ROOM + 3, 2, 1, 3, 1, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for i, (key, value) in enumerate(new):
            seen, expected = layer.update(key, value), plain.update(key, value)
            assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
            if seen[0].data_ptr() != place:
                moved.append(i)
            place = seen[0].data_ptr()
        assert moved == [0, 1, ROOM + 2]
        for each in (layer, plain):
            each.keys, each.values = each.keys[:, :, ::2].clone(), each.values[:, :, ::2].clone()
        short = layer.update(*new[0]), plain.update(*new[0])
        assert all(torch.equal(a, b) for a, b in zip(*short, strict=True))
        layer.crop(-3)
        cropped = layer.keys.clone()
        layer.update(*new[0])
        assert torch.equal(layer.keys[:, :, :-1], cropped)
    learning = new[0, 0].clone().requires_grad_()
    keys, _ = layer.update(learning, new[0, 1])
    keys.sum().backward()
    assert bool((learning.grad == 1).all())


def test_what_left_the_window_and_was_not_kept_is_dropped(pair: Maker) -> None:
    compressor = stir(pair("llama", keep_first=True).compressor)
    ids = tokens(1, 61)
    lm = language_model(compressor, ids)
    cache = StreamingCache(lm)
    feed(cache, ids)
    kept = lm.keep(lm.score(ids))[0].tolist()
    left = 60 - lm.window
    expected = [j for j in range(61) if j >= left or kept[j] or j == 0]
    assert cache.positions.tolist() == expected
    assert len(expected) < 40
    assert all(layer.keys.shape[2] == layer.values.shape[2] == len(expected) for layer in cache.states.layers)
    assert cache.get_seq_length() == 61


def _recorded_positions(compressor: Compressor) -> list[int]:
    seen: list[int] = []
    compressor.base.base_model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int(kwargs.get("position_ids", args[-1]).max())), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize(("keep_first", "max_states", "piece"), [(False, None, 5), (True, None, 3), (True, 20, 7)])
def test_twenty_windows_of_text_in_flat_memory_with_positions_in_range(
    keep_first: bool, max_states: int | None, piece: int
) -> None:
    compressor = small_window(32, keep_first=keep_first)
    ids = tokens(1, 20 * 32)
    lm = language_model(compressor)
    threshold = Thresholds.estimate(lm.sampled_scores([tokens(1, 500, seed=8)[0].tolist()]), feature_window=16).at(3)
    lm = language_model(compressor, threshold=threshold, max_states=max_states)
    seen = _recorded_positions(compressor)
    cache, kept, held = StreamingCache(lm), 0, []
    for part in ids.split(piece, dim=1):
        assert bool(torch.isfinite(feed(cache, part)).all())
        kept += int(cache.kept[-part.shape[1] :].sum())
        held.append(len(cache.positions))
        assert 0 <= int(cache.positions[0]) <= int(cache.positions[-1]) < cache.next_position <= 32
        assert bool((cache.positions.diff() > 0).all())
        assert not keep_first or int(cache.positions[0]) == 0
        assert cache.features.states < lm.feature_window + piece
    assert max(seen) < 32
    assert max(held) <= (max_states or 32)
    assert max(held[len(held) // 2 :]) <= max(held[: len(held) // 2]) + 2
    assert cache.get_seq_length() == 640
    assert 640 / kept == pytest.approx(3, rel=0.25)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3, sliding, partial rotation", "smollm3"])
def test_turning_keys_back_changes_nothing(family: str) -> None:
    """The same weights with a window that is never full; memory is short enough for both to forget the same."""
    ids, results = tokens(1, 20 * 64), []
    for window in (64, 4096):
        lm = language_model(small_window(window, family), segment=24, max_states=33)
        dense = Thresholds.estimate(lm.sampled_scores([ids[0, :500].tolist()]), feature_window=16).at(1.5)
        results.append(stream(dataclasses.replace(lm, threshold=dense), ids, 500))
    close(results[0], results[1], 1e-3)


def test_a_first_token_stays_at_its_place(pair: Maker) -> None:
    compressor = small_window(48, keep_first=True)
    lm = language_model(compressor, threshold=math.inf)
    cache, ids = StreamingCache(lm), tokens(1, 300)
    feed(cache, ids)
    first = cache.states.layers[0].keys[:, :, 0].clone()
    fresh = StreamingCache(lm)
    feed(fresh, ids[:, :1])
    close(first, fresh.states.layers[0].keys[:, :, 0], 1e-6)


# -- transformers' generation


def _greedy(lm: Autoregressive, prompt: list[int], made: list[int]) -> list[int]:
    """What the parallel pass takes for most likely behind each token of prompt and new text, but for the last."""
    with torch.no_grad():
        logits = lm.forward(torch.tensor([prompt + made]))[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize(("family", "length"), [*((name, 37) for name in FAMILIES), ("llama", 1), ("gemma3", 8)])
def test_greedy_generation_takes_the_argmax_of_the_parallel_pass(pair: Maker, family: str, length: int) -> None:
    compressor = stir(pair(family, keep_first=True).compressor)
    lm = language_model(compressor, tokens(1, 40), max_states=14)
    prompt = tokens(1, length)[0].tolist()
    made = generate_ids(lm, prompt, max_new_tokens=10, eos_token_id=NEVER)
    assert len(made) == 10
    assert made == _greedy(lm, prompt, made)


def test_generation_passes_the_original_window_of_longrope(pair: Maker) -> None:
    """There transformers' Phi-3 would throw the cache away."""
    compressor = stir(pair("phi3, longrope").compressor)
    lm = language_model(compressor, tokens(1, 40))
    prompt = tokens(1, 125)[0].tolist()
    made = generate_ids(lm, prompt, max_new_tokens=12, eos_token_id=NEVER)
    logits = stream(lm, torch.tensor([prompt + made]), 50)
    assert made == logits[0, 124:-1].argmax(-1).tolist()


class _After(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((1,), input_ids.shape[1] >= self.length)


class _Streamer:
    def __init__(self) -> None:
        self.got: list[int] = []

    def put(self, value: Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.got.append(-1)


def test_sampling_streamers_and_stopping_are_transformers_own(pair: Maker) -> None:
    compressor = stir(pair("llama").compressor)
    lm, prompt = language_model(compressor, tokens(1, 40)), tokens(1, 21)[0].tolist()
    torch.manual_seed(0)
    first = generate_ids(lm, prompt, max_new_tokens=20, do_sample=True, eos_token_id=NEVER)
    torch.manual_seed(0)
    streamer = _Streamer()
    stopped = generate_ids(
        lm, prompt, max_new_tokens=20, do_sample=True, eos_token_id=NEVER, streamer=streamer, stopping_criteria=[_After(26)]
    )
    assert stopped == first[:5]
    assert streamer.got == [*prompt, *stopped, -1]
    greedy = generate_ids(lm, prompt, max_new_tokens=20, eos_token_id=NEVER)
    assert generate_ids(lm, prompt, max_new_tokens=20, eos_token_id=greedy[2]) == greedy[: greedy.index(greedy[2])]


def test_a_text_goes_on_from_its_cache(pair: Maker) -> None:
    compressor = stir(pair("llama", keep_first=True).compressor)
    lm, ids = language_model(compressor, tokens(1, 40)), tokens(1, 50)
    cache = StreamingCache(lm)
    feed(cache, ids[:, :33])
    made = generate_ids(lm, ids[0, 33:].tolist(), max_new_tokens=8, eos_token_id=NEVER, cache=cache)
    assert made == generate_ids(lm, ids[0].tolist(), max_new_tokens=8, eos_token_id=NEVER)
    assert cache.tokens == 57


def test_the_last_token_made_waits_to_be_read_unless_it_ends_the_text(pair: Maker) -> None:
    compressor = stir(pair("llama", keep_first=True).compressor)
    lm, ids = language_model(compressor, tokens(1, 40)), tokens(1, 20)[0].tolist()
    cache = StreamingCache(lm)
    made = generate_ids(lm, ids, max_new_tokens=5, eos_token_id=NEVER, cache=cache)
    assert cache.unread == made[-1:]
    more = generate_ids(lm, [*cache.unread, 7], max_new_tokens=3, eos_token_id=NEVER, cache=cache)
    assert more == generate_ids(lm, [*ids, *made, 7], max_new_tokens=3, eos_token_id=NEVER)
    ended = StreamingCache(lm)
    short = generate_ids(lm, ids, max_new_tokens=5, eos_token_id=made[2], cache=ended)
    assert (short, ended.unread) == (made[: made.index(made[2])], [])


def test_a_scorer_whose_scores_are_no_numbers_is_told_of(pair: Maker) -> None:
    compressor = pair("llama").compressor
    lm = language_model(compressor, tokens(1, 40))
    with torch.no_grad():
        next(compressor.scorer.parameters()).fill_(math.nan)
    with pytest.raises(InputError, match="no numbers"):
        feed(StreamingCache(lm), tokens(1, 5))


def test_generate_of_the_base_itself_streams_within_the_context(pair: Maker) -> None:
    made = pair("llama", keep_first=True)
    compressor = stir(made.compressor)
    lm, ids, base = language_model(compressor, tokens(1, 40)), tokens(1, 30), compressor.base
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
    with streaming(lm):
        streamed = base.generate(ids, **{cache_argument(base): StreamingCache(lm)}, **settings)
        ordinary = base.generate(ids, **settings)
    assert (made_here := streamed[0, 30:].tolist()) == _greedy(lm, ids[0].tolist(), made_here)
    assert torch.equal(ordinary, made.base.generate(ids, **settings))
    assert "forward" not in vars(base)


REFUSED = (
    {"num_beams": 2},
    {"num_return_sequences": 3, "do_sample": True},
    {"guidance_scale": 2.0},
    {"use_cache": False},
    {"return_dict_in_generate": True},
    {"prompt_lookup_num_tokens": 3},
    {"assistant_early_exit": 1},
)


def test_what_a_stream_cannot_do_is_refused(pair: Maker) -> None:
    compressor = pair("llama").compressor
    lm, base, ids = language_model(compressor), compressor.base, tokens(1, 12)
    prompt = ids[0].tolist()
    for refused in REFUSED:
        with pytest.raises(InputError, match=next(iter(refused))):
            generate_ids(lm, prompt, max_new_tokens=4, **refused)
    with pytest.raises(InputError, match="empty"):
        generate_ids(lm, [], max_new_tokens=4)
    with pytest.raises(InputError, match="max_new_tokens"):
        generate_ids(lm, prompt, max_new_tokens=0)
    with pytest.raises(InputError, match="as far as the base's vocabulary goes"):
        generate_ids(lm, [*prompt, base.config.vocab_size], max_new_tokens=4)
    for wrong in (tokens(2, 5), tokens(1, 5)[:, :0], tokens(1, 5)[0]):
        with pytest.raises(InputError):
            feed(StreamingCache(lm), wrong)
    with streaming(lm), torch.no_grad():
        cache = {cache_argument(base): StreamingCache(lm)}
        for name in ("num_beams", "num_return_sequences"):
            with pytest.raises(InputError, match="one text"):
                base.generate(ids, max_new_tokens=2, do_sample=name != "num_beams", pad_token_id=0, **{name: 2}, **cache)
        with pytest.raises(InputError, match="padding"):
            base(ids, attention_mask=torch.tensor([[0] + [1] * 11]), **cache)
        with pytest.raises(InputError, match="embeddings"):
            base(inputs_embeds=base.get_input_embeddings()(ids), **cache)
    cache = StreamingCache(lm)
    for change in (cache.crop, cache.batch_repeat_interleave, cache.batch_select_indices, cache.reorder_cache, cache.reset):
        with pytest.raises(InputError, match="taken back"):
            change(1)
    assert "forward" not in vars(base)


def test_a_base_whose_own_settings_a_stream_cannot_follow_streams_all_the_same(pair: Maker) -> None:
    compressor = stir(pair("llama").compressor)
    lm, prompt = language_model(compressor, tokens(1, 40)), tokens(1, 21)[0].tolist()
    expected = generate_ids(lm, prompt, max_new_tokens=5, eos_token_id=NEVER)
    compressor.base.generation_config.use_cache = False
    assert generate_ids(lm, prompt, max_new_tokens=5, eos_token_id=NEVER) == expected


def test_the_base_alone_does_not_read_a_stream(pair: Maker) -> None:
    lm, ids = language_model(stir(pair("llama").compressor), tokens(1, 40)), tokens(1, 30)
    cache, base = StreamingCache(lm), lm.compressor.base
    feed(cache, ids[:, :20])
    for call in (base, functools.partial(base.generate, max_new_tokens=2, attention_mask=torch.ones(1, 21))):
        with pytest.raises(InputError, match="not by the base alone"), torch.no_grad():
            call(ids[:, 20:21], **{cache_argument(base): cache})
    close(feed(cache, ids[:, 20:]), stream(lm, ids, 30)[:, 20:])


def test_a_cache_of_another_model_or_of_other_settings_is_refused(pair: Maker) -> None:
    lm, prompt = language_model(stir(pair("llama").compressor)), tokens(1, 9)[0].tolist()
    for other in (dataclasses.replace(lm, window=lm.window + 1), language_model(stir(pair("llama").compressor, seed=8))):
        cache = StreamingCache(other)
        with pytest.raises(InputError, match="another language model"):
            generate_ids(lm, prompt, max_new_tokens=2, cache=cache)
        assert cache.tokens == 0
    assert generate_ids(lm, prompt, max_new_tokens=2, cache=StreamingCache(dataclasses.replace(lm)))


def test_a_copy_of_a_cache_goes_on_by_itself_with_the_same_model(pair: Maker) -> None:
    lm, ids = language_model(stir(pair("llama", keep_first=True).compressor), tokens(1, 40)), tokens(1, 50)
    cache = StreamingCache(lm)
    feed(cache, ids[:, :33])
    again = copy.deepcopy(cache)
    assert again.lm is lm
    expected = feed(cache, ids[:, 33:])
    assert (again.tokens, cache.tokens) == (33, 50)
    assert torch.equal(feed(again, ids[:, 33:]), expected)
    made = [
        generate_ids(lm, [5], max_new_tokens=6, cache=each, eos_token_id=NEVER) for each in (again, copy.deepcopy(cache), cache)
    ]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("where", ["scorer", "base.lm_head", "base.base_model.layers.3"])
def test_a_stream_that_failed_half_way_is_read_no_further(pair: Maker, where: str) -> None:
    compressor = stir(pair("llama").compressor)
    lm, ids = language_model(compressor, tokens(1, 40)), tokens(1, 30)
    cache = StreamingCache(lm)
    feed(cache, ids[:, :20])

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = compressor.get_submodule(where).register_forward_pre_hook(out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        feed(cache, ids[:, 20:])
    hook.remove()
    assert cache.broken
    with pytest.raises(InputError, match="failed half way"):
        feed(cache, ids[:, 20:])
    with pytest.raises(InputError, match="failed half way"):
        generate_ids(lm, [5], max_new_tokens=2, cache=cache)


def test_generation_takes_no_mask_of_all_that_was_ever_seen(pair: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = language_model(stir(pair("llama").compressor), tokens(1, 40))
    cache, base, lengths = StreamingCache(lm), lm.compressor.base, []
    feed(cache, tokens(1, 100))
    generate = base.generate
    monkeypatch.setattr(
        base, "generate", lambda **inputs: lengths.append(inputs["attention_mask"].shape[1]) or generate(**inputs)
    )
    generate_ids(lm, [5, 6, 7], max_new_tokens=3, cache=cache)
    assert lengths == [4]


# -- the facade


def _dodo() -> Dodo:
    lora = LoraSettings(rank=2)
    dodo = Dodo.from_model(tiny_llama(), byte_tokenizer(), DodoConfig(feature_layer=2, encoder=lora, decoder=lora))
    stir(dodo.compressor)
    return dodo


TEXTS = ["Dodos lived on Mauritius. ", "Nobody has seen one since 1662, ", "when Volkert Evertsz described them. "]


def test_thresholds_are_estimated_from_texts_used_by_ratio_and_saved_with_the_adapters(tmp_path: Path) -> None:
    dodo = _dodo()
    with pytest.raises(InputError, match="no thresholds"):
        dodo.autoregressive(ratio=5)
    table = dodo.estimate_thresholds(TEXTS, feature_window=32)
    assert table == dodo.thresholds
    assert table.tokens == sum(len(dodo.document_ids(text)) - 1 for text in TEXTS)
    lm = dodo.autoregressive(ratio=5, window=6, segment=3)
    assert (lm.threshold, lm.window, lm.segment, lm.feature_window) == (Pace(table, 5), 6, 3, 32)
    scores = lm.sampled_scores(dodo.document_ids(text) for text in TEXTS)
    assert realised_ratio(scores, table.at(5)) == pytest.approx(5, rel=0.1)
    assert dodo.autoregressive(threshold=1.5).threshold == 1.5
    assert dodo.autoregressive(ratio=1).threshold == -math.inf
    with pytest.raises(InputError, match="not both"):
        dodo.autoregressive(ratio=5, threshold=0.0)

    dodo.save_pretrained(tmp_path)
    other = _dodo()
    other.load_adapters(tmp_path)
    assert other.thresholds == table
    _dodo().save_pretrained(tmp_path)
    other.load_adapters(tmp_path)
    assert other.thresholds is None


def test_thresholds_say_how_far_their_features_look_back_not_what_was_asked() -> None:
    dodo = _dodo()
    half = dodo.compressor.window // 2
    assert dodo.estimate_thresholds(TEXTS, feature_window=10 * half).feature_window == half


def test_a_ratio_far_from_what_was_trained_is_used_with_a_warning() -> None:
    dodo = _dodo()
    dodo.compressor.config = dataclasses.replace(dodo.config, trained_ratios=(2.0, 6.0))
    dodo.estimate_thresholds(TEXTS)
    with pytest.warns(DodoWarning, match=r"ratio 30 is outside the range .* \(2 to 6\)"):
        dodo.autoregressive(ratio=30)
    for settings in ({"ratio": 5}, {"ratio": 1}, {"threshold": 0.0}):
        dodo.autoregressive(**settings)


def test_writing_goes_on_with_a_text() -> None:
    dodo = _dodo()
    lm = dodo.autoregressive(threshold=0.0, window=6, segment=3, max_states=16)
    ids = dodo.document_ids(TEXTS[0])
    expected = generate_ids(lm, ids, max_new_tokens=9)
    assert dodo.write(TEXTS[0], lm, max_new_tokens=9) == dodo.tokenizer.decode(expected, skip_special_tokens=True)
    assert dodo.compressor.base.generation_config == copy.deepcopy(dodo.compressor.base).generation_config


def test_texts_without_scores_are_passed_over_and_none_at_all_is_refused() -> None:
    dodo = _dodo()
    with pytest.raises(InputError, match="no scores to estimate from"):
        dodo.estimate_thresholds([[], [1]])
    long = tokens(1, 200)[0].tolist()
    assert dodo.estimate_thresholds([[], long, [1]]) == dodo.estimate_thresholds([long])
