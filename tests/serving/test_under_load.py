"""Laws of the server where much happens at once, or something breaks: nobody waits for others, and places are freed."""

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from dodo.architecture import layers_of
from dodo.errors import UnknownContext
from dodo.nuggets import Nuggets
from dodo.serving.formats import ChatFormat
from dodo.serving.prompting import Prompting
from dodo.serving.request import Piece
from dodo.serving.store import Context, Store
from tests.serving.contexts import made_up
from tests.serving.test_app import CHAT, CHATS, COMPLETION, TEXT, TEXTS, busy, kept


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def sent(address: str, path: str, body: dict[str, Any], **headers: str) -> http.client.HTTPConnection:
    """A request whose answer nobody has read."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
    return connection


@pytest.fixture
def slow(served):
    """Each layer takes its time over long texts; says how often one did."""
    begun: list[int] = []

    def wait(_: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if args[0].shape[1] > 500:
            begun.append(1)
            time.sleep(0.1)

    hooks = [layer.register_forward_pre_hook(wait, with_kwargs=True) for layer in layers_of(served.compressor.base)]
    yield begun
    for hook in hooks:
        hook.remove()


def test_an_answer_comes_while_a_long_text_is_compressed(client, slow):
    asked = client()
    alone = asked.post(CHATS, json=CHAT).json()["choices"]
    adding = threading.Thread(target=kept, args=(asked, TEXT * 12))
    adding.start()
    assert eventually(lambda: len(slow) >= 1)
    assert asked.post(CHATS, json={**CHAT, "max_tokens": 2}).status_code == 200
    assert adding.is_alive() and len(slow) < 6
    adding.join()
    assert asked.post(CHATS, json=CHAT).json()["choices"] == alone


def test_who_hangs_up_while_a_text_is_compressed_ends_that(listening, slow):
    address, app = listening()
    connection = sent(address, "/v1/contexts", {"text": TEXT * 12})
    assert eventually(lambda: len(slow) >= 1)
    connection.sock.close()
    assert app.state.service.engine.run(lambda: len(slow)).result(30) < 6
    assert app.state.service.store.totals()["contexts"] == 0


@pytest.fixture
def slowly_stored(monkeypatch):
    """Contexts stored so far, and an event; while that is not set, the next one is begun and not stored."""
    stored: list[Context] = []
    begun, go_on, add = threading.Event(), threading.Event(), Store.add

    def slow_add(self: Store, *args: Any, **more: Any) -> Context:
        begun.set()
        go_on.wait(30)
        stored.append(add(self, *args, **more))
        return stored[-1]

    monkeypatch.setattr(Store, "add", slow_add)
    go_on.set()
    yield stored, begun, go_on
    go_on.set()


def only_the_first_is_kept(store: Store, stored: list[Context]) -> bool:
    assert eventually(lambda: len(stored) == 2)
    assert stored[0].sha256 == stored[1].sha256
    gone = eventually(lambda: store.totals()["contexts"] == 1)
    return gone and store.read(stored[0].id) != b""


def test_a_context_that_is_stored_only_after_the_time_was_over_is_deleted(client, slowly_stored):
    stored, _, go_on = slowly_stored
    asked = client(timeout=1)
    kept(asked)
    go_on.clear()
    assert asked.post("/v1/contexts", json={"text": TEXT}).status_code == 504
    go_on.set()
    assert only_the_first_is_kept(asked.app.state.service.store, stored)


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_context_that_is_stored_only_after_the_client_has_hung_up_is_deleted(accept, listening, slowly_stored):
    stored, begun, go_on = slowly_stored
    address, app = listening()
    first = sent(address, "/v1/contexts", {"text": TEXT})
    assert first.getresponse().status == 201
    first.close()
    begun.clear()
    go_on.clear()
    connection = sent(address, "/v1/contexts", {"text": TEXT}, Accept=accept)
    assert begun.wait(30)
    connection.sock.close()
    time.sleep(0.3)
    go_on.set()
    assert only_the_first_is_kept(app.state.service.store, stored)


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_while_waiting_leaves_the_queue_at_once(stream, listening):
    address, app = listening()
    engine = app.state.service.engine
    begun, done = threading.Event(), threading.Event()
    engine.run(lambda: (begun.set(), done.wait(30)))
    begun.wait(30)
    connection = sent(address, CHATS, {**CHAT, "stream": stream})
    assert eventually(lambda: engine.stats().queued == 1)
    connection.sock.close()
    assert eventually(lambda: engine.stats().queued == 0)
    done.set()
    engine.run(len, "").result(30)
    assert engine.stats().tokens == 0


def test_where_not_all_choices_fit_the_queue_none_stays_in_it(client):
    asked = client(max_queue=2)
    engine = asked.app.state.service.engine
    with ThreadPoolExecutor(1) as pool, busy(asked):
        first = pool.submit(asked.post, TEXTS, json=COMPLETION)
        assert eventually(lambda: engine.stats().queued == 1)
        assert asked.post(TEXTS, json={**COMPLETION, "n": 2}).status_code == 429
        assert engine.stats().queued == 1
    assert first.result(30).status_code == 200
    assert asked.post(TEXTS, json={**COMPLETION, "n": 3}).status_code == 200  # nobody waits


def test_an_answer_over_time_is_ended_and_frees_its_place(client):
    asked = client(timeout=0.3)
    engine = asked.app.state.service.engine
    assert asked.post(CHATS, json={**CHAT, "max_tokens": 1900}).status_code == 504
    assert eventually(lambda: (engine.stats().running, engine.stats().states) == (0, 0))


def test_what_goes_wrong_inside_is_logged_once(listening, monkeypatch):
    address, _ = listening()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    names = ("uvicorn.error", "dodo.serving")
    for name in names:
        logging.getLogger(name).addHandler(handler)

    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(Store, "page", fail)
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("GET", "/v1/contexts")
    assert connection.getresponse().status == 500
    connection.close()
    assert eventually(lambda: len(records) >= 1)
    time.sleep(0.1)
    for name in names:
        logging.getLogger(name).removeHandler(handler)
    assert ["secret" in str(record.exc_info[1]) for record in records if record.exc_info] == [True]


def test_health_tells_when_the_model_answers_no_more(client):
    asked = client()
    assert asked.get("/health").status_code == 200
    asked.app.state.service.engine.close()
    assert asked.get("/health").status_code == 503


def test_the_text_of_a_token_does_not_wait_for_a_long_text(served):
    prompting = Prompting(served)
    with prompting._guard:
        told: list[str] = []
        asking = threading.Thread(target=lambda: told.append(prompting.token(40)), daemon=True)
        asking.start()
        asking.join(10)
        assert told == [served.tokenizer.decode([40])]


def test_a_part_of_a_character_has_no_bytes():
    form = ChatFormat({1: "a", 2: "\ufffd"}.__getitem__)
    entries = form.choice(0, [Piece(1, "a", -0.5), Piece(2, "", -0.5, finish="length")])["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[97], None]


def test_a_context_that_another_server_deletes_while_it_is_read_is_unknown(tmp_path, monkeypatch):
    store = Store(tmp_path / "store", memory_limit=1)
    context = store.add(made_up())
    load = Nuggets.load

    def deleting(path: Any) -> Nuggets:
        path.unlink()
        return load(path)

    monkeypatch.setattr(Nuggets, "load", deleting)
    with pytest.raises(UnknownContext):
        store.load(context.id)
    store.close()
