"""What methods hold, and that they say what the model says."""

import pytest

from dodo.errors import InputError
from dodo.evaluation.methods import METHODS, make_method
from dodo.model import Dodo
from dodo.prompts import QUESTION, chat_turn
from tests.cli.tiny import TEXT, save_model

QUESTIONS = ["Who wrote it?", "When was that?"]
DOCUMENTS = [TEXT, TEXT[: len(TEXT) // 2]]


@pytest.fixture(scope="module")
def dodo(tmp_path_factory) -> Dodo:
    return Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("methods") / "base"))


@pytest.mark.parametrize("name", METHODS)
def test_states_and_tokens_are_what_is_held(dodo, name):
    held = make_method(name, dodo, 4.0).read(DOCUMENTS)
    tokens = [len(dodo.document_ids(text)) for text in DOCUMENTS]
    assert held.tokens == tokens
    wanted = {"full": tokens, "nodoc": [0, 0]}.get(name)
    if wanted is None:
        wanted = [-(-n // 4) for n in tokens] if name == "truncate" else [-(-(n - 1) // 4) + 1 for n in tokens]
    assert held.states == wanted


def test_dodo_answers_and_rebuilds_as_the_library_does(dodo):
    method = make_method("dodo", dodo, 4.0)
    held = method.read(DOCUMENTS)
    nuggets = dodo.compress(DOCUMENTS, ratio=4.0)
    assert method.answer(held, QUESTIONS, max_new_tokens=8) == dodo.answer(nuggets, QUESTIONS, max_new_tokens=8)
    assert method.rebuild(held) == dodo.reconstruct(nuggets)


def test_the_whole_text_is_read_as_one_turn_by_the_base(dodo):
    method = make_method("full", dodo, 4.0)
    together = method.answer(method.read(DOCUMENTS), QUESTIONS, max_new_tokens=8)
    for document, question, answer in zip(DOCUMENTS, QUESTIONS, together, strict=True):
        turn = chat_turn(dodo.tokenizer, f"{document}\n{QUESTION.format(question=question)}")
        ids = dodo.tokenizer(turn, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with dodo.compressor.adapters.use(None):
            made = dodo.compressor.base.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        assert dodo.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == answer


def test_controls_differ_from_the_scorers_selection_and_have_as_many_states(dodo):
    read = {name: make_method(name, dodo, 4.0).read(DOCUMENTS) for name in ("dodo", "stride", "random")}
    assert read["dodo"].states == read["stride"].states == read["random"].states
    places = {name: held.what.indices.tolist() for name, held in read.items()}
    assert places["dodo"] != places["stride"] != places["random"]
    assert len({row[-1] for row in places["stride"]}) == 2  # each ends with its own text


def test_what_can_not_be_is_refused(dodo):
    with pytest.raises(InputError, match="methods are dodo"):
        make_method("nothing", dodo, 4.0)
    method = make_method("full", dodo, 4.0)
    with pytest.raises(InputError, match="can't rebuild"):
        method.rebuild(method.read(DOCUMENTS))
