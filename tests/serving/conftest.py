"""A tiny model behind the app: asked in memory, or through a socket."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dodo.loading import Loading
from dodo.model import Dodo
from tests.conftest import small_config, stir
from tests.standins.models import byte_tokenizer, tiny_llama

MODEL = "tiny"


def tiny_base(*, window: int = 2048) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A token for each byte, answers in letters that do not end by themselves."""
    model, tokenizer = tiny_llama(max_position_embeddings=window), byte_tokenizer()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for token in range(len(tokenizer)):
            if not tokenizer.decode([token]).isalpha():
                model.lm_head.weight[token] = 0  # below the best of the others, nearly always
    return model, tokenizer


def tiny_dodo(*, seed: int = 0, window: int = 2048, **config: object) -> Dodo:
    """The same with adapters that do something."""
    model, tokenizer = tiny_base(window=window)
    dodo = Dodo.from_model(model, tokenizer, small_config(keep_first=True, ratio=4.0, **config))
    stir(dodo.compressor, seed=seed)
    dodo.stamp()
    return dodo


@pytest.fixture(scope="session")
def served() -> Dodo:
    """The model that is served. An engine may be using it: what a test computes with it comes before it asks or after."""
    return tiny_dodo()


@pytest.fixture
def app(served: Dodo, tmp_path: Path) -> Callable[..., Any]:
    """Makes apps: app(timeout=1)."""
    from dodo.serving.app import make_app
    from dodo.serving.settings import Settings

    def make(dodo: Dodo = served, **settings: Any) -> Any:
        return make_app(Settings(**{"store": tmp_path / "store", "loading": Loading(MODEL), **settings}), dodo)

    return make


@pytest.fixture
def client(app: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Makes clients of apps of their own: client(timeout=1).get("/health"). An error in the server is a 500, as outside."""
    from starlette.testclient import TestClient

    open_clients: list[TestClient] = []

    def make(dodo: Dodo | None = None, **settings: Any) -> TestClient:
        made = app(**settings) if dodo is None else app(dodo, **settings)
        test_client = TestClient(made, base_url="http://localhost", raise_server_exceptions=False)
        open_clients.append(test_client.__enter__())
        return open_clients[-1]

    yield make
    for each in open_clients:
        each.__exit__(None, None, None)


@pytest.fixture
def listening(app: Callable[..., Any]) -> Iterator[Callable[..., tuple[str, Any]]]:
    """Makes servers at free ports: address, app = listening(timeout=1)."""
    import uvicorn

    servers: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def make(**settings: Any) -> tuple[str, Any]:
        made = app(**settings)
        bound = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(made, log_level="error", timeout_graceful_shutdown=5, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        servers.append((server, thread, bound))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{bound.getsockname()[1]}", made

    yield make
    for server, thread, bound in servers:
        server.should_exit = True
        thread.join()
        bound.close()
