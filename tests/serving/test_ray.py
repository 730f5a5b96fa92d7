"""Laws of the server on Ray: two replicas in processes of their own, over one store. Minutes: each loads torch and the model."""

import http.client
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

from dodo.cluster import joined
from dodo.errors import DodoError, InputError
from dodo.loading import Loading
from tests.serving.conftest import MODEL, tiny_base
from tests.serving.test_app import ASKED, CHATS, NEW, TEXT

ray = pytest.importorskip("ray", reason="an extra")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # Ray's own warnings

KEY = "key-of-the-tests-1234"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}], "max_tokens": NEW}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of two replicas that want a key."""
    from dodo.serving.on_ray import Replicas, deployed
    from dodo.serving.settings import Settings

    model, tokenizer = tiny_base()
    folder = tmp_path_factory.mktemp("ray")
    for part in (model, tokenizer):
        part.save_pretrained(folder / MODEL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = Settings(store=folder / "store", loading=Loading(str(folder / MODEL)), keys=(KEY,), max_body=100_000)
    with joined(os.environ.get("RAY_ADDRESS"), cpus=2), deployed(settings, Replicas(2), host="127.0.0.1", port=port):
        yield f"http://127.0.0.1:{port}"


def ask(address, path, body=None, **headers):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(address + path, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.read().decode()


def refused(address, path, body=None, **headers):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(address, path, body, **headers)
    return caught.value.code, json.load(caught.value)["error"]["code"]


def answer(address, context):
    return json.loads(ask(address, CHATS, {**CHAT, "context_ids": [context["id"]]}))["choices"]


def figures(address, name, times=24):
    """A figure as often as it is asked for: each time one of the replicas tells its own."""
    pattern = re.compile(rf"^{re.escape(name)} (\S+)$", re.MULTILINE)
    return [float(pattern.search(ask(address, "/metrics"))[1]) for _ in range(times)]


def actors(name):
    found = ray.util.list_named_actors(all_namespaces=True)
    return [ray.get_actor(**actor) for actor in found if actor["name"].startswith(name)]


@pytest.fixture(scope="module")
def context(server):
    return json.loads(ask(server, "/v1/contexts", {"text": TEXT, "ratio": 4}))


def test_what_one_replica_is_given_all_answer_from(server, context):
    first = answer(server, context)
    assert all(answer(server, context) == first for _ in range(20))
    assert all(json.loads(ask(server, "/v1/contexts"))["data"] == [context] for _ in range(10))
    served = figures(server, "dodo_generated_tokens")
    assert len(set(served)) == 2 and min(served) > 0 and sum(set(served)) == 21 * NEW


def test_the_official_client_works_whole_and_streamed(server, context):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as client:
        asked = {**CHAT, "extra_body": {"context_ids": [context["id"]]}}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
        assert len(pieces) > 2 and "".join(pieces) == whole
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(**CHAT, extra_body={"context_ids": ["ctx_none"]})
        assert unknown.value.code == "context_not_found"


def test_who_shows_no_key_or_comes_from_another_site_or_sends_too_much_is_refused(server):
    assert refused(server, "/v1/models", Authorization="Bearer wrong") == (401, "invalid_api_key")
    assert refused(server, "/v1/models", Origin="https://example.org") == (403, "forbidden")
    assert refused(server, "/v1/contexts", {"text": "a" * 100_000}) == (413, "body_too_large")
    assert json.loads(ask(server, "/health", Authorization=""))["status"] == "ok"


def test_a_stream_begins_before_it_ends_and_a_client_that_hangs_up_ends_it(server):
    connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=120)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    before = sum(set(figures(server, "dodo_generated_tokens")))
    connection.request("POST", CHATS, json.dumps({**CHAT, "max_tokens": 1900, "stream": True}), headers)
    assert connection.getresponse().read(6) == b"data: "
    assert 1 in figures(server, "dodo_requests_running")
    connection.sock.shutdown(socket.SHUT_RDWR)  # closing alone would wait for the answer object, which the connection holds
    ends, quiet = time.monotonic() + 60, 0
    while quiet < 5 and time.monotonic() < ends:  # the replica that is busy is asked less often
        quiet = 0 if any(figures(server, "dodo_requests_running")) else quiet + 1
    assert quiet == 5
    assert sum(set(figures(server, "dodo_generated_tokens"))) - before < 1900


@pytest.mark.parametrize("name", ["SERVE_REPLICA::dodo", "dodo-store"])
def test_a_replica_or_the_store_may_be_killed_and_all_is_kept(name, server, context):
    first = answer(server, context)
    ray.kill(actors(name)[0], no_restart=False)
    ends = time.monotonic() + 300
    while True:  # what was on its way to the one that was killed fails
        try:
            again = [answer(server, context) for _ in range(5)]
            break
        except urllib.error.HTTPError:
            assert time.monotonic() < ends
    assert again == [first] * 5
    assert json.loads(ask(server, "/v1/contexts"))["data"] == [context]


def test_a_second_server_on_the_same_cluster_is_refused(server, tmp_path):
    from dodo.serving.on_ray import Replicas, deployed
    from dodo.serving.settings import Settings

    with (
        pytest.raises(DodoError, match="runs on this cluster already"),
        deployed(Settings(store=tmp_path), Replicas(), host="127.0.0.1", port=1),
    ):
        pass


def test_no_replicas_are_refused():
    from dodo.serving.on_ray import Replicas

    with pytest.raises(InputError, match="at least 1"):
        Replicas(0)
