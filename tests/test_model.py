"""Laws of the facade: texts, generation, what nuggets belong to."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, StoppingCriteria, StoppingCriteriaList

from dodo.attention import cache_argument
from dodo.config import DodoConfig, LoraSettings
from dodo.errors import DodoWarning, FingerprintMismatch, InputError, WindowError
from dodo.model import Dodo
from dodo.nuggets import Nuggets
from dodo.prompts import question_prompt
from tests.conftest import stir
from tests.standins.models import byte_tokenizer, save_base, tiny_llama

TEXT = "Dodos lived on Mauritius. Nobody has seen one since 1662, when Volkert Evertsz described them."
Maker = Callable[..., Dodo]


@pytest.fixture
def make() -> Maker:
    """A Dodo of a tiny Llama with a byte tokenizer; its base is kept untouched as `dodo.plain`."""

    def made(
        *, stirred: bool = False, model: dict[str, object] | None = None, window: int | None = None, **config: object
    ) -> Dodo:
        base = tiny_llama(**(model or {})) if window is None else _sliding(window)
        plain = copy.deepcopy(base)
        lora = LoraSettings(rank=2)
        settings: dict[str, object] = {"feature_layer": 2, "encoder": lora, "decoder": lora} | config
        dodo = Dodo.from_model(base, byte_tokenizer(), DodoConfig(**settings))  # type: ignore[arg-type]
        dodo.plain = plain  # type: ignore[attr-defined]
        if stirred:
            stir(dodo.compressor)
            dodo.stamp()
        return dodo

    return made


_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "rms_norm_eps",
)


def _sliding(window: int) -> MistralForCausalLM:
    """The same weights in a model whose layers see `window` positions."""
    reference = tiny_llama()
    settings = {k: v for k, v in reference.config.to_dict().items() if k in _SHARED}
    model = MistralForCausalLM(MistralConfig(**settings, sliding_window=window))
    model.load_state_dict(reference.state_dict())
    return model.eval()


# -- a generation loop of one's own


@pytest.mark.parametrize("window", [None, 20])
def test_a_loop_of_ones_own_generates_as_the_facade_does(make: Maker, window: int | None) -> None:
    dodo = make(stirred=True, window=window)
    nuggets = dodo.compress([TEXT, TEXT[:40]], ratio=3)
    expected = dodo.generate_ids(nuggets, [[77, 133], [90, 91]], max_new_tokens=12, eos_token_id=None, min_new_tokens=12)
    ids, made = torch.tensor([[77, 133], [90, 91]]), []
    cache, positions = nuggets.to_cache(), nuggets.next_positions[:, None] + torch.arange(2)
    mask = torch.cat([nuggets.mask.long(), torch.ones(2, 2, dtype=torch.long)], dim=1)
    with dodo.decoding() as base, torch.no_grad():
        for _ in range(12):
            given = {"attention_mask": mask, cache_argument(base): cache}
            logits = base(input_ids=ids, position_ids=positions, **given).logits[:, -1:]
            logits[..., 1] = -torch.inf  # the end token, as by `min_new_tokens`
            ids, positions = logits.argmax(-1), positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
            made.append(ids)
    assert torch.cat(made, dim=1).tolist() == expected


# -- r = 1 with fresh adapters generates what the base generates


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.5},
    ],
)
@pytest.mark.parametrize("window", [None, 9])
def test_ratio_one_generates_what_the_base_generates(make: Maker, settings: dict[str, object], window: int | None) -> None:
    dodo = make(window=window)
    base = dodo.plain  # type: ignore[attr-defined]
    context = dodo.document_ids(TEXT)
    prompt = dodo.tokenizer(" They were", add_special_tokens=False)["input_ids"]
    torch.manual_seed(0)
    ids = torch.tensor([context + prompt])
    rules = settings if "repetition_penalty" not in settings else {}
    expected = base.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=1, **{"do_sample": False, **rules}
    )
    nuggets = dodo.compress(TEXT, ratio=1)
    torch.manual_seed(0)
    made = dodo.generate_ids(nuggets, [prompt], max_new_tokens=12, **rules)
    assert made == [_before_end(row[ids.shape[1] :].tolist()) for row in expected]


def _before_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(1)] if 1 in ids else ids


def test_a_batch_generates_what_its_texts_generate_alone(make: Maker) -> None:
    dodo = make(stirred=True)
    texts, prompts = [TEXT, "A shorter one.", "x"], [" What", " Where are they", "?"]
    alone = [dodo.generate(dodo.compress(t, ratio=3), p, max_new_tokens=10) for t, p in zip(texts, prompts, strict=True)]
    assert dodo.generate(dodo.compress(texts, ratio=3), prompts, max_new_tokens=10) == alone


def test_asking_twice_gives_the_same_answer_and_leaves_the_nuggets(make: Maker) -> None:
    dodo = make(stirred=True)
    nuggets = dodo.compress(TEXT, ratio=4)
    before = copy.deepcopy(vars(nuggets))
    answers = {dodo.answer(nuggets, "Who described them?", max_new_tokens=8) for _ in range(3)}
    assert len(answers) == 1
    dodo.generate(nuggets, "more", max_new_tokens=4, num_beams=3)
    dodo.reconstruct(nuggets, max_new_tokens=4)
    for name, value in before.items():
        after = getattr(nuggets, name)
        if isinstance(value, Tensor):
            assert torch.equal(after, value), name
        elif name == "rotary":
            assert all(torch.equal(x, y) for x, y in zip(after.frequencies, value.frequencies, strict=True))
        else:
            assert after == value, name


@pytest.mark.parametrize("window", [None, 9])
def test_generation_steps_equal_a_full_forward_pass(make: Maker, window: int | None) -> None:
    """Greedy tokens are the argmax of `decode` over everything so far; a window reaches over the gaps between nuggets."""
    dodo = make(stirred=True, window=window)
    nuggets = dodo.compress(TEXT, ratio=3)
    prompt = dodo.tokenizer(" and", add_special_tokens=False)["input_ids"]
    (made,) = dodo.generate_ids(nuggets, [prompt], max_new_tokens=9)
    with torch.no_grad():
        logits = dodo.compressor.decode(nuggets, torch.tensor([prompt + made]))[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == made


def test_a_text_is_rebuilt_as_long_as_it_was_whatever_it_is_batched_with(make: Maker) -> None:
    dodo = make(keep_first=False)
    texts = ["one two three", "one two three four five six seven eight nine ten " * 3]
    made = dodo.reconstruct(dodo.compress(texts, ratio=2), eos_token_id=None)
    assert made == [dodo.reconstruct(dodo.compress(text, ratio=2), eos_token_id=None) for text in texts]


def test_reconstruction_starts_with_the_soft_token(make: Maker) -> None:
    dodo = make(stirred=True)
    nuggets = dodo.compress([TEXT, "short"], ratio=5)
    made = dodo.generate_ids(nuggets, None, max_new_tokens=6)
    for row in range(2):
        with torch.no_grad():
            logits = dodo.compressor.decode(nuggets[row], torch.tensor([made[row]]), soft_token=True)[0]
        assert logits[: len(made[row])].argmax(-1).tolist() == made[row]
    assert len(dodo.reconstruct(nuggets)) == 2


# -- around generation


def test_streamed_pieces_are_the_answer(make: Maker) -> None:
    dodo = make(stirred=True)
    nuggets = dodo.compress(TEXT, ratio=4)
    for prompt in (" They", None):
        assert "".join(dodo.stream(nuggets, prompt, max_new_tokens=12)) == dodo.generate(nuggets, prompt, max_new_tokens=12)


def test_an_error_while_streaming_reaches_the_reader(make: Maker) -> None:
    dodo = make()
    with pytest.raises(WindowError):
        list(dodo.stream(dodo.compress(TEXT), "x", max_new_tokens=100_000))


def test_stopping_criteria_are_obeyed(make: Maker) -> None:
    class AfterTwo(StoppingCriteria):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            self.calls += 1
            return torch.full((input_ids.shape[0],), self.calls >= 2)

    dodo = make(stirred=True)
    made = dodo.generate_ids(dodo.compress(TEXT), [[40]], max_new_tokens=20, stopping_criteria=StoppingCriteriaList([AfterTwo()]))
    assert len(made[0]) <= 2


def test_generation_settings_of_the_base_stay_as_they_are(make: Maker) -> None:
    dodo = make()
    before = dodo.compressor.base.generation_config.to_dict()
    dodo.generate(dodo.compress(TEXT), "x", max_new_tokens=2, do_sample=True, temperature=0.3)
    assert dodo.compressor.base.generation_config.to_dict() == before


def test_prompts_must_be_as_many_as_texts_and_not_empty(make: Maker) -> None:
    dodo = make()
    nuggets = dodo.compress(TEXT)
    with pytest.raises(InputError, match="2 prompts for nuggets of 1"):
        dodo.generate(nuggets, ["a", "b"])
    with pytest.raises(InputError, match="prompt is empty"):
        dodo.generate(nuggets, "")
    for question in ("", "  \n", []):
        with pytest.raises(InputError, match="question is empty"):
            dodo.answer(nuggets, question)
    with pytest.raises(InputError, match="max_new_tokens"):
        dodo.generate(nuggets, "x", max_new_tokens=0)


def test_what_does_not_fit_the_window_is_refused_with_the_numbers(make: Maker) -> None:
    dodo = make(model={"max_position_embeddings": 128})
    nuggets = dodo.compress(TEXT, ratio=4)
    with pytest.raises(WindowError, match=r"need 1\d\d positions.*128"):
        dodo.generate(nuggets, "x", max_new_tokens=90)
    dodo.generate(nuggets.compact(), "x", max_new_tokens=90)


# -- texts


def test_an_empty_text_is_refused_and_blanks_are_compressed(make: Maker) -> None:
    dodo = make()
    with pytest.raises(InputError, match="empty"):
        dodo.compress("")
    with pytest.raises(InputError, match="no texts"):
        dodo.compress([])
    with pytest.raises(InputError, match="string"):
        dodo.compress([3])  # type: ignore[list-item]
    assert dodo.compress(" \n ").k.tolist() == [1]
    assert dodo.compress("<s>").k.tolist() == [1]
    assert isinstance(dodo.answer(dodo.compress(" "), "What?", max_new_tokens=2), str)


def test_special_tokens_in_a_document_are_plain_text(make: Maker) -> None:
    dodo = make()
    ids = dodo.document_ids("a</s>b")
    assert dodo.tokenizer.eos_token_id not in ids
    assert dodo.tokenizer.decode(ids[1:]) == "a</s>b"


def test_the_bos_token_stands_in_front_where_the_first_token_is_kept(make: Maker) -> None:
    assert make(keep_first=True).document_ids("ab")[0] == 0
    assert make(keep_first=False).document_ids("ab")[0] != 0
    assert make(keep_first=True).compress(TEXT).token_ids[0, 0] == 0


def test_a_tokenizer_without_a_pad_token_serves_and_keeps_its_vocabulary(make: Maker) -> None:
    dodo = make()
    assert dodo.tokenizer.pad_token is None
    size = dodo.compressor.base.get_input_embeddings().weight.shape
    dodo.generate(dodo.compress([TEXT, "short"]), ["a", "longer"], max_new_tokens=3)
    assert dodo.tokenizer.pad_token is None
    assert dodo.compressor.base.get_input_embeddings().weight.shape == size


def test_a_text_longer_than_the_window_is_encoded_in_segments_with_a_warning(make: Maker) -> None:
    dodo = make(model={"max_position_embeddings": 128})
    with pytest.warns(DodoWarning, match="longer than the base's window"):
        nuggets = dodo.compress(TEXT * 10, ratio=20)
    assert nuggets.scheme == "compact"
    assert nuggets.lengths.tolist() == [len(dodo.document_ids(TEXT * 10)) - 1]
    assert dodo.config.positions == "original"
    assert isinstance(dodo.answer(nuggets, "Who?", max_new_tokens=4), str)


# -- ratios


def test_a_ratio_far_from_what_was_trained_works_with_a_warning(make: Maker) -> None:
    dodo = make(trained_ratios=(2.0, 10.0))
    with pytest.warns(DodoWarning, match="outside the range"):
        assert dodo.compress(TEXT, ratio=50).k.tolist() == [2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dodo.compress(TEXT, ratio=5)
        dodo.compress(TEXT, nuggets=20)
        dodo.compress("ab", ratio=5)
    for nuggets in (3, 1000):
        with pytest.warns(DodoWarning, match="outside the range"):
            dodo.compress(TEXT, nuggets=nuggets)


def test_adapters_that_learned_to_be_something_else_are_used_with_a_warning(make: Maker, tmp_path: Path) -> None:
    make(trained_as="autoregressive").save_pretrained(tmp_path / "lm")
    for lm in (make(trained_as="autoregressive"), make()):
        lm.load_adapters(tmp_path / "lm")
        with pytest.warns(DodoWarning, match="trained as an autoregressive LM, not as a compressor"):
            lm.compress(TEXT, ratio=5)
        lm.autoregressive(threshold=0.0)
    compressor = make(trained_as="compressor")
    compressor.compress(TEXT, ratio=5)
    with pytest.warns(DodoWarning, match="trained as a compressor, not as an autoregressive LM"):
        compressor.autoregressive(threshold=0.0)


def test_ratio_and_number_together_are_refused(make: Maker) -> None:
    with pytest.raises(InputError, match="not both"):
        make().compress(TEXT, ratio=2, nuggets=3)


# -- what nuggets belong to


def test_nuggets_of_another_model_are_refused_and_can_be_adopted(make: Maker) -> None:
    dodo, other = make(), make(stirred=True)
    nuggets = other.compress(TEXT)
    with pytest.raises(FingerprintMismatch, match="adapter"):
        dodo.answer(nuggets, "Who?")
    assert isinstance(dodo.answer(dodo.adopt(nuggets), "Who?", max_new_tokens=2), str)


def test_nuggets_of_another_shape_are_refused_even_when_adopted(make: Maker) -> None:
    dodo, other = make(), make(model={"num_hidden_layers": 3})
    with pytest.raises(FingerprintMismatch, match="layers"):
        dodo.answer(dodo.adopt(other.compress(TEXT)), "Who?")


def test_joined_documents_can_be_asked(make: Maker) -> None:
    dodo = make(stirred=True)
    joined = Nuggets.cat([dodo.compress(TEXT), dodo.compress("Another document.")])
    assert isinstance(dodo.answer(joined, "Who?", max_new_tokens=4), str)


def test_questions_are_put_in_the_papers_words_and_the_models_chat_format() -> None:
    tokenizer = byte_tokenizer()
    assert question_prompt(tokenizer, " Who? ") == "\nBased on the provided document, answer the following question: Who?\n"
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"
    wanted = "[user]Based on the provided document, answer the following question: Who?[answer]"
    assert question_prompt(tokenizer, "Who?") == wanted


def test_half_a_character_is_refused_by_name_and_place(make: Maker) -> None:
    dodo = make()
    with pytest.raises(InputError, match=r"the text has half a character in it \(U\+D83D at 4\)"):
        dodo.compress("bird\ud83d")
    with pytest.raises(InputError, match=r"the prompt has half a character"):
        dodo.generate(dodo.compress(TEXT), "why\udc00", max_new_tokens=1)


# -- several at once


def test_calls_during_a_stream_wait_and_change_nothing(make: Maker) -> None:
    """A stream that nobody reads goes on in its own thread, with the base changed for itself."""
    dodo = make(stirred=True)
    settings = {"max_new_tokens": 40, "eos_token_id": None}
    before = {name: weight.clone() for name, weight in dodo.compressor.adapters.base_weights().items()}
    nuggets = dodo.compress(TEXT, ratio=4)
    lm = dodo.autoregressive(threshold=0.0, window=9, segment=4)
    answered, written = dodo.answer(nuggets, "Who?", **settings), dodo.write(TEXT, lm, **settings)
    streams = [dodo.stream_text(TEXT, lm, **settings), dodo.stream_text(TEXT, lm, **settings)]
    heads = [next(stream) for stream in streams]
    assert torch.equal(dodo.compress(TEXT, ratio=4).keys, nuggets.keys)
    assert dodo.answer(nuggets, "Who?", **settings) == answered
    assert [head + "".join(stream) for head, stream in zip(heads, streams, strict=True)] == [written, written]
    assert all(torch.equal(before[name], weight) for name, weight in dodo.compressor.adapters.base_weights().items())
    assert "forward" not in vars(dodo.compressor.base)


def test_streaming_where_it_would_wait_for_itself_is_refused(make: Maker) -> None:
    dodo = make()
    nuggets = dodo.compress(TEXT)
    with dodo.compressor.adapters.use("theta"), pytest.raises(InputError, match="leave that context"):
        next(dodo.stream(nuggets, "Who?"))


@pytest.mark.parametrize("rows", [[], [[]], [[1, 2], []], [[1, -2]], [[1, 10**6]]], ids=str)
def test_token_ids_that_are_none_are_refused(rows: list[list[int]], make: Maker) -> None:
    with pytest.raises(InputError, match="nothing to compress|as far as the base's vocabulary"):
        make().compress_ids(rows, ratio=2)


def test_a_text_of_which_the_tokenizer_leaves_nothing_is_refused(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    dodo = make()
    monkeypatch.setattr(Dodo, "document_ids", lambda self, text: [])
    with pytest.raises(InputError, match="nothing to compress"):
        dodo.compress("   ")


# -- what callers may give


def test_a_padding_token_may_be_given_everywhere(make: Maker) -> None:
    dodo = make(stirred=True)
    dodo.thresholds = None
    nuggets, lm = dodo.compress(TEXT, ratio=3), dodo.autoregressive(threshold=0.0, window=16, segment=8)
    for given in ({"pad_token_id": 2}, {"pad_token_id": None}):
        assert dodo.answer(nuggets, "Who?", max_new_tokens=4, **given) == dodo.answer(nuggets, "Who?", max_new_tokens=4)
        assert dodo.generate(nuggets, "Dodos", max_new_tokens=4, **given) == dodo.generate(nuggets, "Dodos", max_new_tokens=4)
        assert dodo.reconstruct(nuggets, **given) == dodo.reconstruct(nuggets)
        assert "".join(dodo.stream(nuggets, "Dodos", max_new_tokens=4, **given)) == dodo.generate(
            nuggets, "Dodos", max_new_tokens=4
        )
        assert dodo.write(TEXT, lm, max_new_tokens=4, **given) == dodo.write(TEXT, lm, max_new_tokens=4)
        assert "".join(dodo.stream_text(TEXT, lm, max_new_tokens=4, **given)) == dodo.write(TEXT, lm, max_new_tokens=4)


def test_tokens_that_the_base_does_not_know_are_named_before_it_reads_them(make: Maker) -> None:
    dodo = make()
    nuggets, compressor = dodo.compress(TEXT, ratio=3), dodo.compressor
    for unknown in (9999, -1):
        for call in (
            lambda unknown=unknown: dodo.generate_ids(nuggets, [[5, unknown]], max_new_tokens=2),
            lambda unknown=unknown: list(dodo.stream(nuggets, [unknown], max_new_tokens=2)),
            lambda unknown=unknown: dodo.generate(nuggets, "Dodos", max_new_tokens=2, pad_token_id=unknown),
            lambda unknown=unknown: compressor.encode(torch.tensor([[5, unknown]]), ratio=2),
            lambda unknown=unknown: compressor.decode(nuggets, torch.tensor([[5, unknown]])),
        ):
            with pytest.raises(InputError, match="token ids must be 0 to"):
                call()
    with pytest.raises(InputError, match=r"\[batch, tokens\], not of shape \[2\]"):
        compressor.decode(nuggets, torch.tensor([5, 6]))
    for read in (lambda ids: compressor.encode(ids, ratio=2), lambda ids: compressor.decode(nuggets, ids)):
        with pytest.raises(InputError, match=r"whole numbers, torch.int64, not torch.float32"):
            read(torch.ones(1, 3))
    assert torch.equal(
        compressor.decode(nuggets, torch.tensor([[5, 6]], dtype=torch.int32)), compressor.decode(nuggets, torch.tensor([[5, 6]]))
    )


def test_the_configuration_of_a_trained_model_makes_no_trained_one(make: Maker, tmp_path: Path) -> None:
    trained = make(stirred=True, trained_ratios=(2.0, 4.0), trained_as="compressor")
    assert trained.is_trained
    other = Dodo.from_model(tiny_llama(), byte_tokenizer(), dataclasses.replace(trained.config, base="elsewhere"))
    assert not other.is_trained
    assert (other.config.trained_as, other.config.base) == (None, make().config.base)
    trained.save_pretrained(tmp_path / "trained")
    save_base(tmp_path / "base")
    again = Dodo.from_pretrained(tmp_path / "trained", base=tmp_path / "base", ignore_fingerprint=True)
    assert (again.config.trained_ratios, again.config.trained_as) == ((2.0, 4.0), "compressor")
    moved = Dodo.from_pretrained(tmp_path / "base", config=again.config)
    assert not moved.is_trained
    assert moved.config.base == str(tmp_path / "base")


def test_one_text_is_not_many_of_a_character(make: Maker) -> None:
    with pytest.raises(InputError, match=r"give \[text\]"):
        make().estimate_thresholds(TEXT)
