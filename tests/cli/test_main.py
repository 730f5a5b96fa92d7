"""Laws of the command as a whole: quick help, exit codes, errors of one line."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
from safetensors import SafetensorError

from dodo import __version__
from dodo.cli import VERBS, terminal
from dodo.errors import DodoWarning, DownloadError
from tests.cli.conftest import COMMAND


def test_importing_the_command_loads_neither_torch_nor_transformers():
    modules = ", ".join(["sys", "dodo.cli", *(f"dodo.cli.{verb.replace('-', '_')}" for verb in VERBS)])
    heavy = ("torch", "transformers", "peft", "numpy", "rich", "tqdm")
    probe = f"import {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_lists_every_verb_with_its_line(run):
    shown = run("--help").stdout
    for verb, line in VERBS.items():
        assert verb in shown
        assert line.split()[0] in shown


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_module(verb):
    assert find_spec(f"dodo.cli.{verb.replace('-', '_')}") is not None


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_page_has_examples_and_json(verb, run):
    shown = run(verb, "--help")
    assert shown.exit_code == 0
    assert "Examples:" in shown.stdout
    assert f"  dodo {verb}" in shown.stdout
    assert "--json" in shown.stdout


def test_version_is_the_package_version(run):
    assert run("--version").stdout == f"dodo {__version__}\n"


def test_unknown_verb_is_a_usage_error_that_names_the_verbs(run):
    result = run("squash")
    assert result.exit_code == 2
    assert "there is no verb 'squash'" in result.stderr
    assert "compress" in result.stderr


def test_unknown_option_is_a_usage_error_of_one_line(run):
    result = run("info", "--frobnicate")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "--frobnicate" in result.stderr
    assert "dodo info --help" in result.stderr


def test_no_verb_shows_help_and_is_a_usage_error():
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Verbs" in done.stderr


def test_failure_is_one_line_and_exit_1(run, monkeypatch):
    def fail(*arguments, **more):
        raise DownloadError("no connection,\nnot today")

    monkeypatch.setattr("dodo.pull.pull", fail)
    result = run("pull")
    assert result.exit_code == 1
    assert result.stderr == "error: no connection, not today\n"


def test_interrupt_exits_130(run, monkeypatch):
    def interrupt(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("dodo.pull.pull", interrupt)
    result = run("pull")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_warnings_are_lines_on_stderr(run, monkeypatch, tmp_path):
    def warning(*arguments, **more):
        warnings.warn("mind\nthe gap", DodoWarning, stacklevel=1)
        return tmp_path

    monkeypatch.setattr("dodo.pull.pull", warning)
    result = run("pull")
    assert result.exit_code == 0
    assert result.stderr == "warning: mind the gap\n"
    assert result.stdout == f"{tmp_path}\n"


def test_a_reader_that_hangs_up_causes_no_traceback(document, models):
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*COMMAND, "ask", document, "Where?", "--model", models.base],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert done.returncode == 1
    for word in ("Traceback", "Exception", "terminate"):
        assert word not in done.stderr


def test_results_for_machines_lose_no_character_in_any_encoding(document, models):
    command = [*COMMAND, "inspect", str(document), "--json", "--model", models.base]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0, done.stderr
    text = document.read_text(encoding="utf-8")
    tokens = json.loads(done.stdout.decode("latin-1"))["tokens"]
    assert all(token["text"] == text[token["start"] : token["end"]] for token in tokens)


def test_a_shard_is_not_replaced_unasked(run, tmp_path, models):
    source, out = tmp_path / "a.jsonl", tmp_path / "a.safetensors"
    source.write_text(json.dumps({"text": "the dodo " * 20}), encoding="utf-8")
    command = ("prepare-data", source, "-o", out, "--model", models.base)
    assert run(*command).exit_code == 0
    before = out.stat()
    assert before.st_mode & 0o444 == 0o444 & ~_umask()
    refused = run(*command)
    assert (refused.exit_code, out.stat().st_mtime_ns) == (2, before.st_mtime_ns)
    assert "--force" in refused.stderr
    assert run(*command, "--force").exit_code == 0


def test_where_a_shard_can_not_go_is_said_before_anything_is_read(run, tmp_path, models):
    (tmp_path / "file").write_text("x")
    refused = run("prepare-data", tmp_path / "nothing.jsonl", "-o", tmp_path / "file" / "o.safetensors", "--model", models.base)
    assert refused.exit_code == 2
    assert "--out" in refused.stderr
    assert "could not make its folder" in refused.stderr


def test_a_full_disk_is_one_clear_error(run, tmp_path, models, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("dodo.data.shards.save_file", full)
    (tmp_path / "a.jsonl").write_text('{"text": "the dodo was a bird of the island"}\n')
    result = run("prepare-data", tmp_path / "a.jsonl", "-o", tmp_path / "o.safetensors", "--model", models.base, "--minimum", "1")
    assert result.exit_code == 1
    assert "could not write" in result.stderr
    assert "No space left on device" in result.stderr
    assert not (tmp_path / "o.safetensors").exists()


def test_data_is_prepared_by_a_bases_tokenizer_without_its_weights(run, tmp_path, models):
    source, bare = tmp_path / "a.jsonl", tmp_path / "bare"
    source.write_text(json.dumps({"text": "the dodo " * 20}), encoding="utf-8")
    shutil.copytree(models.base, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    shards = []
    for name, model in (("whole", models.base), ("bare", bare)):
        assert run("prepare-data", source, "-o", tmp_path / f"{name}.safetensors", "--model", model).exit_code == 0
        shards.append((tmp_path / f"{name}.safetensors").read_bytes())
    assert shards[0] == shards[1]
    (bare / "tokenizer.json").write_text("no tokenizer")
    refused = run("prepare-data", source, "-o", tmp_path / "b.safetensors", "--model", bare)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1)
    assert "could not load a tokenizer from" in refused.stderr


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_progress_off_a_terminal_is_a_line_every_half_minute(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.counter("item") as progress:
        for done in range(1, 101):
            now[0] += 1
            progress(done, 100)
    with terminal.counter("documents") as progress:
        now[0] += 40
        progress(7, 0)
    shown = capsys.readouterr().err
    assert "\r" not in shown
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines] == ["30%", "60%", "90%", "7documents"] and "30/100" in lines[0]
