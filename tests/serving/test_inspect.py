"""Laws of looking at a text and rebuilding it through the API: what is shown is what is kept; looking keeps nothing."""

import pytest

from dodo.inspection import inspect_text
from dodo.nuggets import Nuggets
from tests.serving.conftest import MODEL, tiny_dodo
from tests.serving.test_app import TEXT, events, kept

INSPECT = "/v1/inspect"


def inspected(client, text=TEXT, **more):
    response = client.post(INSPECT, json={"text": text, **more})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("wanted", [{}, {"ratio": 1}, {"ratio": 7}, {"nuggets": 3}])
def test_what_is_shown_is_what_is_kept_and_costs_what_it_costs(wanted, client, served):
    nuggets = served.compress(TEXT, **wanted)
    asked = client()
    seen = inspected(asked, **wanted)
    assert seen["selected"] == nuggets.indices[0].tolist()
    context = kept(asked, **wanted)
    same = ("n", "k", "states", "ratio", "bytes", "full_bytes")
    assert {name: seen[name] for name in same} == {name: context[name] for name in same}
    assert seen["kept_first"] == int(nuggets.sinks)


def test_spans_are_the_text_with_the_scores_and_shades_of_an_inspection(client, served):
    text = "Two lines,\n\nand é 🙂 \x1b."
    expected = inspect_text(served, text, ratio=3)
    spans = inspected(client(), text, ratio=3)["spans"]
    assert "".join(span["text"] for span in spans) == text.replace("\x1b", "␛")
    assert [span["shade"] for span in spans] == [span.shade for span in expected.spans()]
    tokens = [token for span in spans for token in span["tokens"]]
    assert [(token["index"], token["rank"]) for token in tokens] == [(token.index, token.rank) for token in expected.tokens]
    assert [token["score"] for token in tokens] == pytest.approx([token.score for token in expected.tokens])
    assert next(span["mark"] for span in spans if not span["text"].strip(" \n")) == "<s>"
    assert "↵" in [span["mark"] for span in spans]


def test_a_text_is_scored_once_for_all_ratios_and_kept_nowhere(client, served, monkeypatch):
    asked, score, scored = client(), served.compressor.score, []
    monkeypatch.setattr(served.compressor, "score", lambda ids, use: scored.append(1) or score(ids, use))
    seen = [inspected(asked, ratio=ratio, spans=False) for ratio in (2, 3, 5)]
    assert len(scored) == 1
    assert [one["k"] for one in seen] == sorted({one["k"] for one in seen}, reverse=True)
    assert all(one["spans"] is None for one in seen)
    assert asked.get("/v1/contexts").json()["data"] == []


def test_a_text_is_seen_and_kept_for_either_use(client, tmp_path):
    dodo = tiny_dodo(scores_by_use=True)
    wanted = {use: dodo.compress(TEXT, ratio=5, use=use).indices[0].tolist() for use in ("questions", "text")}
    assert wanted["questions"] != wanted["text"]
    asked = client(dodo)
    assert asked.get("/v1/models").json()["data"][0]["by_use"]
    for more, use in (({}, "questions"), ({"use": "questions"}, "questions"), ({"use": "text"}, "text")):
        assert inspected(asked, ratio=5, **more)["selected"] == wanted[use]
        made = kept(asked, ratio=5, **more)
        assert made["use"] == use
        (tmp_path / "a.nuggets").write_bytes(asked.get(f"/v1/contexts/{made['id']}/nuggets").content)
        assert Nuggets.load(tmp_path / "a.nuggets").indices[0].tolist() == wanted[use]
    data = {"file": ("a.nuggets", (tmp_path / "a.nuggets").read_bytes())}
    refused = asked.post("/v1/contexts", files=data, data={"use": "text"})
    assert refused.status_code == 400
    assert "leave ratio, nuggets and use out" in refused.json()["error"]["message"]
    assert asked.post(INSPECT, json={"text": TEXT, "use": "fun"}).status_code == 422


def test_of_a_file_the_text_is_said_too(client):
    asked = client()
    html = f"<html><body><p>{TEXT}</p></body></html>".encode()
    seen = asked.post(INSPECT, files={"file": ("a.html", html)}, data={"ratio": "5"}).json()
    assert seen["text"].strip() == TEXT
    assert inspected(asked, ratio=5)["text"] is None
    assert {**inspected(asked, seen["text"], ratio=5), "text": seen["text"]} == seen


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"text": "  "}, 400, "bad_input"),
        ({"text": TEXT * 9}, 413, "text_too_long"),
        ({"text": TEXT, "ratio": 0.5}, 422, "invalid_value"),
        ({"text": TEXT, "ratio": 2, "nuggets": 2}, 422, "invalid_value"),
        ({"text": TEXT, "name": "x"}, 422, "invalid_value"),
    ],
)
def test_what_cant_be_looked_at_is_refused(body, status, code, client):
    response = client(max_document=400).post(INSPECT, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_a_nuggets_file_has_no_text_to_look_at(client, served, tmp_path):
    served.compress(TEXT).save(tmp_path / "a.nuggets")
    response = client().post(INSPECT, files={"file": ("a.nuggets", (tmp_path / "a.nuggets").read_bytes())})
    assert response.status_code == 400 and "holds no text" in response.json()["error"]["message"]


def test_a_text_is_rebuilt_as_by_the_library_whole_and_streamed(client, served):
    nuggets = served.compress(TEXT, ratio=2)
    expected = served.reconstruct(nuggets)
    asked = client()
    path = f"/v1/contexts/{kept(asked, ratio=2)['id']}/reconstruction"
    answer = asked.post(path, json={}).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == int(nuggets.lengths) + 1
    assert answer["usage"]["prompt_tokens"] == int(nuggets.states) + 1
    chunks = events(asked.post(path, json={"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


def test_a_text_without_a_bos_token_in_front_is_rebuilt_with_its_end_too(client):
    dodo = tiny_dodo()
    dodo.tokenizer.bos_token = None
    nuggets = dodo.compress(TEXT, ratio=2)
    expected = dodo.reconstruct(nuggets)
    asked = client(dodo)
    answer = asked.post(f"/v1/contexts/{kept(asked, ratio=2)['id']}/reconstruction", json={}).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == len(dodo.document_ids(TEXT)) + 1 == dodo.rebuilt_tokens(nuggets)[0]


def test_a_rebuilding_is_bounded_and_refused_like_an_answer(client):
    asked = client(max_new_tokens=8)
    path = f"/v1/contexts/{kept(asked)['id']}/reconstruction"
    answer = asked.post(path, json={}).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (8, "length")
    assert asked.post(path, json={"max_tokens": 9}).status_code == 400
    assert asked.post(path, json={"prompt": "x"}).status_code == 422
    assert asked.post("/v1/contexts/ctx_none/reconstruction", json={}).status_code == 404


def test_keys_close_the_api_and_not_the_page(client):
    asked = client(keys=("key-of-the-tests-1234",))
    for path in ("/v1/inspect", "/v1/contexts/ctx_none/reconstruction"):
        assert asked.post(path, json={"text": TEXT}).status_code == 401
    page = asked.get("/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    for path in ("/page/page.css", "/page/main.js"):
        assert asked.get(path).headers["content-security-policy"] == page.headers["content-security-policy"]


def test_the_model_says_in_which_words_it_is_asked(client):
    assert "{question}" in client(tiny_dodo(seed=1)).get(f"/v1/models/{MODEL}").json()["question_prompt"]
