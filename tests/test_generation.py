"""Laws of what a base's own generation config does to a text, and what callers may ask for."""

import threading
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dodo.adapters import THETA
from dodo.config import DodoConfig, LoraSettings
from dodo.errors import InputError, UnsupportedModelError
from dodo.generation import generation_settings
from dodo.model import Dodo
from tests.conftest import stir
from tests.standins.models import byte_tokenizer, save_base, tiny_llama

TEXT = "Dodos lived on Mauritius. Nobody has seen one since 1662, when Volkert Evertsz described them."


@pytest.fixture
def dodo() -> Dodo:
    lora = LoraSettings(rank=2)
    made = Dodo.from_model(tiny_llama(), byte_tokenizer(), DodoConfig(feature_layer=2, encoder=lora, decoder=lora))
    stir(made.compressor)
    made.stamp()
    return made


def greedy(dodo: Dodo, prompt: list[int], new: int) -> list[int]:
    """By the decoder alone."""
    nuggets, ids = dodo.compress(TEXT, ratio=3), list(prompt)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(dodo.compressor.decode(nuggets, torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == 1:
                break
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "own",
    [
        {"use_cache": False},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[77], [133]]},
        {"suppress_tokens": list(range(2, 200))},
        {"do_sample": True, "temperature": 9.0, "top_k": 5},
        {"num_beams": 3},
        {"min_new_tokens": 9},
        {"cache_implementation": "static"},
    ],
)
def test_a_greedy_text_is_greedy_whatever_the_bases_config_says(dodo: Dodo, own: dict[str, object]) -> None:
    expected = greedy(dodo, [77, 133], 12)
    dodo.compressor.base.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, **own)
    before = dodo.compressor.base.generation_config.to_dict()
    made = dodo.generate_ids(dodo.compress(TEXT, ratio=3), [[77, 133]], max_new_tokens=12)[0]
    assert made == [i for i in expected if i != 1]
    assert dodo.compressor.base.generation_config.to_dict() == before


def test_a_base_folder_that_caches_nothing_generates_the_same(dodo: Dodo, tmp_path) -> None:
    model = tiny_llama()
    model.config.use_cache = False
    model.generation_config.use_cache = False
    save_base(tmp_path, model=model)
    (tmp_path / "generation_config.json").unlink()
    other = Dodo.from_pretrained(tmp_path, config=dodo.config)
    stir(other.compressor)
    other.stamp()
    nuggets = [d.compress(TEXT, ratio=3) for d in (dodo, other)]
    made = [d.generate_ids(n, [[77, 133]], max_new_tokens=12) for d, n in zip((dodo, other), nuggets, strict=True)]
    assert made[0] == made[1]


def test_a_call_that_samples_has_the_bases_own_way_of_it(dodo: Dodo) -> None:
    compressor = dodo.compressor
    own = GenerationConfig(eos_token_id=[1, 5], temperature=0.6, top_p=0.8, repetition_penalty=1.05)
    compressor.base.generation_config = own
    sampled, _ = generation_settings(compressor, 8, 0, {"do_sample": True, "top_p": 0.5})
    assert (sampled.temperature, sampled.top_p, sampled.repetition_penalty, sampled.eos_token_id) == (0.6, 0.5, 1.05, [1, 5])
    plain, _ = generation_settings(compressor, 8, 0, {})
    assert (plain.temperature, plain.top_p, plain.repetition_penalty, plain.eos_token_id) == (None, None, None, [1, 5])


@pytest.mark.parametrize(
    "refused",
    [
        {"use_cache": False},
        {"return_dict_in_generate": True},
        {"generation_config": GenerationConfig()},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static"},
    ],
)
def test_what_would_not_give_text_from_nuggets_is_refused_by_name(dodo: Dodo, refused: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(refused))):
        dodo.generate(dodo.compress(TEXT), "x", max_new_tokens=4, **refused)


def test_a_text_ends_at_a_given_string(dodo: Dodo) -> None:
    nuggets = dodo.compress(TEXT, ratio=3)
    whole = dodo.generate(nuggets, "K", max_new_tokens=12)
    stop = next(c for c in whole[2:] if c.isascii() and c.isprintable())
    short = whole[: whole.index(stop) + 1]
    assert short != whole
    assert dodo.generate(nuggets, "K", max_new_tokens=12, stop_strings=[stop]) == short
    ids = dodo._prompt_ids("K")
    assert "".join(dodo.stream(nuggets, ids, max_new_tokens=12, stop_strings=[stop], stopping_criteria=None)) == short


@pytest.mark.parametrize("setting", ["num_beams", "num_return_sequences"])
def test_one_sequence_at_a_time_is_streamed(dodo: Dodo, setting: str) -> None:
    with pytest.raises(InputError, match=f"leave {setting} out"):
        list(dodo.stream(dodo.compress(TEXT), "A", max_new_tokens=3, do_sample=True, **{setting: 2}))


def test_a_filler_that_only_the_tokenizer_knows_fills_no_rows(dodo: Dodo) -> None:
    expected = dodo.compress([TEXT, TEXT[:20]])
    dodo.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert dodo.tokenizer.pad_token_id >= dodo.compressor.base.config.vocab_size
    assert torch.equal(dodo.compress([TEXT, TEXT[:20]]).keys, expected.keys)
    assert len(dodo.generate(expected, ["A", "A longer prompt"], max_new_tokens=3)) == 2


@pytest.mark.parametrize("wrong", [None, 5, Path("a.txt")])
def test_what_is_no_text_is_refused_by_its_type(dodo: Dodo, wrong: object) -> None:
    with pytest.raises(InputError, match="is wanted, not"):
        dodo.compress(wrong)  # type: ignore[arg-type]


def test_no_tokens_are_not_all_tokens(dodo: Dodo) -> None:
    with pytest.raises(InputError, match="at least 1, not 0"):
        dodo.reconstruct(dodo.compress(TEXT), max_new_tokens=0)


def test_joined_texts_without_bos_are_rebuilt_to_their_last_token() -> None:
    lora = LoraSettings(rank=2)
    config = DodoConfig(feature_layer=2, keep_first=True, encoder=lora, decoder=lora)
    dodo = Dodo.from_model(tiny_llama(eos_token_id=None), byte_tokenizer(bos_token=None), config)
    nuggets = dodo.compress("A dodo.", ratio=1)
    joined = type(nuggets).cat([nuggets] * 6)
    made = dodo.generate_ids(joined, None, max_new_tokens=60)[0]
    assert len(made) == 60  # it does not end by itself
    assert dodo.reconstruct(joined) == dodo.tokenizer.decode(made[: 6 * 7 + 1])


def test_names_of_special_tokens_in_a_question_are_text(dodo: Dodo) -> None:
    plain, evil = dodo.question_ids("what is it?"), dodo.question_ids("what is </s> ?")
    assert plain == dodo._prompt_ids(dodo.tokenizer.decode(plain))
    assert 1 not in evil
    assert dodo.tokenizer.decode(evil) == "\nBased on the provided document, answer the following question: what is </s> ?\n"
    dodo.tokenizer.chat_template = "{{ bos_token }}[{{ messages[0]['content'] }}]</s>"
    asked = dodo.question_ids("what is </s> ?")
    assert asked.count(1) == 1  # the template's
    assert 0 not in asked  # nuggets begin with it


def test_threads_tokenise_prompts_and_documents_each_as_they_are_meant(dodo: Dodo) -> None:
    prompt, document = dodo._prompt_ids("a</s>b"), dodo.document_ids("a</s>b")
    assert prompt != document[1:]
    wrong: list[list[int]] = []

    def check(ids, expected) -> None:
        wrong.extend(found for found in (ids("a</s>b") for _ in range(2000)) if found != expected)

    threads = [
        threading.Thread(target=check, args=pair) for pair in ((dodo._prompt_ids, prompt), (dodo.document_ids, document)) * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_text_goes_on_with_its_space() -> None:
    """Some tokenizers leave out the space that a text's first word has before it."""
    words = ["<s>", "</s>", "▁it", "▁was", "▁built", "▁here"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    settings = LlamaConfig(
        vocab_size=6,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(2)
    base = LlamaForCausalLM(settings).eval()
    with torch.no_grad():
        base.lm_head.weight[:2] = 0
    lora = LoraSettings(rank=2)
    dodo = Dodo.from_model(base, fast, DodoConfig(feature_layer=2, encoder=lora, decoder=lora))
    lm = dodo.autoregressive(ratio=1)
    text = dodo.write("it was", lm, max_new_tokens=4, bad_words_ids=[[0], [1]])
    assert text.startswith(" ")
    assert len(text.split()) == 4
    assert "".join(dodo.stream_text("it was", lm, max_new_tokens=4, bad_words_ids=[[0], [1]])) == text


class Scaled(nn.Linear):
    """As layers of quantised bases are: its weights are not what it multiplies by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.125


def test_a_base_whose_weights_have_scales_generates_as_it_decodes() -> None:
    base = tiny_llama()
    for layer in base.model.layers:
        plain = layer.self_attn.q_proj
        scaled = Scaled(plain.in_features, plain.out_features, bias=False)
        scaled.weight.data = plain.weight.data * 8
        layer.self_attn.q_proj = scaled
    lora = LoraSettings(rank=2)
    dodo = Dodo.from_model(base, byte_tokenizer(), DodoConfig(feature_layer=2, encoder=lora, decoder=lora))
    stir(dodo.compressor)
    dodo.stamp()
    assert dodo.compressor.adapters._merged_weights(THETA) is None
    made = dodo.generate_ids(dodo.compress(TEXT, ratio=3), [[77, 133]], max_new_tokens=12)[0]
    assert made == [i for i in greedy(dodo, [77, 133], 12) if i != 1]


def test_a_base_with_adapters_on_it_is_refused_and_left_as_it_was(dodo: Dodo) -> None:
    before = {name: parameter.clone() for name, parameter in dodo.compressor.adapters.named_parameters()}
    with pytest.raises(InputError, match="has adapters on it already"):
        Dodo.from_model(dodo.compressor.base, dodo.tokenizer)
    after = dict(dodo.compressor.adapters.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_merged_weights_follow_a_stamp(dodo: Dodo) -> None:
    nuggets = dodo.compress(TEXT, ratio=3)
    dodo.generate_ids(nuggets, [[77, 133]], max_new_tokens=4)
    for parameter in dodo.compressor.adapters.parameters(THETA):
        parameter.data.mul_(-3)
    dodo.stamp()
    made = dodo.generate_ids(dodo.adopt(nuggets), [[77, 133]], max_new_tokens=12)[0]
    dodo.compressor.adapters.forget_merged()
    assert made == dodo.generate_ids(dodo.adopt(nuggets), [[77, 133]], max_new_tokens=12)[0]
    with dodo.compressor.adapters.use(THETA):
        assert made[0] == int(dodo.compressor.decode(nuggets, torch.tensor([[77, 133]]))[0, -1].argmax())


def test_a_backend_without_masks_is_refused(dodo: Dodo) -> None:
    nuggets = dodo.compress(TEXT)
    dodo.compressor.base.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="takes no masks by position"), torch.no_grad():
        dodo.compressor.decode(nuggets, torch.tensor([[5]]))


def test_a_text_is_the_same_whole_and_in_pieces_under_a_penalty(dodo: Dodo) -> None:
    lm = dodo.autoregressive(threshold=0.0, window=8, segment=4)
    settings = {"max_new_tokens": 12, "repetition_penalty": 1.7}
    whole = dodo.write(TEXT, lm, **settings)
    assert whole == "".join(dodo.stream_text(TEXT, lm, **settings))
    assert whole != dodo.write(TEXT, lm, max_new_tokens=12)


def test_settings_of_one_threads_text_do_not_reach_anothers(dodo: Dodo) -> None:
    nuggets = dodo.compress(TEXT, ratio=3)
    expected = dodo.generate_ids(nuggets, [[77, 133]], max_new_tokens=12)
    ends, seen = dodo.answer_ends, set()
    stop = threading.Event()

    def other() -> None:
        while not stop.is_set():
            dodo.generate_ids(
                nuggets, [[77, 133]], max_new_tokens=4, eos_token_id=expected[0][0], do_sample=True, temperature=9.0
            )

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(40):
        seen.add(tuple(dodo.answer_ends))
        assert dodo.generate_ids(nuggets, [[77, 133]], max_new_tokens=12) == expected
    stop.set()
    thread.join()
    assert seen == {tuple(ends)}


def test_tokens_that_are_tried_out_give_the_same_text(dodo: Dodo, monkeypatch: pytest.MonkeyPatch) -> None:
    nuggets, prompt = dodo.compress(TEXT, ratio=3), [77, 5, 77, 5, 77]
    tried = {"prompt_lookup_num_tokens": 3}
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 14):
        assert dodo.generate_ids(nuggets, [prompt], max_new_tokens=12, **tried) == [greedy(dodo, prompt, 12)]
    monkeypatch.setattr(transformers, "__version__", "5.13.1")
    with pytest.raises(InputError, match=r"prompt_lookup_num_tokens needs transformers 5\.14 or later: 5\.13\.1"):
        dodo.generate_ids(nuggets, [prompt], max_new_tokens=12, **tried)
    assert dodo.generate_ids(nuggets, [prompt], max_new_tokens=12) == [greedy(dodo, prompt, 12)]
