"""Laws of `dodo serve`."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from tests.cli.conftest import COMMAND
from tests.cli.tiny import TEXT


@contextmanager
def serving(*arguments, ends_by=signal.SIGKILL):
    """A server in a process of its own, which a signal ends."""
    command = [*COMMAND, "serve", "--port", "0", "--json", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        said = b""
        while not said.endswith(b"}\n"):
            line = process.stdout.readline()
            assert line, "the server ended before it listened"
            said += line
        yield json.loads(said)["address"]
    finally:
        process.send_signal(ends_by)
        process.wait()
        process.stdout.close()


def asked(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_server_that_was_killed_has_all_its_contexts_when_it_comes_again(models, tmp_path):
    flags = ("--model", models.base, "--store", tmp_path / "store")
    body = {"model": "base", "messages": [{"role": "user", "content": "Where did it live?"}], "max_tokens": 5}
    with serving(*flags) as address:
        made = asked(f"{address}/v1/contexts", {"text": TEXT, "ratio": 2})
        body["context_ids"] = [made["id"]]
        answer = asked(f"{address}/v1/chat/completions", body)
    with serving(*flags) as address:
        assert asked(f"{address}/v1/contexts")["data"] == [made]
        assert asked(f"{address}/v1/chat/completions", body)["choices"] == answer["choices"]


def test_others_are_let_in_with_a_key_only(run, no_model):
    result = run("serve", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "--api-key-file" in result.stderr


@pytest.mark.parametrize("text", ["", "# a comment\n\n", "short\n"])
def test_a_file_without_a_good_key_is_refused(text, run, no_model, tmp_path):
    (tmp_path / "keys").write_text(text)
    result = run("serve", "--host", "0.0.0.0", "--api-key-file", tmp_path / "keys")
    assert result.exit_code == 1
    assert "openssl rand -hex 32" in result.stderr


def test_a_ratio_without_messages_to_compress_is_a_usage_error(run, no_model):
    result = run("serve", "--ratio", "5")
    assert result.exit_code == 2
    assert "--compress-over" in result.stderr


def test_a_store_that_can_not_be_used_is_said_before_anything_else(run, no_model, tmp_path):
    (tmp_path / "file").write_text("no folder")
    result = run("serve", "--port", "0", "--store", tmp_path / "file" / "store", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and "can't be used" in result.stderr


def test_a_port_that_is_taken_is_named(run, no_model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", port)
    assert result.exit_code == 1
    assert f"port {port}" in result.stderr


@pytest.mark.parametrize("flag", ["--ray-address", "--replicas", "--cpus-per-replica", "--gpus-per-replica"])
def test_flags_of_ray_without_ray_are_usage_errors(flag, run, no_model):
    result = run("serve", flag, "1")
    assert result.exit_code == 2
    assert "add --ray" in result.stderr


def test_without_ray_the_extra_is_named(run, no_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run("serve", "--ray", "--port", "0", "--store", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'dodo-lm[ray]'" in result.stderr


def test_on_ray_too_others_are_let_in_with_a_key_only(run, no_model):
    result = run("serve", "--ray", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "--api-key-file" in result.stderr


@pytest.mark.slow
def test_a_server_on_ray_says_where_it_is_and_takes_its_cluster_along(models, tmp_path):
    pytest.importorskip("ray", reason="an extra")
    joining = ["--ray-address", os.environ["RAY_ADDRESS"]] if "RAY_ADDRESS" in os.environ else []
    flags = ("--model", models.base, "--store", tmp_path / "store", "--ray", *joining)
    with serving(*flags, ends_by=signal.SIGINT) as address:
        made = asked(f"{address}/v1/contexts", {"text": TEXT, "ratio": 2})
        assert asked(f"{address}/v1/contexts")["data"] == [made]
    with pytest.raises(urllib.error.URLError):
        asked(f"{address}/health")
