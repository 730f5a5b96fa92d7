"""Laws of the API: what it keeps, what it answers, and what it says when it can't."""

import copy
import dataclasses
import io
import json
import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from dodo.nuggets import Nuggets
from dodo.prompts import QUESTION
from dodo.serving.store import Store
from tests.serving.conftest import MODEL, tiny_dodo

TEXT = "The dodo was a flightless bird of Mauritius. It stood about a metre tall."
ASKED = "Where did it live?"
NEW = 12
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}], "max_tokens": NEW}
COMPLETION = {"model": MODEL, "prompt": "The dodo", "max_tokens": NEW}
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


def kept(client: Any, text: str = TEXT, **more: Any) -> dict[str, Any]:
    response = client.post("/v1/contexts", json={"text": text, **more})
    assert response.status_code == 201, response.text
    return response.json()


def events(response: Any) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@contextmanager
def busy(client: Any) -> Any:
    """While inside, the model's thread does something else."""
    begun, done = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        done.wait(30)

    client.app.state.service.engine.run(hold)
    begun.wait(30)
    try:
        yield
    finally:
        done.set()


# -- contexts


def test_a_text_is_kept_shown_listed_downloaded_and_deleted(client, served, tmp_path):
    expected = served.compress(TEXT, ratio=5)
    asked = client()
    made = kept(asked, ratio=5, name="dodo")
    assert (made["n"], made["k"]) == (int(expected.lengths), int(expected.k))
    assert (made["bytes"], made["full_bytes"]) == (expected.nbytes, expected.full_cache_nbytes)
    assert made["ratio"] == expected.achieved_ratio
    assert made["name"] == "dodo"
    path = f"/v1/contexts/{made['id']}"
    assert asked.get(path).json() == made
    assert asked.get("/v1/contexts").json()["data"] == [made]
    (tmp_path / "down.nuggets").write_bytes(asked.get(f"{path}/nuggets").content)
    assert Nuggets.load(tmp_path / "down.nuggets").keys.equal(expected.keys)
    assert asked.delete(path).json() == {"id": made["id"], "object": "context", "deleted": True}
    for response in (asked.get(path), asked.get(f"{path}/nuggets"), asked.delete(path)):
        assert response.status_code == 404
    assert asked.get("/v1/contexts").json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_a_file_is_kept_as_its_text_and_a_nuggets_file_as_it_is(client):
    asked = client()
    of_text = kept(asked, ratio=5)
    html = f"<html><body><p>{TEXT}</p></body></html>".encode()
    of_file = asked.post("/v1/contexts", files={"file": ("a.html", html)}, data={"ratio": "5"}).json()
    assert (of_file["sha256"], of_file["name"]) == (of_text["sha256"], "a.html")
    data = asked.get(f"/v1/contexts/{of_text['id']}/nuggets").content
    again = asked.post("/v1/contexts", files={"file": ("b.nuggets", data)}, data={"name": "again"}).json()
    assert (again["sha256"], again["name"]) == (of_text["sha256"], "again")
    assert len({of_text["id"], of_file["id"], again["id"]}) == 3


def test_pages_of_the_list_join_to_the_whole(client):
    asked = client()
    ids = [kept(asked, f"text number {i}")["id"] for i in range(5)]
    first = asked.get("/v1/contexts", params={"limit": 3, "order": "asc"}).json()
    second = asked.get("/v1/contexts", params={"limit": 3, "order": "asc", "after": first["last_id"]}).json()
    assert [context["id"] for context in first["data"] + second["data"]] == ids
    assert (first["has_more"], second["has_more"]) == (True, False)


def test_progress_comes_as_events_that_end_with_the_context(client):
    asked = client()
    response = asked.post("/v1/contexts", json={"text": TEXT}, headers={"Accept": "text/event-stream"})
    told = [block.split("\n") for block in response.text.split("\n\n") if block]
    names = [name.removeprefix("event: ") for name, _ in told]
    data = [json.loads(line.removeprefix("data: ")) for _, line in told]
    assert names == ["progress"] * (len(told) - 1) + ["done"]
    shares = [event["done"] for event in data if event.get("stage") == "compressing"]
    assert shares == sorted(shares) and len(shares) >= 3 and shares[-1] == 1
    assert asked.get(f"/v1/contexts/{data[-1]['id']}").json() == data[-1]
    refused = asked.post("/v1/contexts", json={"text": " "}, headers={"Accept": "text/event-stream"})
    assert refused.text.startswith("event: error\n") and "empty" in refused.text


def test_contexts_outlive_the_server_and_answer_as_before(client):
    first = client()
    made = kept(first)
    before = first.post(CHATS, json={**CHAT, "context_ids": [made["id"]]}).json()["choices"]
    again = client()
    assert again.get("/v1/contexts").json()["data"] == [made]
    assert again.post(CHATS, json={**CHAT, "context_ids": [made["id"]]}).json()["choices"] == before


# -- completions


def test_a_question_over_a_context_is_answered_as_by_the_library(client, served):
    nuggets = served.compress(TEXT)
    expected = served.answer(nuggets, ASKED, max_new_tokens=NEW)
    assert len(expected) >= NEW
    asked = client()
    answer = asked.post(CHATS, json={**CHAT, "context_ids": [kept(asked)["id"]]}).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["choices"][0]["finish_reason"] == "length"
    usage, prompt = answer["usage"], f"\n{QUESTION.format(question=ASKED)}\n"
    details = {"original_tokens": len(served.document_ids(TEXT)), "compressed_tokens": int(nuggets.states)}
    assert usage["prompt_tokens_details"] == details
    assert usage["prompt_tokens"] == details["compressed_tokens"] + len(served.tokenizer(prompt)["input_ids"])
    assert (usage["completion_tokens"], usage["total_tokens"]) == (NEW, usage["prompt_tokens"] + NEW)


def test_several_contexts_are_read_as_one_in_their_order(client, served):
    other = "Pigeons are its nearest relatives."
    both = Nuggets.cat([served.compress(other), served.compress(TEXT)])
    expected = served.generate(both, "It is", max_new_tokens=NEW)
    asked = client()
    ids = [kept(asked, text)["id"] for text in (other, TEXT)]
    answer = asked.post(TEXTS, json={"model": MODEL, "prompt": "It is", "max_tokens": NEW, "context_ids": ids}).json()
    assert answer["choices"][0]["text"] == expected


@pytest.mark.parametrize("path", [CHATS, TEXTS])
def test_chunks_join_to_the_whole(path, client):
    body = {
        **(CHAT if path == CHATS else COMPLETION),
        "n": 2,
        "temperature": 1,
        "seed": 3,
        "logprobs": True if path == CHATS else 2,
    }
    asked = client()
    answer = asked.post(path, json=body).json()
    chunks = events(asked.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[-1]["usage"] == answer["usage"] and chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    for expected in answer["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        assert mine[-1]["finish_reason"] == expected["finish_reason"]
        if path == CHATS:
            assert "".join(c["delta"].get("content", "") for c in mine) == expected["message"]["content"]
            joined: Any = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert joined == expected["logprobs"]["content"]
        else:
            assert "".join(c["text"] for c in mine) == expected["text"]
            for key, values in expected["logprobs"].items():
                assert [value for c in mine if c["logprobs"] for value in c["logprobs"][key]] == values


def test_the_same_seed_gives_the_same_answers_and_choices_differ(client):
    asked = client()
    body = {**CHAT, "n": 3, "temperature": 2, "seed": 5}
    one, two = (asked.post(CHATS, json=body).json()["choices"] for _ in range(2))
    assert one == two
    assert len({choice["message"]["content"] for choice in one}) == 3


def test_several_prompts_are_answered_as_each_alone(client):
    asked = client()
    prompts = ["The dodo", "A bird of some kind"]
    answers = asked.post(TEXTS, json={**COMPLETION, "prompt": prompts}).json()["choices"]
    alone = [asked.post(TEXTS, json={**COMPLETION, "prompt": prompt}).json()["choices"][0] for prompt in prompts]
    assert [choice["text"] for choice in answers] == [choice["text"] for choice in alone]
    assert [choice["index"] for choice in answers] == [0, 1]


def test_a_stop_text_ends_an_answer_and_is_not_in_it(client):
    asked = client()
    text = asked.post(TEXTS, json=COMPLETION).json()["choices"][0]["text"]
    stop = text[3:5]
    choice = asked.post(TEXTS, json={**COMPLETION, "stop": stop}).json()["choices"][0]
    assert choice == {"index": 0, "text": text[: text.index(stop)], "logprobs": None, "finish_reason": "stop"}


def test_long_messages_are_compressed_and_the_last_line_is_asked(client, served):
    expected = served.answer(served.compress(TEXT, ratio=3), ASKED, max_new_tokens=NEW)
    asked = client(compress_over=40, compress_ratio=3.0)
    answer = asked.post(CHATS, json={**CHAT, "messages": [{"role": "user", "content": f"{TEXT}\n\n{ASKED}"}]}).json()
    assert answer["usage"]["prompt_tokens_details"]["original_tokens"] > 50
    apart = [{"role": "system", "content": TEXT}, {"role": "user", "content": ASKED}]
    again = asked.post(CHATS, json={**CHAT, "messages": apart}).json()
    assert again["choices"][0]["message"]["content"] == expected
    short = asked.post(CHATS, json=CHAT).json()
    assert short["usage"]["prompt_tokens_details"] == {"original_tokens": 0, "compressed_tokens": 0}
    refused = asked.post(CHATS, json={**CHAT, "messages": [{"role": "user", "content": TEXT}]})
    assert refused.status_code == 400 and "line of its own" in refused.json()["error"]["message"]


def test_a_conversation_goes_on_behind_a_compressed_message_where_templates_want_turns(client, served):
    """As Llama 2's and Mistral's do, which refuse two of one role in a row, and a reply first."""
    strict = copy.copy(served)
    strict.tokenizer = copy.deepcopy(served.tokenizer)
    strict.tokenizer.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    asked = client(strict, compress_over=40, compress_ratio=3.0)
    turns = [("user", TEXT), ("assistant", "A bird."), ("user", ASKED)]
    for long in (0, 1):
        each = [(role, TEXT if i == long else text if i == 2 else "Yes.") for i, (role, text) in enumerate(turns)]
        messages = [{"role": role, "content": text} for role, text in each]
        response = asked.post(CHATS, json={**CHAT, "messages": messages})
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["prompt_tokens_details"]["original_tokens"] > 50
    refused = asked.post(CHATS, json={**CHAT, "messages": [{"role": "assistant", "content": "Yes."}, CHAT["messages"][0]]})
    assert refused.status_code == 400 and "must alternate" in refused.json()["error"]["message"]


def test_tokens_of_all_texts_that_are_compressed_are_counted(client):
    asked = client(compress_over=40, compress_ratio=3.0)

    def counted() -> float:
        (line,) = [line for line in asked.get("/metrics").text.splitlines() if line.startswith("dodo_compressed_tokens_total")]
        return float(line.split()[1])

    tokens = kept(asked)["n"] + 1  # and the one that stands in front
    assert counted() == tokens
    messages = [{"role": "user", "content": f"{TEXT}\n\n{ASKED}"}]
    usage = asked.post(CHATS, json={**CHAT, "messages": messages}).json()["usage"]
    assert counted() == tokens + usage["prompt_tokens_details"]["original_tokens"]


def test_places_of_tokens_do_not_wait_for_what_may_become_a_stop_text(client):
    asked = client()
    wanted = {**COMPLETION, "logprobs": 1, "temperature": 2.0, "seed": 5}
    plain = asked.post(TEXTS, json=wanted).json()["choices"][0]
    stop = plain["text"][1:4] + "\u2603"  # begins as the answer goes on, and never comes
    held = asked.post(TEXTS, json={**wanted, "stop": stop}).json()["choices"][0]
    assert held == plain
    tokens, offsets, tops = (plain["logprobs"][name] for name in ("tokens", "text_offset", "top_logprobs"))
    each = [*zip(offsets, tokens, ["", *tokens], strict=False)]
    whole = [
        (at, token) for at, token, before in each if "\ufffd" not in before + token
    ]  # no part of a character, nor behind one
    assert len(whole) > 3 and all(plain["text"][at:].startswith(token) for at, token in whole), (plain["text"], each)
    assert all(top[token] == value for top, token, value in zip(tops, tokens, plain["logprobs"]["token_logprobs"], strict=True))
    assert any(len(top) == 2 for top in tops)


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory. Tried"), MemoryError()])
def test_too_little_memory_is_said_and_not_tried_again(error, client, served, monkeypatch):
    asked = client()

    def fail(*arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(type(served), "compress_ids", fail)
    response = asked.post("/v1/contexts", json={"text": TEXT})
    assert (response.status_code, response.json()["error"]["code"]) == (507, "out_of_memory")
    assert response.headers["x-should-retry"] == "false"


def test_a_long_message_of_several_clients_at_once_is_compressed_once(client, served, monkeypatch):
    asked, compressed = client(compress_over=40), []
    body = {**CHAT, "messages": [{"role": "system", "content": TEXT}, *CHAT["messages"]]}
    compress = served.compress_ids
    monkeypatch.setattr(served, "compress_ids", lambda *args, **kwargs: compressed.append(1) or compress(*args, **kwargs))
    going = asked.app.state.service.intake._compressing._going
    with ThreadPoolExecutor(3) as pool:
        with busy(asked):
            answers = [pool.submit(asked.post, CHATS, json=body) for _ in range(3)]
            until = time.monotonic() + 30
            while not any(each.waiting == 3 for each in going.values()) and time.monotonic() < until:
                time.sleep(0.01)
        texts = {answer.result().json()["choices"][0]["message"]["content"] for answer in answers}
    assert len(compressed) == len(texts) == 1
    assert not going
    assert asked.post(CHATS, json=body).json()["choices"][0]["message"]["content"] in texts
    assert len(compressed) == 1


def test_contexts_that_do_not_fit_the_window_side_by_side_are_put_closer(client):
    asked = client()
    ids = [kept(asked, TEXT * 9)["id"]] * 4
    answer = asked.post(CHATS, json={**CHAT, "context_ids": ids})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens_details"]["original_tokens"] > 2048


@pytest.mark.filterwarnings("ignore:a text of:dodo.errors.DodoWarning")
def test_a_text_longer_than_the_window_is_kept_and_read_beside_a_short_one(client, served):
    long = TEXT * 40
    both = Nuggets.cat([served.compress(long, ratio=8).compact(), served.compress(TEXT).compact()])
    expected = served.answer(both, ASKED, max_new_tokens=NEW)
    asked = client()
    beyond, short = kept(asked, long, ratio=8), kept(asked)
    assert "longer than the base's window of 2,048" in beyond["warning"] and short["warning"] is None
    ids = [beyond["id"], short["id"]]
    answer = asked.post(CHATS, json={**CHAT, "context_ids": ids}).json()
    assert answer["choices"][0]["message"]["content"] == expected


# -- what can't be done


UNKNOWN = "ctx_" + "a" * 22


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", f"/v1/contexts/{UNKNOWN}", None, 404, None),
        ("GET", "/v1/contexts/..%2F..%2Fetc", None, 404, None),
        ("GET", f"/v1/contexts?after={UNKNOWN}", None, 404, "after"),
        ("GET", "/v1/contexts?limit=0", None, 422, "limit"),
        ("GET", "/v1/nothing", None, 404, None),
        ("PUT", "/v1/contexts", {}, 405, None),
        ("POST", "/v1/contexts", {"text": ""}, 400, None),
        ("POST", "/v1/contexts", {"text": " \n"}, 400, None),
        ("POST", "/v1/contexts", {}, 422, "text"),
        ("POST", "/v1/contexts", {"text": 1}, 422, "text"),
        ("POST", "/v1/contexts", {"text": "a", "ratio": 0.5}, 422, "ratio"),
        ("POST", "/v1/contexts", {"text": "a", "ratio": True}, 422, "ratio"),
        ("POST", "/v1/contexts", {"text": "a", "ratio": 2, "nuggets": 2}, 422, None),
        ("POST", "/v1/contexts", {"text": "a", "colour": 1}, 422, "colour"),
        ("POST", CHATS, {**CHAT, "model": "gpt-4"}, 404, "model"),
        ("POST", CHATS, {**CHAT, "context_ids": [UNKNOWN]}, 404, "context_ids"),
        ("POST", CHATS, {**CHAT, "messages": []}, 422, "messages"),
        ("POST", CHATS, {**CHAT, "messages": [{"role": "tool", "content": "a"}]}, 422, "messages[0].role"),
        ("POST", CHATS, {**CHAT, "messages": [{"role": "user", "content": " "}]}, 400, None),
        ("POST", CHATS, {**CHAT, "tools": []}, 422, "tools"),
        ("POST", CHATS, {**CHAT, "frequency_penalty": 0.5}, 422, "frequency_penalty"),
        ("POST", CHATS, {**CHAT, "temperature": -1}, 422, "temperature"),
        ("POST", CHATS, {**CHAT, "max_tokens": 100_000}, 400, "max_tokens"),
        ("POST", CHATS, {**CHAT, "n": 100}, 400, "n"),
        ("POST", CHATS, {**CHAT, "top_logprobs": 2}, 422, None),
        ("POST", TEXTS, {**COMPLETION, "prompt": ""}, 400, None),
        ("POST", TEXTS, {**COMPLETION, "prompt": [999_999]}, 400, None),
        ("POST", TEXTS, {**COMPLETION, "prompt": "long " * 1000}, 400, None),
        ("POST", TEXTS, {**COMPLETION, "echo": True}, 422, "echo"),
        ("POST", TEXTS, {**COMPLETION, "logprobs": True}, 422, "logprobs"),
    ],
)
def test_bad_input_is_refused_with_its_status_and_field(method, path, body, status, param, client):
    response = client().request(method, path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param or "") and (param is None or error["param"])
    assert error["message"] and error["type"] and "\n" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/contexts", CHATS, "/v1/completions"])
@pytest.mark.parametrize("body", [b'{"text": ', b"[" * 100_000, b'{"a": "\xff"}', b'{"a": ' + b"1" * 5000 + b"}"], ids=len)
def test_malformed_json_is_422(path, body, client):
    response = client().post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert "JSON" in response.json()["error"]["message"]


def test_an_empty_document_is_400_and_other_types_are_415(client):
    asked = client()
    assert asked.post("/v1/contexts", files={"file": ("a.txt", b"")}).status_code == 400
    assert asked.post("/v1/contexts", files={"file": ("a.png", b"\x89PNG\r\n\x1a\n")}).status_code == 415
    assert asked.post("/v1/contexts", content=b"text", headers={"Content-Type": "text/plain"}).status_code == 415
    assert asked.post("/v1/contexts", content=b"text").status_code == 415
    missing = asked.post("/v1/contexts", files={"document": ("a.txt", b"text")})
    assert (missing.status_code, missing.json()["error"]["param"]) == (422, "file")
    unknown = asked.post("/v1/contexts", files={"file": ("a.txt", b"text")}, data={"colour": "1"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (422, "colour")
    for field, value in (("text", "b"), ("ratio", ["2", "9"])):  # one of two would be lost
        both = asked.post("/v1/contexts", files={"file": ("a.txt", b"text")}, data={field: value})
        assert (both.status_code, both.json()["error"]["param"]) == (422, field)


def test_a_damaged_nuggets_file_is_400(client):
    asked = client()
    data = asked.get(f"/v1/contexts/{kept(asked)['id']}/nuggets").content
    broken = bytearray(data)
    broken[-5] ^= 1
    for bad in (bytes(broken), data[:100], b"{}", b""):
        response = asked.post("/v1/contexts", files={"file": ("a.nuggets", bad)})
        assert response.status_code == 400, response.text
        assert "/incoming/" not in response.text


def test_a_context_of_another_model_is_409(client, tmp_path):
    other = tiny_dodo(seed=1)
    other.compress(TEXT).save(tmp_path / "other.nuggets")
    asked = client()
    response = asked.post("/v1/contexts", files={"file": ("a.nuggets", (tmp_path / "other.nuggets").read_bytes())})
    assert response.status_code == 409
    made = kept(asked)
    elsewhere = client(other).post(CHATS, json={**CHAT, "context_ids": [made["id"]]})
    assert elsewhere.status_code == 409
    assert "adapter" in elsewhere.json()["error"]["message"]


def test_a_body_over_the_limit_is_413_also_if_it_does_not_say_its_length(client):
    asked = client(max_body=10_000)
    announced = asked.post("/v1/contexts", json={"text": "a" * 20_000})
    assert (announced.status_code, announced.json()["error"]["code"]) == (413, "body_too_large")
    read = []

    def chunks() -> Any:
        for _ in range(1000):
            read.append(1)
            yield b" " * 1000

    response = asked.post(CHATS, content=chunks(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert asked.post("/v1/contexts", files={"file": ("a.txt", b"a" * 20_000)}).status_code == 413


def test_a_text_over_the_limit_is_413(client):
    response = client(max_document=50).post("/v1/contexts", json={"text": TEXT})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "text_too_long")


def test_a_full_queue_is_429_and_says_when_to_come_again(client):
    asked = client(max_queue=1, max_batch=1)
    with ThreadPoolExecutor() as pool:
        with busy(asked):
            first = pool.submit(asked.post, CHATS, json=CHAT)
            while not asked.app.state.service.engine.stats().queued:
                time.sleep(0.01)
            second = asked.post(CHATS, json=CHAT)
            several = asked.post(CHATS, json={**CHAT, "stream": True})
        assert first.result().status_code == 200
    for response in (second, several):
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"


def test_over_time_is_504_and_frees_its_place(client):
    asked = client(timeout=0.2)
    with busy(asked):
        assert asked.post(CHATS, json=CHAT).status_code == 504
        assert asked.app.state.service.engine.stats().queued == 0
        assert asked.post("/v1/contexts", json={"text": TEXT}).status_code == 504
        late = asked.post(CHATS, json={**CHAT, "stream": True})
        assert '"code":"timeout"' in late.text and "[DONE]" not in late.text


@pytest.mark.parametrize(
    ("path", "more", "param", "said"),
    [
        (
            CHATS,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "",
        ),
        (CHATS, {"stop": [""]}, "stop[0]", "at least 1 character"),
        (CHATS, {"stop": 5}, "stop", "valid string"),
        (CHATS, {"max_completion_tokens": 10**6}, "max_completion_tokens", "tokens at most here"),
        (CHATS, {"max_tokens": 10**6}, "max_tokens", "tokens at most here"),
        (TEXTS, {"prompt": []}, "prompt", "at least 1 item"),
        ("/v1/contexts", {"text": "a b", "query": "x"}, "query", "query is not supported"),
    ],
)
def test_the_field_that_is_wrong_is_named(client, path, more, param, said):
    body = {CHATS: CHAT, TEXTS: COMPLETION}.get(path, {})
    error = client().post(path, json=body | more).json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_a_conversation_beyond_the_window_is_what_clients_look_for(client):
    message = {"role": "user", "content": "dodo " * 2000}
    response = client().post(CHATS, json=CHAT | {"messages": [message]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "nuggets" not in error["message"]


def test_several_answers_need_one_place_in_the_queue(client):
    asked = client(max_queue=1)
    for _ in range(3):
        assert len(asked.post(CHATS, json=CHAT | {"n": 4}).json()["choices"]) == 4


def test_the_coldest_temperature_is_greedy(client):
    asked = client()
    texts = [asked.post(CHATS, json=CHAT | {"temperature": t}).json()["choices"][0]["message"]["content"] for t in (0, 1e-40)]
    assert texts[0] == texts[1]


def test_a_full_disk_is_507_and_loses_nothing(client, monkeypatch):
    from dodo import nuggets_file

    asked = client()
    made = kept(asked)

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(nuggets_file, "save_file", full)
        assert asked.post("/v1/contexts", json={"text": "another text"}).status_code == 507
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_bytes", full)
        files = {"file": ("a.nuggets", asked.get(f"/v1/contexts/{made['id']}/nuggets").content)}
        assert asked.post("/v1/contexts", files=files).status_code == 507
    assert asked.get("/v1/contexts").json()["data"] == [made]
    assert asked.post(CHATS, json={**CHAT, "context_ids": [made["id"]]}).status_code == 200


def test_what_goes_wrong_inside_is_a_500_that_tells_nothing(client, monkeypatch):
    asked = client()

    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(Store, "page", fail)
    response = asked.get("/v1/contexts")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error" and "secret" not in response.text


# -- who may ask


def test_with_keys_everything_but_health_needs_one(client):
    asked = client(keys=("k" * 20, "l" * 20))
    assert asked.get("/health").status_code == 200
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "k" * 20}, {"Authorization": "Bearer é".encode()}):
        for response in (asked.get("/v1/models", headers=header), asked.get("/metrics", headers=header)):
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert asked.post(CHATS, json=CHAT, headers=header).status_code == 401
        assert asked.post(CHATS, content=b"{", headers=header).status_code == 401  # before the body is looked at
    for key in ("k" * 20, "l" * 20):
        assert asked.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_pages_of_other_sites_may_not_ask_unless_they_are_let_in(client):
    evil, friend = {"Origin": "https://evil.example"}, {"Origin": "https://friend.example"}
    asked = client()
    assert asked.get("/v1/models", headers=evil).status_code == 403
    assert asked.post("/v1/contexts", files={"file": ("a.txt", b"text")}, headers=evil).status_code == 403
    assert asked.get("/v1/models", headers={"Origin": "http://localhost"}).status_code == 200
    assert asked.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    opened = client(cors_origins=("https://friend.example",))
    assert opened.get("/v1/models", headers=friend).headers["Access-Control-Allow-Origin"] == "https://friend.example"
    assert opened.get("/v1/models", headers=evil).status_code == 403


# -- what it says of itself


def test_models_health_figures_and_documentation(client):
    asked = client()
    kept(asked)
    asked.post(CHATS, json=CHAT)
    (model,) = asked.get("/v1/models").json()["data"]
    assert model["id"] == MODEL and asked.get(f"/v1/models/{MODEL}").json() == model
    assert asked.get("/v1/models/other").status_code == 404
    assert asked.get("/health").json()["status"] == "ok"
    figures = asked.get("/metrics").text
    assert 'dodo_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0' in figures
    assert f"dodo_generated_tokens {NEW}.0" in figures and "dodo_store_contexts 1.0" in figures
    paths = asked.get("/openapi.json").json()["paths"]
    assert {"/v1/contexts", "/v1/contexts/{context_id}", CHATS, TEXTS, "/v1/models", "/health", "/metrics"} <= set(paths)
    assert set(paths[CHATS]["post"]["responses"]) >= {"200", "400", "401", "404", "409", "413", "422", "429", "504"}


def test_a_forged_nuggets_file_is_refused_before_it_meets_the_model(client, served, tmp_path):
    nuggets = served.compress(TEXT)
    forged = {
        "far": {"next_positions": nuggets.next_positions + 10**6},
        "backward": {"positions": nuggets.positions.flip(1)},
        "not numbers": {"keys": nuggets.keys * float("nan")},
        "unknown tokens": {"token_ids": nuggets.token_ids + 10**6},
        "a score too few": {"scores": nuggets.scores[:, 1:]},
        "nowhere to go on": {"next_positions": nuggets.next_positions * 0},
        "a head too few": {"keys": nuggets.keys[:, :, 1:], "values": nuggets.values[:, :, 1:]},
        "a layer too few": {"keys": nuggets.keys[1:], "values": nuggets.values[1:]},
        "values of other states": {"values": nuggets.values[..., 1:, :]},
    }
    asked = client()
    for name, changes in forged.items():
        path = tmp_path / f"{name}.nuggets"
        changed = dataclasses.replace(nuggets, **changes)
        if name == "not numbers":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("dodo.nuggets_file.torch.isfinite", lambda tensor: tensor.isnan() | True)
                changed.save(path)
        else:
            changed.save(path)
        response = asked.post("/v1/contexts", files={"file": io.BytesIO(path.read_bytes())})
        assert response.status_code == (409 if name == "a head too few" else 400), name
