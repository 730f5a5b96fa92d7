"""Laws of `dodo calibrate`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dodo.adapter_files import SHIPPED
from dodo.model import Dodo
from dodo.thresholds import RATIOS, Thresholds
from tests.cli.tiny import TEXT


def texts(start: int, count: int) -> list[str]:
    return [f"{TEXT[i % 200 : i % 200 + 90]} {i}" for i in range(start, start + count)]


def write(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus.jsonl", texts(0, 30))


@pytest.fixture
def adapters(models, tmp_path):
    return Path(shutil.copytree(models.trained, tmp_path / "mine"))


def test_the_printed_ratio_is_the_hand_computed_one_of_the_checked_texts(run, adapters, corpus, tmp_path):
    others = texts(1000, 5)
    check = write(tmp_path / "check.jsonl", others)
    shown = json.loads(run("calibrate", corpus, "--check", check, "--model", adapters, "--json").stdout)
    dodo = Dodo.from_pretrained(adapters)
    scores = []
    for text in others:
        scores += dodo.autoregressive(ratio=1).sampled_scores([dodo.document_ids(text)]).tolist()
    assert shown["checked"] == {"texts": 5, "tokens": len(scores)}
    assert [row["ratio"] for row in shown["ratios"]] == list(RATIOS)
    for row in shown["ratios"]:
        kept = sum(score > row["threshold"] for score in scores)
        assert row["realised"] == (len(scores) / kept if kept else None)
        assert row["error"] == (pytest.approx(len(scores) / kept / row["ratio"] - 1) if kept else None)
    far = [r["ratio"] for r in shown["ratios"] if 2 <= r["ratio"] <= 20 and (r["error"] is None or abs(r["error"]) > 0.1)]
    assert shown["off"] == far


def test_ratios_that_are_far_off_are_pointed_out_on_stderr(run, adapters, corpus, tmp_path):
    check = write(tmp_path / "check.jsonl", ["Dodo."])  # a handful of tokens can't be kept one in 20
    result = run("calibrate", corpus, "--check", check, "--model", adapters, "--ratio", "20", "--ratio", "40")
    assert (
        "note: of 2 to 20, off by more than 10% on them: ratio 20; more --tokens help, or texts more like them\n" in result.stderr
    )
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ratio", "20", "40"]


def test_generate_takes_the_thresholds_that_were_written_beside_the_adapters(run, adapters, corpus):
    refused = run("generate", "--prompt", "The dodo", "--ratio", "10", "--model", adapters)
    assert refused.exit_code == 2
    assert f"dodo calibrate CORPUS --model {adapters}" in refused.stderr
    before = sorted(path for path in adapters.rglob("*") if path.is_file())
    assert run("calibrate", corpus, "--model", adapters).exit_code == 0
    assert sorted(path for path in adapters.rglob("*") if path.is_file()) == sorted([*before, adapters / "thresholds.json"])
    made = json.loads(
        run("generate", "--prompt", "The dodo", "--ratio", "10", "--max-new-tokens", "4", "--model", adapters, "--json").stdout
    )
    assert made["threshold"] == Thresholds.load(adapters / "thresholds.json").at(10)


def test_texts_are_held_out_whole_and_none_is_in_both(run, models, corpus, tmp_path, monkeypatch):
    seen: list[list[list[int]]] = []
    from dodo.autoregressive import Autoregressive

    scored = Autoregressive.sampled_scores

    def spy(self, rows):
        seen.append([list(row) for row in rows])
        return scored(self, seen[-1])

    monkeypatch.setattr(Autoregressive, "sampled_scores", spy)
    with corpus.open("a") as file:  # a text that is there twice
        file.write("\n" + json.dumps({"text": texts(0, 1)[0]}))
    out = tmp_path / "out"
    result = run("calibrate", corpus, "--held-out", "0.3", "--model", models.trained, "--out", out, "--json")
    sampled, tried = seen
    assert (len(sampled), len(tried)) == (21, 9)
    assert not {tuple(row) for row in sampled} & {tuple(row) for row in tried}
    shown = json.loads(result.stdout)
    assert shown["sampled"] == {"texts": 21, "tokens": sum(len(row) - 1 for row in sampled)}  # the kept first ones left out
    assert "fewer than 100,000" in result.stderr


def test_tokens_bound_what_is_sampled_and_the_seed_draws_it(run, models, corpus, tmp_path):
    def sampled(name, *flags):
        run("calibrate", corpus, "--tokens", "300", "--model", models.trained, "--out", tmp_path / name, *flags)
        return Thresholds.load(tmp_path / name / "thresholds.json")

    first, again, other = sampled("a"), sampled("b"), sampled("c", "--seed", "1")
    assert 280 < first.tokens < 300
    assert first == again
    assert first.values != other.values


def test_no_text_gives_more_than_a_stretch_where_there_are_texts_enough(models, monkeypatch):
    from dodo.evaluation import calibration

    monkeypatch.setattr(calibration, "STRETCH", 10)
    dodo = Dodo.from_pretrained(models.trained)
    rows = calibration._sample(dodo, texts(0, 30), 100, np.random.default_rng(0))
    assert list(map(len, rows)) == [10] * 10
    whole = [dodo.document_ids(text) for text in texts(0, 10)]
    for row, ids in zip(rows, whole, strict=True):
        assert row in [ids[i : i + 10] for i in range(len(ids))]
    assert {row[0] for row in rows} != {whole[0][0]}
    assert list(map(len, calibration._sample(dodo, texts(0, 3), 100, np.random.default_rng(0)))) == [34, 34, 32]


def test_out_gets_whole_adapters_with_thresholds(run, models, corpus, tmp_path):
    out = tmp_path / "out"
    run("calibrate", corpus, "--model", models.trained, "--out", out)
    for path in Path(models.trained).rglob("*.*"):
        assert (out / path.relative_to(models.trained)).read_bytes() == path.read_bytes()
    assert not (Path(models.trained) / "thresholds.json").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert Dodo.from_pretrained(out).thresholds == Thresholds.load(out / "thresholds.json")
    run("calibrate", corpus, "--model", models.base, "--out", tmp_path / "fresh")
    assert Dodo.from_pretrained(tmp_path / "fresh").thresholds is not None


def test_what_is_there_is_not_overwritten(run, adapters, corpus, tmp_path, no_model):
    (adapters / "thresholds.json").write_text("mine")
    result = run("calibrate", corpus, "--model", adapters)
    assert result.exit_code == 2
    assert "--force" in result.stderr
    full = tmp_path / "full"
    full.mkdir()
    (full / "a").write_text("mine")
    for flags in ((), ("--force",)):
        result = run("calibrate", corpus, "--model", adapters, "--out", full, *flags)
        assert result.exit_code == 2
        assert "exists already" in result.stderr
    assert (adapters / "thresholds.json").read_text() == (full / "a").read_text() == "mine"


def test_force_replaces_thresholds(run, adapters, corpus):
    run("calibrate", corpus, "--model", adapters)
    first = (adapters / "thresholds.json").read_text()
    run("calibrate", corpus, "--model", adapters, "--force", "--seed", "3")
    assert (adapters / "thresholds.json").read_text() != first


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--held-out", "0"), "--held-out"),
        (("--held-out", "1"), "--held-out"),
        (("--held-out", "0.5", "--check", "x.jsonl"), "not both"),
        (("--tokens", "0"), "--tokens"),
        (("--ratio", "1"), "--ratio 1: keeps all"),
        (("--ratio", "50"), "1.5 to 40"),
        (("--ratio", "no"), "--ratio"),
        (("--out", "none/there"), "there is no folder none"),
    ],
)
def test_flags_out_of_range_are_usage_errors(flags, says, run, adapters, corpus, no_model):
    result = run("calibrate", corpus, "--model", adapters, *flags)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("model", ["base", "smollm2-135m", str(SHIPPED / "smollm2-135m" / "nothing")])
def test_models_that_are_no_folder_of_adapters_need_out(model, run, models, corpus, no_model):
    result = run("calibrate", corpus, "--model", models.base if model == "base" else model)
    assert result.exit_code == 2
    assert "--out: is needed" in result.stderr


def test_a_corpus_that_will_not_do_is_one_clear_error_and_leaves_no_thresholds(run, adapters, tmp_path):
    def fails(*rows):
        path = tmp_path / "bad.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        result = run("calibrate", path, "--model", adapters)
        assert result.exit_code == 1
        assert not (adapters / "thresholds.json").exists()
        return result.stderr

    assert "two texts or more" in fails({"text": TEXT})
    assert "two texts or more" in fails({"text": TEXT}, {"text": TEXT}, {"text": " "})
    assert "too few to estimate" in fails({"text": "a b"}, {"text": "a c"})
    assert "bad.jsonl, record 2: a record has no text field 'text'" in fails({"text": TEXT}, {"context": TEXT})
    missing = run("calibrate", tmp_path / "none.jsonl", "--model", adapters)
    assert missing.exit_code == 1
    assert "no data file matches" in missing.stderr
    assert run("calibrate", "--model", adapters).exit_code == 2


def test_long_texts_give_more_where_short_ones_are_few(run, adapters, tmp_path):
    """As many tokens as asked for, if there are as many."""
    corpus = write(tmp_path / "corpus.jsonl", ["Dodos ran.", TEXT * 20])
    check = write(tmp_path / "check.jsonl", texts(0, 2))
    result = run("calibrate", corpus, "--check", check, "--tokens", "3000", "--model", adapters)
    assert "2,998 tokens of 2 texts sampled" in result.stderr  # their first ones have no scores
    assert "fewer than" not in result.stderr
