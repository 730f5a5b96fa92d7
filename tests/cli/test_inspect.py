"""Laws of `dodo inspect`; what is drawn is tested in test_inspection.py."""

import json
import os
import re
import sys

import pytest

from tests.cli.tiny import TEXT


def test_without_colours_removing_the_brackets_gives_the_text_back(run, document, models):
    result = run("inspect", document, "--ratio", "5", "--model", models.base)
    shown = result.stdout.removesuffix("\n")
    assert shown.replace("<s>", "").replace("↵", "").replace("[", "").replace("]", "") == TEXT
    assert "note: adapters are fresh (untrained)" in result.stderr


def test_the_number_of_brackets_is_the_number_of_states_where_no_character_is_split(run, tmp_path, models):
    path = tmp_path / "ascii.txt"
    path.write_text("The dodo was a flightless bird of Mauritius.")
    flags = ("--nuggets", "4", "--model", models.base)
    assert run("inspect", path, *flags).stdout.count("[") == 5
    assert json.loads(run("inspect", path, *flags, "--json").stdout)["states"] == 5


def test_colour_is_forced_by_force_color_and_stopped_by_no_color(run, document, models, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = run("inspect", document, "--model", models.base).stdout
    assert "48;2;153;255;153" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).replace("<s>", "").replace("↵", "").removesuffix("\n") == TEXT
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("inspect", document, "--model", models.base).stdout


def test_json_has_text_score_and_selection_of_every_token(run, document, models):
    report = json.loads(run("inspect", document, "--ratio", "5", "--json", "--model", models.base).stdout)
    assert len(report["tokens"]) == report["n"] + 1
    assert sum(token["selected"] for token in report["tokens"]) == report["states"] == report["k"] + 1
    assert report["adapters"] == "fresh"
    for token in report["tokens"]:
        assert token["text"] == TEXT[token["start"] : token["end"]]
        assert isinstance(token["score"], float)


def test_page_and_picture_are_written_and_their_names_printed(run, document, models, tmp_path):
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    result = run("inspect", document, "--html", page, "--png", picture, "--model", models.base)
    assert result.stdout == f"{page}\n{picture}\n"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flag", ["--html", "--png"])
def test_output_that_exists_is_refused_without_force(flag, run, document, models, tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.write_text("mine")
    result = run("inspect", document, flag, path)
    assert result.exit_code == 2
    assert f"{flag} {path}: exists already" in result.stderr
    assert path.read_text() == "mine"
    assert run("inspect", document, flag, path, "--force", "--model", models.base).exit_code == 0


def test_output_is_never_the_input(run, document, no_model):
    result = run("inspect", document, "--html", document, "--force")
    assert result.exit_code == 2
    assert "is the input itself" in result.stderr


def test_full_disk_leaves_nothing_half_written(run, document, models, tmp_path, monkeypatch):
    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.html"
    monkeypatch.setattr("os.replace", full)
    result = run("inspect", document, "--html", path, "--model", models.base)
    assert result.exit_code == 1
    assert f"could not write {path}: No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == [document]


def test_missing_file_is_named(run, tmp_path, no_model):
    assert "there is no such file" in run("inspect", tmp_path / "none.txt").stderr


def test_escape_sequences_of_the_text_do_not_reach_the_terminal(run, models):
    shown = run("inspect", "-", "--model", models.base, stdin="a\x1b[31mb").stdout
    assert "\x1b" not in shown
    assert "␛" in shown


def test_a_page_and_a_picture_do_not_go_to_one_file(run, document, tmp_path, no_model):
    result = run("inspect", document, "--html", tmp_path / "x", "--png", tmp_path / "x")
    assert result.exit_code == 2
    assert "choose another name" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="such names can't be")
def test_a_name_that_is_no_text_is_shown_as_far_as_it_is(run, models, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    document = tmp_path / os.fsdecode(b"caf\xe9" + b"x" * 200 + b".txt")
    document.write_text(TEXT, encoding="utf-8")
    page, picture = tmp_path / "a.html", tmp_path / "a.png"
    result = run("inspect", document, "--html", page, "--png", picture, "--model", models.base)
    assert result.exit_code == 0
    assert "caf\ufffdx" in page.read_text(encoding="utf-8")
    assert picture.stat().st_size > 0


def test_without_matplotlib_no_page_is_written_either(run, document, tmp_path, no_model, monkeypatch):
    monkeypatch.setattr("dodo.inspection_png.find_spec", lambda name: None)
    result = run("inspect", document, "--html", tmp_path / "a.html", "--png", tmp_path / "a.png")
    assert result.exit_code == 1
    assert "a picture needs matplotlib" in result.stderr
    assert list(tmp_path.iterdir()) == [document]
