"""The official client against a server at a port: every call that it has and this server takes."""

import asyncio
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from dodo.serving.batch import Batch
from tests.serving.conftest import MODEL, tiny_dodo
from tests.serving.test_app import ASKED, CHATS, NEW, TEXT

KEY = "key-of-the-tests-1234"
MESSAGES: Any = [{"role": "user", "content": ASKED}]


@pytest.fixture
def server(listening):
    return listening(keys=(KEY,))


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def context(client) -> str:
    return client.post("/contexts", body={"text": TEXT, "name": "dodo"}, cast_to=object)["id"]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("other")


def test_chat_whole_and_streamed(client, context):
    asked: Any = {"model": MODEL, "messages": MESSAGES, "extra_body": {"context_ids": [context]}}
    asked |= {"max_completion_tokens": NEW, "temperature": 0.7, "top_p": 0.9, "seed": 1, "n": 2, "stop": ["\n"]}
    answer = client.chat.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    assert answer.usage.prompt_tokens_details.original_tokens > answer.usage.prompt_tokens_details.compressed_tokens > 0
    texts, last = ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]
    assert last.usage == answer.usage


def test_a_conversation_goes_on_with_the_message_that_came(client):
    messages: list[Any] = list(MESSAGES)
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    messages += [answer.choices[0].message, {"role": "user", "content": "And then?"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, extra_body={"tools": None}).choices
    with pytest.raises(openai.UnprocessableEntityError, match="tools is not supported"):
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, tools=[])


def test_what_asking_again_does_not_mend_is_asked_once(listening):
    address, _ = listening(timeout=0.001)
    seen: list[Any] = []
    http_client = openai.DefaultHttpxClient(event_hooks={"request": [seen.append]})
    patient = openai.OpenAI(base_url=f"{address}/v1", api_key="x", http_client=http_client)
    with patient, pytest.raises(openai.InternalServerError) as error:
        patient.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=500)
    assert (error.value.status_code, len(seen)) == (504, 1)


def test_log_probabilities_of_a_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 4
    for entry in entries:
        assert [top.logprob for top in entry.top_logprobs] == sorted((t.logprob for t in entry.top_logprobs), reverse=True)
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy


def test_completions_whole_and_streamed(client, context):
    asked: Any = {"model": MODEL, "prompt": ["The dodo", "It"], "max_tokens": NEW, "logprobs": 2}
    asked |= {"extra_body": {"context_ids": [context]}}
    answer = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    assert len(answer.choices[0].logprobs.tokens) == NEW
    assert client.completions.create(model=MODEL, prompt=[72, 101, 108]).usage.completion_tokens == 16


def test_many_ask_at_once_and_are_answered_as_each_alone(server, client, context):
    questions = [f"Question number {i}?" for i in range(8)]
    asked: Any = {"model": MODEL, "max_tokens": NEW, "extra_body": {"context_ids": [context]}}
    alone = [client.chat.completions.create(**asked, messages=[{"role": "user", "content": q}]) for q in questions]

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key=KEY, max_retries=0) as several:
            calls = [several.chat.completions.create(**asked, messages=[{"role": "user", "content": q}]) for q in questions]
            return await asyncio.gather(*calls)

    for one, same in zip(alone, asyncio.run(together()), strict=True):
        assert same.choices[0].message.content == one.choices[0].message.content


def test_errors_are_those_that_the_client_knows(server, client, tmp_path):
    chat = client.chat.completions.create
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server[0]}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(model=MODEL, messages=MESSAGES, extra_body={"context_ids": ["ctx_none"]})
    assert (unknown.value.code, unknown.value.param) == ("context_not_found", "context_ids")
    with pytest.raises(openai.UnprocessableEntityError) as tools:
        chat(model=MODEL, messages=MESSAGES, tools=[])
    assert tools.value.param == "tools"
    with pytest.raises(openai.BadRequestError):
        chat(model=MODEL, messages=MESSAGES, max_tokens=2047)
    tiny_dodo(seed=1).compress(TEXT).save(tmp_path / "other.nuggets")
    file, form = (tmp_path / "other.nuggets").read_bytes(), {"headers": {"Content-Type": "multipart/form-data"}}
    with pytest.raises(openai.ConflictError):
        client.post("/contexts", files={"file": ("other.nuggets", file)}, options=form, cast_to=object)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_place_at_once(stream, server, monkeypatch):
    address, app = server
    step = Batch.step
    # as slow as a real model, so that on a busy machine the end is not there before the hang-up is seen
    monkeypatch.setattr(Batch, "step", lambda *args, **kwargs: time.sleep(0.02) or step(*args, **kwargs))
    engine = app.state.service.engine
    before = engine.stats().tokens  # of the tests before
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1900, "stream": stream}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", CHATS, json.dumps(body), headers)
    while engine.stats().tokens < before + 3:
        time.sleep(0.01)
    assert engine.stats().running == 1
    connection.sock.close()
    ends = time.monotonic() + 20
    while engine.stats().running and time.monotonic() < ends:
        time.sleep(0.01)
    assert engine.stats().running == 0
    assert engine.stats().tokens < before + 1500
