"""Laws of a store in another process, without Ray: the store is asked through what stands for its actor."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from dodo.loading import Loading
from dodo.model import Dodo
from dodo.serving import on_ray
from dodo.serving.app import make_app
from dodo.serving.on_ray import SharedStore
from dodo.serving.settings import Settings
from dodo.serving.store import AnyStore, Store
from tests.serving.conftest import MODEL
from tests.serving.test_app import CHAT, CHATS, kept

METHODS = [name for name in vars(AnyStore) if not name.startswith("_")]


class Actor:
    """A store whose methods are called as those of an actor, and answer at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._store, name))


@pytest.mark.parametrize("name", METHODS)
def test_a_shared_store_is_asked_as_a_store_is(name: str) -> None:
    shared, here, asked = (inspect.signature(getattr(kind, name)) for kind in (SharedStore, Store, AnyStore))
    assert shared == here == asked


def test_a_server_over_a_shared_store_takes_texts_and_nuggets_files(
    served: Dodo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "_told", lambda answer: answer)
    store = Store(tmp_path / "store")
    app = make_app(Settings(store=tmp_path, loading=Loading(MODEL)), served, store=SharedStore(Actor(store)))
    with TestClient(app, base_url="http://localhost") as client:
        made = kept(client)
        data = client.get(f"/v1/contexts/{made['id']}/nuggets").content
        again = client.post("/v1/contexts", files={"file": ("a.nuggets", data)})
        assert again.status_code == 201 and again.json()["sha256"] == made["sha256"]
        assert client.post(CHATS, json={**CHAT, "context_ids": [again.json()["id"]]}).status_code == 200
        assert [context["id"] for context in client.get("/v1/contexts").json()["data"]] == [again.json()["id"], made["id"]]
        assert client.delete(f"/v1/contexts/{made['id']}").status_code == 200
        assert "dodo_store_contexts 1.0" in client.get("/metrics").text
    store.close()
