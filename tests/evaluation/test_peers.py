"""Peers: what they are given, what is made of their answers, and, where their environment is, what they do."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dodo.errors import InputError
from dodo.evaluation.methods import cached, make_method, states_of
from dodo.evaluation.names import PEERS
from dodo.evaluation.peers import SCRIPT as SCRIPT_OF_PEERS
from dodo.evaluation.peers import Peer, Pressed, Shortened, export_base, find_python, make_peer
from dodo.evaluation.worker import Worker
from dodo.model import Dodo
from dodo.prompts import QUESTION
from tests.cli.tiny import TEXT, save_model
from tests.standins.models import text_logits

SCRIPT = Path(__file__).parents[1] / "standins" / "peer.py"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>{% endfor %}<|assistant|>"
DOCUMENTS = [TEXT, TEXT[: len(TEXT) // 2]]
REQUESTS = [QUESTION.format(question=question) for question in ("Who wrote it?", "When was that?")]


@pytest.fixture(scope="module")
def dodo(tmp_path_factory) -> Dodo:
    dodo = Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("peers") / "base"))
    dodo.tokenizer.chat_template = TEMPLATE
    return dodo


def standing_in(kind: type[Peer], dodo: Dodo) -> Peer:
    return kind(dodo, name="kvpress-knorm", ratio=4.0, python=Path(sys.executable), script=SCRIPT)


def test_states_asked_for_are_dodos_own(dodo):
    for ratio in (1.0, 3.0, 1000.0):
        assert [states_of(dodo, text, ratio) for text in DOCUMENTS] == dodo.compress(DOCUMENTS, ratio=ratio).states.tolist()


def test_the_exported_base_is_the_base_without_adapters(dodo, tmp_path):
    export_base(dodo, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with dodo.compressor.adapters.use(None):
        wanted = text_logits(dodo.compressor.base, dodo.tokenizer, TEXT)
    assert again.dtype == dodo.compressor.base.dtype
    assert not [name for name, _ in again.named_parameters() if "lora" in name]
    torch.testing.assert_close(text_logits(again, dodo.tokenizer, TEXT), wanted)


def test_a_press_gets_the_turn_of_method_full_cut_behind_the_document(dodo, monkeypatch):
    method, sent = standing_in(Pressed, dodo), {}
    ask = method._worker.ask
    monkeypatch.setattr(method._worker, "ask", lambda do, **what: sent.update(what) or ask(do, **what))
    held = method.read(DOCUMENTS)
    assert method.reply(held, REQUESTS, max_new_tokens=8) == [f"7: {len(prompt)}" for prompt in sent["prompts"]]
    for document, request, ids, prompt in zip(DOCUMENTS, REQUESTS, sent["documents"], sent["prompts"], strict=True):
        whole = f"<|user|>\n{document.lstrip()}\n{request}</s><|assistant|>"
        assert dodo.tokenizer.decode(sent["before"] + ids + prompt) == whole
    assert held.tokens == [len(dodo.document_ids(text)) for text in DOCUMENTS]
    assert held.states == [states_of(dodo, text, 4.0) - 0.5 for text in DOCUMENTS]
    assert sent["ends"] == dodo.answer_ends


def test_a_shortened_text_is_read_in_the_documents_place(dodo):
    method, whole = standing_in(Shortened, dodo), make_method("full", dodo, 1.0)
    held = method.read(DOCUMENTS)
    shorter = [text[: states_of(dodo, text, 4.0)] for text in DOCUMENTS]
    assert held.states == [len(dodo.document_ids(text)) for text in shorter]
    assert held.nbytes == cached(dodo, held.states)
    made = method.reply(held, REQUESTS, max_new_tokens=8)
    assert made == whole.reply(whole.read(shorter), REQUESTS, max_new_tokens=8)


@pytest.mark.parametrize("kind", [Pressed, Shortened])
def test_what_a_peer_can_not_do_is_refused(dodo, kind):
    method = standing_in(kind, dodo)
    held = method.read(DOCUMENTS)
    with pytest.raises(InputError, match="'kvpress-knorm' can't rebuild"):
        method.rebuild(held)
    with pytest.raises(InputError, match="'kvpress-knorm' can't rebuild"):
        method.forced(held, DOCUMENTS)


def test_a_missing_environment_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DODO_PEERS_PYTHON", str(tmp_path / "python"))
    with pytest.raises(InputError, match=r"there is no .*python: peers run .* make peers sets it up"):
        find_python(None)
    assert find_python(Path(sys.executable)) == Path(sys.executable)


def test_a_record_has_the_peers_versions(dodo, tmp_path, monkeypatch):
    from dodo.evaluation.run import evaluate

    monkeypatch.setattr("dodo.evaluation.peers.SCRIPT", SCRIPT)
    row = {"id": "a", "context": TEXT, "question": "What?", "answers": ["7:"]}
    (tmp_path / "squad.jsonl").write_text(json.dumps(row), encoding="utf-8")
    given = {"sources": [str(tmp_path / "squad.jsonl")], "out": tmp_path / "out.json", "peers_python": Path(sys.executable)}
    record = evaluate(dodo, "squad", method="kvpress-knorm", ratio=4.0, **given)
    assert record["versions of the peer"] == {"python": "3", "kvpress": "0"}
    assert record["measured"]["all"]["accuracy"] == 1.0
    assert record["measured"]["all"]["states each"] == states_of(dodo, TEXT, 4.0) - 0.5


# -- with the peers themselves


@pytest.fixture(scope="module")
def one_worker():
    """For all tests: most of their time is imports."""
    try:
        python = find_python(None)
    except InputError as error:
        pytest.skip(f"needs the peers' environment: {error}")
    worker = Worker("peer", python, SCRIPT_OF_PEERS)
    yield worker
    worker.close()


@pytest.fixture
def peers(one_worker, monkeypatch) -> None:
    monkeypatch.setattr("dodo.evaluation.peers.Worker", lambda name, python, script: one_worker)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PEERS if name != "llmlingua"])
def test_a_press_holds_what_is_asked_and_at_ratio_one_is_the_base(dodo, peers, name):
    whole = make_method("full", dodo, 1.0)
    full = whole.reply(whole.read(DOCUMENTS), REQUESTS, max_new_tokens=12)
    method = make_peer(name, dodo, 1.0)
    held = method.read(DOCUMENTS)
    assert method.reply(held, REQUESTS, max_new_tokens=12) == full
    assert held.states == [len(method._ids(text, literal=True)) for text in DOCUMENTS]
    method = make_peer(name, dodo, 4.0)
    held = method.read(DOCUMENTS)
    assert held.states == pytest.approx([states_of(dodo, text, 4.0) for text in DOCUMENTS], abs=0.1)
    kept = held.tokens if name == "kvpress-kvzip" else held.states  # KVzip masks what it drops
    assert list(held.nbytes) == pytest.approx(cached(dodo, kept), rel=0.1)  # what stands before the document is not counted
    made = method.reply(held, REQUESTS, max_new_tokens=12)
    assert made != full
    assert method.reply(held, REQUESTS, max_new_tokens=12) == made  # an answer leaves what is held as it was
    longer = method.reply(held, REQUESTS, max_new_tokens=40, exactly=True)
    assert all(text.startswith(short) and len(text) > len(short) for text, short in zip(longer, made, strict=True))
    alone = method.read(DOCUMENTS[1:])
    assert method.reply(alone, REQUESTS[1:], max_new_tokens=12) == made[1:]  # documents are held apart
    with pytest.raises(InputError, match="other documents have been read since"):
        method.reply(held, REQUESTS, max_new_tokens=12)


@pytest.mark.slow
def test_llmlingua_leaves_about_as_many_tokens_and_only_the_documents_own(dodo, peers):
    half = DOCUMENTS[1]
    documents = [half, 4 * half]  # one shorter than a step of 200 tokens, one longer
    method = make_peer("llmlingua", dodo, 3.0)
    held = method.read(documents)
    for text, shorter, states in zip(documents, held.what, held.states, strict=True):
        assert states == pytest.approx(states_of(dodo, text, 3.0), rel=0.2)
        rest = iter(text)
        assert all(character in rest for character in shorter)  # in the document's order
