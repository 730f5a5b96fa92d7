"""How the server ends."""

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the extra serve")

from dodo.serving.server import Server  # noqa: E402


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize("grace", [0.1, 30.0])
def test_answers_that_take_longer_are_ended_and_not_cut(bound: socket.socket, grace: float) -> None:
    closed, done = threading.Event(), threading.Event()

    async def app(scope, receive, send):  # streams until the engine is closed, or it is done
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        while not (closed.is_set() or done.is_set()):
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"ended" if closed.is_set() else b"whole"})

    server = Server(uvicorn.Config(app, lifespan="off", log_level="error", ws="none"), close=closed.set, grace=grace)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with urllib.request.urlopen(f"http://127.0.0.1:{bound.getsockname()[1]}/", timeout=60) as response:
        said = response.read(6)
        server.should_exit = True
        if grace > 1:
            done.set()
        said += response.read()
    thread.join(60)
    assert said == (b"begun ended" if grace < 1 else b"begun whole")
    assert closed.is_set() == (grace < 1)
