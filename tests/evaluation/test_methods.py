"""What methods hold, and that they say what the model says."""

import copy
import dataclasses
import json
import warnings
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from dodo.errors import DodoWarning, InputError, WindowError
from dodo.evaluation.methods import METHODS, make_method, own_ids
from dodo.evaluation.run import evaluate
from dodo.icae import Icae
from dodo.memory import MemoryTokens
from dodo.model import Dodo
from dodo.prompts import QUESTION, SHORTEN, chat_turn, opening_turn
from tests.cli.tiny import TEXT, save_model
from tests.conftest import stir

QUESTIONS = ["Who wrote it?", "When was that?"]
REQUESTS = [QUESTION.format(question=question) for question in QUESTIONS]
DOCUMENTS = [TEXT, TEXT[: len(TEXT) // 2]]


@pytest.fixture(scope="module")
def dodo(tmp_path_factory) -> Dodo:
    return Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("methods") / "base"))


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"lmsumm", "icae"}))
def test_states_and_tokens_are_what_is_held(dodo, name):
    held = make_method(name, dodo, 4.0).read(DOCUMENTS)
    tokens = [len(dodo.document_ids(text)) for text in DOCUMENTS]
    assert held.tokens == tokens
    wanted = {"full": tokens, "theta": tokens, "nodoc": [0, 0]}.get(name)
    if wanted is None:
        wanted = [-(-n // 4) for n in tokens] if name == "truncate" else [-(-(n - 1) // 4) + 1 for n in tokens]
    assert held.states == wanted


def test_dodo_answers_and_rebuilds_as_the_library_does(dodo):
    method = make_method("dodo", dodo, 4.0)
    held = method.read(DOCUMENTS)
    nuggets = dodo.compress(DOCUMENTS, ratio=4.0)
    assert method.reply(held, REQUESTS, max_new_tokens=8) == dodo.answer(nuggets, QUESTIONS, max_new_tokens=8)
    assert method.rebuild(held) == dodo.reconstruct(nuggets)


def test_the_whole_text_is_read_as_one_turn_by_the_base(dodo):
    method = make_method("full", dodo, 4.0)
    together = method.reply(method.read(DOCUMENTS), REQUESTS, max_new_tokens=8)
    for document, question, answer in zip(DOCUMENTS, QUESTIONS, together, strict=True):
        turn = chat_turn(dodo.tokenizer, f"{document}\n{QUESTION.format(question=question)}")
        ids = dodo.tokenizer(turn, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with dodo.compressor.adapters.use(None):
            made = dodo.compressor.base.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        assert dodo.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == answer


@pytest.mark.parametrize("name", ["full", "theta", "truncate", "lmsumm"])
def test_baselines_are_greedy_whatever_penalties_the_base_has(dodo, monkeypatch, name):
    method = make_method(name, dodo, 4.0)
    before = method.reply(method.read(DOCUMENTS), REQUESTS, max_new_tokens=12)
    monkeypatch.setattr(dodo.compressor.base.generation_config, "repetition_penalty", 5.0)
    assert method.reply(method.read(DOCUMENTS), REQUESTS, max_new_tokens=12) == before


def test_a_fine_tuned_base_reads_all_of_the_text_with_theta_and_then_the_prompt(tmp_path):
    dodo = Dodo.from_pretrained(save_model(tmp_path / "base"))
    stir(dodo.compressor, scale=0.3)
    method = make_method("theta", dodo, 4.0)
    together = method.reply(method.read(DOCUMENTS), REQUESTS, max_new_tokens=8)
    for document, request, answer in zip(DOCUMENTS, REQUESTS, together, strict=True):
        prompt = dodo.tokenizer(chat_turn(dodo.tokenizer, request), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*dodo.document_ids(document), *prompt]])
        with dodo.compressor.adapters.use("theta"):
            made = dodo.compressor.base.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        assert dodo.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == answer
    base = make_method("full", dodo, 4.0)
    assert together != base.reply(base.read(DOCUMENTS), REQUESTS, max_new_tokens=8)


def test_lmsumm_asks_the_base_for_a_summary_and_reads_that(dodo):
    method = make_method("lmsumm", dodo, 4.0)
    held = method.read(DOCUMENTS[:1])
    n, words = held.tokens[0], -(-len(TEXT.split()) // 4)
    ids = dodo.tokenizer(chat_turn(dodo.tokenizer, SHORTEN.format(words=words, text=TEXT)), add_special_tokens=False)["input_ids"]
    room = -(-(n - 1) // 4) + 1  # as many states as Dodo holds
    with dodo.compressor.adapters.use(None):
        made = dodo.compressor.base.generate(input_ids=torch.tensor([ids]), max_new_tokens=room, do_sample=False)
    summary = dodo.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True).strip()
    assert summary.startswith(held.what[0])
    assert held.states == [min(room, len(own_ids(dodo, summary)))]
    assert held.states == make_method("lmsumm", dodo, 4.0).read(DOCUMENTS).states[:1]  # a longer one beside it changes nothing
    whole, summary = make_method("full", dodo, 4.0), held.what[0]
    assert method.reply(held, REQUESTS[:1], max_new_tokens=8) == whole.reply(
        whole.read([summary]), REQUESTS[:1], max_new_tokens=8
    )


@pytest.fixture(scope="module")
def with_memory(tmp_path_factory) -> Dodo:
    made = Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("memory") / "base"))
    stir(made.compressor).memory = MemoryTokens.fresh(made.compressor.base, 40, fixed=False)
    return made


def test_icae_holds_as_many_slots_as_dodo_has_nuggets_beside_a_first_token(with_memory):
    held = make_method("icae", with_memory, 4.0).read(DOCUMENTS)
    dodo = make_method("dodo", with_memory, 4.0).read(DOCUMENTS)
    assert held.tokens == dodo.tokens
    assert held.states == [min(40, states - 1) for states in dodo.states]
    assert held.states[0] == 40 > held.states[1]


def test_icae_answers_and_rebuilds_each_document_from_its_memory(with_memory):
    method, icae = make_method("icae", with_memory, 4.0), Icae(with_memory.compressor)
    held, tokenizer = method.read(DOCUMENTS), with_memory.tokenizer
    replies, rebuilt, forced = (
        method.reply(held, REQUESTS, max_new_tokens=8),
        method.rebuild(held),
        method.forced(held, DOCUMENTS),
    )
    for i, (document, request) in enumerate(zip(DOCUMENTS, REQUESTS, strict=True)):
        ids = torch.tensor([with_memory.document_ids(document)])
        own = tokenizer(document, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            memory = icae.encode(ids, slots=held.states[i])
            states = icae.decode(memory, own[:, :-1], soft_token=True)
            logits = with_memory.compressor.base.get_output_embeddings()(states[0])
        prompt = tokenizer(chat_turn(tokenizer, request), add_special_tokens=False)["input_ids"]
        assert replies[i] == tokenizer.decode(icae.generate_ids(memory, [prompt], max_new_tokens=8)[0], skip_special_tokens=True)
        again = icae.generate_ids(memory, None, max_new_tokens=held.tokens[i] + 1)[0]
        assert rebuilt[i] == tokenizer.decode(again, skip_special_tokens=True)
        wanted = float(torch.nn.functional.cross_entropy(logits, own[0], reduction="sum"))
        right = int((logits.argmax(-1) == own[0]).sum())
        assert forced[i] == (pytest.approx(wanted, rel=1e-4), own.shape[1], right)


def test_icae_needs_adapters_with_memory_tokens_and_selects_nothing(dodo, with_memory):
    with pytest.raises(InputError, match=r"recipes/smollm2-135m-icae.yaml"):
        make_method("icae", dodo, 4.0)
    method = make_method("icae", with_memory, 4.0)
    with pytest.raises(InputError, match="selects no tokens"):
        method.selected(method.read(DOCUMENTS[:1]))


def test_controls_differ_from_the_scorers_selection_and_have_as_many_states(dodo):
    read = {name: make_method(name, dodo, 4.0).read(DOCUMENTS) for name in ("dodo", "stride", "random")}
    assert read["dodo"].states == read["stride"].states == read["random"].states
    places = {name: held.what.indices.tolist() for name, held in read.items()}
    assert places["dodo"] != places["stride"] != places["random"]
    assert len({row[-1] for row in places["stride"]}) == 2  # each ends with its own text


def test_a_text_has_its_random_selection_in_any_company_and_another_by_another_seed(dodo):
    def chosen(documents, seed=0):
        return [n.indices[0].tolist() for n in make_method("random", dodo, 4.0, seed=seed).read(documents).what]

    together = chosen(DOCUMENTS)
    assert [*chosen(DOCUMENTS[1:]), *chosen(DOCUMENTS[:1])] == together[::-1]
    assert chosen(DOCUMENTS, seed=1) != together


def test_what_is_held_takes_the_bytes_of_its_states(dodo, with_memory):
    def held(name, model=dodo):
        return make_method(name, model, 4.0).read(DOCUMENTS)

    nuggets = dodo.compress(DOCUMENTS, ratio=4.0)
    assert held("dodo").nbytes == [nuggets[i].nbytes for i in range(2)]
    state = nuggets[0].nbytes / int(nuggets[0].states)
    for name in ("full", "truncate", "nodoc", "stride", "random", "lmsumm"):
        assert held(name).nbytes == [state * count for count in held(name).states]
    width = with_memory.compressor.base.config.hidden_size
    memory = held("icae", with_memory)
    assert memory.nbytes == [4 * width * count for count in memory.states]


def test_a_text_that_does_not_fit_the_window_is_refused_not_read_past_it(dodo):
    method = make_method("full", dodo, 4.0)
    with pytest.raises(WindowError, match=r"full needs [\d,]+ positions for text and answer, but the base's window has 512"):
        method.reply(method.read([TEXT * 9]), REQUESTS[:1], max_new_tokens=8)


def test_what_can_not_be_is_refused(dodo):
    with pytest.raises(InputError, match="methods are dodo"):
        make_method("nothing", dodo, 4.0)
    method = make_method("full", dodo, 4.0)
    with pytest.raises(InputError, match="can't rebuild"):
        method.rebuild(method.read(DOCUMENTS))


@pytest.mark.parametrize(
    ("task", "method", "fitting"),
    [
        ("autoencoding", "dodo", "compressor"),
        ("autoencoding", "stride", "compressor"),
        ("squad", "theta", "full"),
        ("squad", "truncate", None),
        ("perplexity", "theta", "full"),
        ("perplexity", "compressive", "compressive"),
        ("perplexity", "top-k", "autoregressive"),
        ("perplexity", "full", None),
    ],
)
def test_adapters_that_learned_to_be_something_else_are_measured_with_a_warning(dodo, tmp_path, task, method, fitting):
    record = {"text": TEXT, "context": TEXT[:80], "question": "Who?", "answers": ["he"]}
    (tmp_path / "texts.jsonl").write_text(json.dumps(record), encoding="utf-8")
    config, told = dodo.config, []
    for trained_as in ("compressor", "autoregressive", "compressive", "icae", "full"):
        dodo.compressor.config = dataclasses.replace(config, trained_as=trained_as)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            settings = {
                "ratio": 4.0,
                "lengths": [16] if task == "autoencoding" else [],
                "states": (8,),
                "segment": 4,
                "limit": 30,
            }
            sources = [str(tmp_path / "texts.jsonl")]
            evaluate(dodo, task, method=method, sources=sources, out=tmp_path / f"{trained_as}.json", **settings)
        told += [trained_as for w in caught if w.category is DodoWarning and "were trained as" in str(w.message)]
    dodo.compressor.config = config
    others = {"compressor", "autoregressive", "compressive", "icae", "full"} - {fitting}
    assert set(told) == (others if fitting else set())


def _plain(dodo: Dodo) -> Dodo:
    """The same with a tokenizer that has no chat format and puts a BOS token before texts."""
    plain = copy.deepcopy(dodo)
    plain.tokenizer.chat_template = None
    bos = plain.tokenizer.bos_token
    plain.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, plain.tokenizer.bos_token_id)]
    )
    assert plain.tokenizer("a")["input_ids"][0] == plain.tokenizer.bos_token_id
    return plain


@pytest.mark.parametrize("name", ["full", "nodoc", "truncate", "lmsumm"])
def test_the_base_reads_plain_lines_behind_the_bos_token_that_its_tokenizer_adds(dodo, name, monkeypatch):
    plain, read = _plain(dodo), []
    method = make_method(name, plain, 4.0)
    monkeypatch.setattr(method, "_written", lambda rows, *_: read.append(rows) or [""] * len(rows))
    method.reply(method.read(DOCUMENTS), REQUESTS, max_new_tokens=2)
    for ids in (ids for rows in read for ids in rows):
        assert ids.count(plain.tokenizer.bos_token_id) == 1 and ids[0] == plain.tokenizer.bos_token_id
    assert opening_turn(dodo.tokenizer, "a") == chat_turn(dodo.tokenizer, "a")


def test_icae_ends_its_replies_where_the_others_do(dodo, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(Icae, "generate_ids", lambda self, *_, **settings: seen.append(settings) or [[5]])
    memorized = copy.deepcopy(dodo)
    memorized.compressor.memory = MemoryTokens.fresh(memorized.compressor.base, 40, fixed=False)
    method = make_method("icae", memorized, 4.0)
    method.reply(method.read(DOCUMENTS[:1]), REQUESTS[:1], max_new_tokens=3)
    assert seen == [{"max_new_tokens": 3, "eos_token_id": memorized.answer_ends}]
    assert memorized.answer_ends
