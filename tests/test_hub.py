"""Hub ids, against a local stand-in for the hub: download, upload, no connection."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import constants

from dodo import Dodo
from dodo.errors import FingerprintMismatch, InputError
from dodo.hub import is_hub_id
from tests.conftest import small_config, stir
from tests.standins.hub import COMMIT, Hub, running_hub
from tests.standins.models import byte_tokenizer, save_base, tiny_llama

TEXT = "the quick brown dodo"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub that everything here talks to, and an empty cache."""
    with running_hub() as hub:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        _talk_to(hub.address, tmp_path / "cache", monkeypatch)
        yield hub
        huggingface_hub.close_session()


def _talk_to(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch, *, offline: bool = False) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(cache / "xet"))
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # transformers keeps one with its first address
    clock = SimpleNamespace(sleep=lambda seconds: None, time=time.time)
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)  # it waits half a minute before it gives up
    huggingface_hub.close_session()


@pytest.fixture
def published(hub: Hub, tmp_path: Path) -> Dodo:
    """Trained adapters as someone/adapters on their base someone/base; the model that they were saved from."""
    hub.add("someone/base", save_base(tmp_path / "base"))
    dodo = Dodo.from_pretrained("someone/base", config=small_config(trained_ratios=(2.0, 20.0), keep_first=True))
    stir(dodo.compressor)
    dodo.stamp()
    dodo.save_pretrained(tmp_path / "adapters")
    hub.add("someone/adapters", tmp_path / "adapters")
    return dodo


def test_a_hub_id_of_adapters_brings_them_and_their_base(published: Dodo) -> None:
    dodo = Dodo.from_pretrained("someone/adapters")
    assert dodo.config == published.config
    assert dodo.config.base == "someone/base"
    assert dodo.fingerprint == published.fingerprint
    nuggets = published.compress(TEXT, ratio=3)
    assert dodo.generate(nuggets, "more", max_new_tokens=5) == published.generate(nuggets, "more", max_new_tokens=5)


def test_a_hub_id_of_a_base_gives_fresh_adapters(hub: Hub, tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    hub.add("someone/base", folder)
    dodo = Dodo.from_pretrained("someone/base")
    assert not dodo.is_trained
    assert dodo.config.base == "someone/base"
    assert dodo.fingerprint == Dodo.from_pretrained(folder).fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_base_of_the_hub_has_the_fingerprint_of_its_files_in_any_dtype(hub: Hub, tmp_path: Path, dtype: torch.dtype) -> None:
    hub.add("someone/base", save_base(tmp_path / "base"))
    dodo = Dodo.from_pretrained("someone/base", dtype=dtype)
    assert dodo.config.base_fingerprint == Dodo.from_pretrained(tmp_path / "base").config.base_fingerprint


def test_a_second_load_downloads_nothing_again(published: Dodo, hub: Hub) -> None:
    Dodo.from_pretrained("someone/adapters")
    hub.requests.clear()
    Dodo.from_pretrained("someone/adapters")
    assert not [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]


def test_only_the_files_of_adapters_are_downloaded(published: Dodo, hub: Hub) -> None:
    hub.repositories["someone/adapters"] |= {"training.log": b"long", "checkpoints/optimizer.bin": b"large"}
    Dodo.from_pretrained("someone/adapters")
    assert not [request for request in hub.requests if "training.log" in request or "optimizer" in request]


def test_another_base_than_the_adapters_name_is_refused_by_its_weights(published: Dodo, tmp_path: Path) -> None:
    other = save_base(tmp_path / "other", model=tiny_llama(seed=1))
    with pytest.raises(FingerprintMismatch, match="someone/adapters"):
        Dodo.from_pretrained("someone/adapters", base=other)
    assert Dodo.from_pretrained("someone/adapters", base=tmp_path / "base").config.encoder.rank == 2


@pytest.mark.parametrize("name", ["someone/unknown", "nobody/adapters"])
def test_an_unknown_hub_id_is_one_clear_error(hub: Hub, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*no such repository") as caught:
        Dodo.from_pretrained(name)
    assert "\n" not in str(caught.value)


def test_adapters_whose_base_is_gone_are_one_clear_error(published: Dodo, hub: Hub, tmp_path: Path) -> None:
    del hub.repositories["someone/base"]
    for path in sorted((tmp_path / "cache").glob("models--someone--base/**/*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    with pytest.raises(InputError, match="could not load a base model from 'someone/base'") as caught:
        Dodo.from_pretrained("someone/adapters")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["scorer.safetensors", "phi/adapter_model.safetensors", "theta/adapter_config.json"])
def test_adapters_that_were_uploaded_in_part_are_one_clear_error(published: Dodo, hub: Hub, missing: str) -> None:
    del hub.repositories["someone/adapters"][missing]
    with pytest.raises(InputError) as caught:
        Dodo.from_pretrained("someone/adapters")
    assert "\n" not in str(caught.value)


# -- no connection


@pytest.mark.parametrize("how", ["offline mode", "no server"])
def test_without_a_connection_an_uncached_model_is_one_clear_error(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _talk_to("http://127.0.0.1:1", tmp_path, monkeypatch, offline=how == "offline mode")
    with pytest.raises(InputError, match="someone/adapters.*the hub can't be reached") as caught:
        Dodo.from_pretrained("someone/adapters")
    assert "\n" not in str(caught.value)


def test_what_an_http_client_stumbles_over_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class ProxyError(Exception):
        pass

    def refused(*_: object, **__: object) -> None:
        raise ProxyError("403 Forbidden\nand much more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refused)
    with pytest.raises(InputError, match="someone/adapters.*could not be loaded from the hub: 403 Forbidden$"):
        Dodo.from_pretrained("someone/adapters")


@pytest.mark.parametrize("how", ["offline mode", "no server"])
@pytest.mark.parametrize("name", ["someone/adapters", "someone/base"])
def test_without_a_connection_a_cached_model_still_loads(
    name: str, how: str, published: Dodo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Dodo.from_pretrained(name)
    _talk_to("http://127.0.0.1:1", tmp_path / "cache", monkeypatch, offline=how == "offline mode")
    assert Dodo.from_pretrained(name).fingerprint == before.fingerprint


# -- uploading


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pushing_uploads_exactly_what_saving_writes(published: Dodo, hub: Hub, tmp_path: Path) -> None:
    address = published.push_to_hub("me/mine", token="hf_stand_in")
    assert address == f"{hub.address}/me/mine/commit/{COMMIT}"
    assert hub.repositories["me/mine"] == _files(tmp_path / "adapters")
    assert sum(map(len, hub.repositories["me/mine"].values())) < (tmp_path / "base" / "model.safetensors").stat().st_size
    assert "me/mine" not in hub.private


def test_what_was_pushed_loads_again(published: Dodo) -> None:
    published.push_to_hub("me/mine", token="hf_stand_in")
    assert Dodo.from_pretrained("me/mine").fingerprint == published.fingerprint


def test_a_private_repository_is_made_private(published: Dodo, hub: Hub) -> None:
    published.push_to_hub("me/mine", private=True, token="hf_stand_in")
    assert hub.private == {"me/mine"}


def test_pushing_without_a_connection_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _talk_to("http://127.0.0.1:1", tmp_path, monkeypatch, offline=True)
    dodo = Dodo.from_model(tiny_llama(), byte_tokenizer(), small_config())
    with pytest.raises(InputError, match="could not upload to 'me/mine'") as caught:
        dodo.push_to_hub("me/mine", token="hf_stand_in")
    assert "\n" not in str(caught.value)


# -- whole


def test_a_process_that_knows_only_the_address_loads_adapters_and_base(published: Dodo, hub: Hub, tmp_path: Path) -> None:
    script = (
        "from dodo import Dodo\n"
        "dodo = Dodo.from_pretrained('someone/adapters')\n"
        "print(dodo.fingerprint.adapter, dodo.config.base)\n"
    )
    environment: dict[str, Any] = os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert made.stdout.split() == [published.fingerprint.adapter, "someone/base"], made.stderr


def test_what_is_on_this_machine_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("someone/model")
    (tmp_path / "someone" / "model").mkdir(parents=True)
    for name in ("someone/model", "./someone", "/someone/else", "~/model", "model", "a/b/c", "folder/"):
        assert not is_hub_id(name)
