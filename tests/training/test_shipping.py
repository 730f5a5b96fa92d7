"""Finished runs become a set of adapters that ships: recipes/ship.py, recipes/average.py."""

import csv
import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import dodo.adapter_files
from dodo.model import Dodo
from dodo.training.recipe import load_recipe
from dodo.training.run import train
from tests.training.test_training import recipe_file  # noqa: F401

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that ships nothing yet."""
    folder = tmp_path / "package" / "weights"
    folder.mkdir(parents=True)
    monkeypatch.setattr(dodo.adapter_files, "SHIPPED", folder)
    return folder / "tiny"


def ship(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["ship.py", *map(str, arguments), "--alias", "tiny", "--hardware", "an abacus"])
    runpy.run_path(str(RECIPES / "ship.py"), run_name="__main__")


def average(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["average.py", *map(str, arguments)])
    runpy.run_path(str(RECIPES / "average.py"), run_name="__main__")


def test_a_set_goes_on_with_its_log_and_recipes(recipe_file, tmp_path, shipped, monkeypatch, capsys):  # noqa: F811
    first, second = tmp_path / "runs" / "first", tmp_path / "runs" / "second"
    train(load_recipe(recipe_file, ["running.steps=4"]), first, progress=False)
    ship(monkeypatch, first)
    before = Dodo.from_pretrained(str(shipped)).fingerprint.adapter
    train(load_recipe(recipe_file, ["running.steps=2", f"start={shipped}"]), second, progress=False)
    ship(monkeypatch, second, "--after", shipped)

    after = Dodo.from_pretrained(str(shipped)).fingerprint.adapter
    assert after == Dodo.from_pretrained(str(second / "last")).fingerprint.adapter != before
    assert f"adapter {after}" in capsys.readouterr().out
    assert {path.name for path in shipped.glob("recipe*")} == {"recipe-first.yaml", "recipe-second.yaml"}
    with open(shipped / "training.csv", encoding="utf-8") as file:
        tokens = {row["run"]: float(row["value"]) for row in csv.DictReader(file) if row["name"] == "tokens"}
    card = (shipped / "README.md").read_text(encoding="utf-8")
    for name, steps in (("first", 4), ("second", 2)):
        assert f"| {name} | {steps} | {steps} | {tokens[name]:,.0f} |" in card
    assert "trained on an abacus" in card
    curve = card.split("## Curve")[1]
    assert "| first | 4 |" in curve
    assert "| second | 2 |" in curve


def test_what_must_not_ship_does_not(recipe_file, tmp_path, shipped, monkeypatch):  # noqa: F811
    run = tmp_path / "runs" / "run"
    train(load_recipe(recipe_file, ["running.steps=2"]), run, progress=False)
    record = {"name": "squad", "settings": {"adapter fingerprint": "another", "method": "dodo"}, "measured": {}}
    (tmp_path / "squad.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(SystemExit, match="squad was measured with adapters another, not "):
        ship(monkeypatch, run, "--results", tmp_path / "*.json")
    with pytest.raises(SystemExit, match="name the runs"):
        ship(monkeypatch)
    other = shipped.parent / "other"
    other.mkdir()
    (other / "large").write_bytes(b"\0" * 25_000_000)
    with pytest.raises(SystemExit, match="bytes in all are more than the 25,000,000 that may ship"):
        ship(monkeypatch, run)
    assert not shipped.exists()
    assert [path.name for path in shipped.parent.parent.iterdir()] == ["weights"]  # no scratch is left


def test_the_card_says_where_selection_was_changed_after_training(recipe_file, tmp_path, shipped, monkeypatch):  # noqa: F811
    run = tmp_path / "runs" / "run"
    train(load_recipe(recipe_file, ["running.steps=2", "config.selection=coverage"]), run, progress=False)
    ship(monkeypatch, run)
    assert "- selection: coverage; positions" in (shipped / "README.md").read_text(encoding="utf-8")
    path = shipped / "dodo_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"runs": True}), encoding="utf-8")
    ship(monkeypatch, "--after", shipped)
    card = (shipped / "README.md").read_text(encoding="utf-8")
    assert "- selection: coverage, for the text by runs (set after training); positions" in card
    train(load_recipe(recipe_file, ["running.steps=2", "config.selection=coverage", "config.runs=true"]), run.with_name("next"))
    ship(monkeypatch, run.with_name("next"))
    assert "- selection: coverage, for the text by runs; positions" in (shipped / "README.md").read_text(encoding="utf-8")


def test_what_parts_came_to_is_averaged_and_ships(recipe_file, tmp_path, shipped, monkeypatch):  # noqa: F811
    first, second = tmp_path / "first", tmp_path / "second"
    train(load_recipe(recipe_file, ["running.steps=2"]), first, progress=False)
    train(load_recipe(recipe_file, ["running.steps=2", f"start={first / 'last'}", "running.seed=5"]), second, progress=False)
    out = tmp_path / "average" / "last"
    average(monkeypatch, f"{first / 'last'}=1", f"{second / 'last'}=3", "--out", out)

    for file in ("phi/adapter_model.safetensors", "theta/adapter_model.safetensors"):
        a, b, mean = (load_file(folder / file) for folder in (first / "last", second / "last", out))
        assert any(not a[name].equal(b[name]) for name in a)
        for name in mean:
            assert mean[name].dtype == a[name].dtype
            assert mean[name].equal((0.25 * a[name].float() + 0.75 * b[name].float()).to(a[name].dtype))
    scorer = "scorer.safetensors"
    assert (out / scorer).read_bytes() == (second / "last" / scorer).read_bytes() != (first / "last" / scorer).read_bytes()

    again = tmp_path / "again"
    average(monkeypatch, first / "last", out, "--out", again)  # an average counts as what it was made of
    assert {part["set"]: part["share"] for part in json.loads((again / "average.json").read_text(encoding="utf-8"))} == {
        str(first / "last"): 0.625,
        str(second / "last"): 0.375,
    }
    twice = tmp_path / "twice"
    average(monkeypatch, second / "last", again, first / "last", "--out", twice)  # and what is named last stands last
    assert json.loads((twice / "average.json").read_text(encoding="utf-8"))[-1]["set"] == str(first / "last")
    assert (twice / scorer).read_bytes() == (first / "last" / scorer).read_bytes()

    path = out / "dodo_config.json"  # of the second part, which had not learned with it; the last recipe would say that it had
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"selection": "coverage", "runs": True}), encoding="utf-8"
    )
    for given in ([first, second, "--adapters", out], ["--after", shipped]):  # the card written anew still tells it
        ship(monkeypatch, *given)
        card = (shipped / "README.md").read_text(encoding="utf-8")
        assert f"python recipes/average.py {first / 'last'}=0.25 {second / 'last'}=0.75 --out runs/average/last" in card
        assert "the average of what 2 parts came to" in card
        assert "for the text by runs (set after training)" in card
    assert Dodo.from_pretrained(str(shipped)).fingerprint == Dodo.from_pretrained(str(out)).fingerprint


def test_sets_that_have_no_average_are_refused(recipe_file, tmp_path, monkeypatch):  # noqa: F811
    run, other, apart, out = (tmp_path / name for name in ("run", "other", "apart", "out"))
    train(load_recipe(recipe_file, ["running.steps=2"]), run, progress=False)
    train(load_recipe(recipe_file, ["running.steps=2", "config.decoder.rank=3"]), other, progress=False)
    train(load_recipe(recipe_file, ["running.steps=2", "config.seed=7"]), apart, progress=False)
    refused = {
        "not a number": [f"{run / 'last'}=much"],
        "positive": [f"{run / 'last'}=-1"],
        "named once": [run / "last", f"{run / 'last'}=2"],
        "the sets differ in decoder": [run / "last", other / "last"],
        "no folder of adapters": [run / "last", run],
        "no common start": [run / "last", apart / "last"],
    }
    for message, sets in refused.items():
        with pytest.raises(SystemExit, match=message):
            average(monkeypatch, *sets, "--out", out)
        assert not out.exists()
    with pytest.raises(SystemExit, match="is there already"):
        average(monkeypatch, run / "last", "--out", other)
