"""Laws of `dodo evaluate`."""

import json
from pathlib import Path

import pytest

from dodo import Dodo
from dodo.errors import InputError
from dodo.memory import MemoryTokens
from tests.cli.tiny import TEXT


@pytest.fixture
def questions(tmp_path):
    rows = [{"id": f"q{i}", "context": TEXT[i:], "question": f"What is {i}?", "answers": ["no such answer"]} for i in range(5)]
    path = tmp_path / "squad.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": TEXT[i:] * 4}) for i in range(3)), encoding="utf-8")
    return path


def test_a_record_says_what_was_measured_and_how(run, models, questions, tmp_path):
    out = tmp_path / "results" / "squad.json"
    flags = ("--ratio", "3", "--batch", "2", "--examples", "2", "--limit", "4", "--out", out, "--json", "--model", models.base)
    shown = json.loads(run("evaluate", "squad", "--data", questions, *flags).stdout)
    record = json.loads(out.read_text())
    assert shown["measured"] == record["measured"]
    found = record["measured"]["all"]
    assert (found["n"], found["accuracy"]) == (4, 0.0)
    assert 2 < found["ratio"] < 3  # the kept first token is held too
    assert {"commit", "command", "settings", "versions", "hardware", "seconds", "peak memory, bytes", "examples"} <= set(record)
    assert record["config"]["encoder"]["rank"] > 0
    assert found["bytes each"] > 0
    assert record["peak memory, bytes"] is None or record["peak memory, bytes"] > 2**20
    assert record["settings"]["ratio"] == 3.0
    assert record["settings"]["model"] == Path(models.base).name
    assert len(record["examples"]) == 2
    assert not list(out.parent.glob("*.part*"))


def test_a_record_names_the_commit_that_it_began_with(run, models, questions, tmp_path, monkeypatch):
    from dodo.evaluation.tasks import Squad

    work, now = Squad.run, ["before"]

    def committing(self, method, batch):
        now[0] = "after"
        return work(self, method, batch)

    monkeypatch.setattr(Squad, "run", committing)
    monkeypatch.setattr("dodo.evaluation.run.commit", lambda: now[0])
    run("evaluate", "squad", "--data", questions, "--ratio", "3", "--model", models.base, "--out", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["commit"] == "before"


def test_an_interrupted_one_goes_on_to_the_same_record(run, models, questions, tmp_path, monkeypatch):
    from dodo.evaluation.tasks import Squad

    flags = ("--ratio", "3", "--batch", "2", "--model", models.base)
    run("evaluate", "squad", "--data", questions, *flags, "--out", tmp_path / "whole.json")
    work, calls = Squad.run, []

    def dying(self, method, batch):
        calls.append(len(batch))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return work(self, method, batch)

    monkeypatch.setattr(Squad, "run", dying)
    assert run("evaluate", "squad", "--data", questions, *flags, "--out", tmp_path / "parts.json").exit_code == 130
    lines = [json.loads(line) for line in (tmp_path / "parts.part.jsonl").read_text().splitlines()]
    lines[-1]["peak"] = 10**15  # as if the stopped one had held more
    (tmp_path / "parts.part.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = run("evaluate", "squad", "--data", questions, *flags, "--seed", "1", "--out", tmp_path / "parts.json")
    assert "other settings" in other.stderr
    run("evaluate", "squad", "--data", questions, *flags, "--out", tmp_path / "parts.json")
    assert calls == [2, 2, 2, 1]  # the first two are not done again
    whole, parts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "parts"))
    assert whole["measured"] == parts["measured"]
    assert parts["peak memory, bytes"] == 10**15


def test_what_was_cut_off_while_it_was_written_is_done_again_and_what_follows_is_kept(
    run, models, questions, tmp_path, monkeypatch
):
    from dodo.evaluation.tasks import Squad

    flags = ("--ratio", "3", "--batch", "1", "--model", models.base, "--out", tmp_path / "parts.json")
    work, calls = Squad.run, []

    def dying(self, method, batch):
        calls.append(batch[0].key)
        if len(calls) in (3, 6):
            raise KeyboardInterrupt
        return work(self, method, batch)

    monkeypatch.setattr(Squad, "run", dying)
    part = tmp_path / "parts.part.jsonl"
    assert run("evaluate", "squad", "--data", questions, *flags).exit_code == 130
    part.write_bytes(part.read_bytes()[:-9])  # the second of two
    assert run("evaluate", "squad", "--data", questions, *flags).exit_code == 130  # two more
    assert run("evaluate", "squad", "--data", questions, *flags).exit_code == 0
    done = [key for i, key in enumerate(calls) if i not in (2, 5)]
    assert sorted(done) == sorted([*(f"q{i}" for i in range(5)), calls[1]])  # only what was cut off is done twice
    part.write_text("{}\n{oops\n", encoding="utf-8")
    assert f"{part} is damaged; delete it" in run("evaluate", "squad", "--data", questions, *flags).stderr
    part.write_text('{"task": "squ', encoding="utf-8")
    assert run("evaluate", "squad", "--data", questions, *flags).exit_code == 0  # nothing had been done
    assert not part.exists()


def test_a_text_that_does_not_fit_the_window_is_named_before_any_work(run, models, questions, tmp_path):
    row = {"id": "long", "context": TEXT * 4, "question": "What?", "answers": ["dodo"]}
    more = {"id": "longer", "context": TEXT * 3, "question": "What?", "answers": ["dodo"]}
    with questions.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(row)}\n{json.dumps(more)}")
    flags = ("--method", "full", "--batch", "3", "--model", models.base, "--out", tmp_path / "x.json")
    result = run("evaluate", "squad", "--data", questions, *flags)
    assert result.exit_code == 1
    assert "item 'long' can't be measured: full needs" in result.stderr and "take it out of the data" in result.stderr
    assert not list(tmp_path.glob("x*"))


def test_records_without_items_and_ids_that_are_not_unique_are_refused(run, models, tmp_path):
    (tmp_path / "none.jsonl").write_text("", encoding="utf-8")
    row = json.dumps({"id": "a", "context": TEXT, "question": "What?", "answers": ["dodo"]})
    (tmp_path / "two.jsonl").write_text(f"{row}\n{row}", encoding="utf-8")
    flags = ("--model", models.base, "--out", tmp_path / "x.json")
    for task in ("squad", "summarization", "highlight"):
        said = run("evaluate", task, "--data", tmp_path / "none.jsonl", *flags).stderr
        assert f"there is nothing to measure in {tmp_path / 'none.jsonl'}" in said
    assert "two records have the id 'a'" in run("evaluate", "squad", "--data", tmp_path / "two.jsonl", *flags).stderr
    assert not (tmp_path / "x.json").exists()


def test_a_records_own_name_tells_task_data_model_method_and_ratio(run, models, questions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path(models.base).name
    assert run("evaluate", "squad", "--data", questions, "--ratio", "3", "--model", models.base).exit_code == 0
    assert run("evaluate", "squad", "--data", questions, "--method", "nodoc", "--model", models.base).exit_code == 0
    assert {path.name for path in Path("results").iterdir()} == {
        f"squad-squad-{name}-dodo-r3.json",
        f"squad-squad-{name}-nodoc.json",
    }


def test_a_record_of_another_question_is_not_replaced_unasked(run, models, questions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ("evaluate", "squad", "--data", questions, "--ratio", "3", "--model", models.base)
    assert run(*flags, "--limit", "2").exit_code == 0
    (path,) = (tmp_path / "results").glob("*.json")
    assert run(*flags, "--limit", "2").exit_code == 0  # the same again
    before = path.read_bytes()
    refused = run(*flags, "--limit", "3")
    assert refused.exit_code == 1
    assert "limit 2, not 3" in refused.stderr and "--out" in refused.stderr
    other = run(*flags, "--limit", "2", "--dtype", "bfloat16")
    assert other.exit_code == 1 and "dtype float32, not bfloat16" in other.stderr
    assert path.read_bytes() == before
    assert run(*flags, "--limit", "3", "--out", path).exit_code == 0


def test_texts_are_rebuilt_by_length(run, models, texts, tmp_path):
    flags = ("--ratio", "2", "--length", "64", "--limit", "2", "--out", tmp_path / "ae.json", "--json", "--model", models.base)
    result = run("evaluate", "autoencoding", "--data", texts, *flags)
    measured = json.loads(result.stdout or result.stderr)["measured"]
    assert "64 tokens" in measured
    assert measured["64 tokens"]["n"] == 2
    assert 0 <= measured["64 tokens"]["bleu"] < 100


@pytest.fixture(scope="module")
def memory_adapters(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("icae")
    dodo = Dodo.from_pretrained(models.trained)
    dodo.compressor.memory = MemoryTokens.fresh(dodo.compressor.base, 128, fixed=False)
    dodo.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("task", ["autoencoding", "multilingual", "squad", "summarization"])
def test_icae_is_measured_by_its_memory_slots(run, memory_adapters, tmp_path, task):
    data, out = tmp_path / "en.jsonl", tmp_path / "icae.json"
    record = {"text": TEXT[:60], "context": TEXT[:60], "article": TEXT[:60], "highlights": "A bird."}
    data.write_text(json.dumps(record | {"question": "What?", "answers": ["bird"]}), encoding="utf-8")
    length = ("--length", "16") if task == "autoencoding" else ()
    flags = ("--method", "icae", "--ratio", "3", *length, "--data", data, "--out", out, "--model", memory_adapters)
    assert run("evaluate", task, *flags).exit_code == 0
    (found,) = json.loads(out.read_text())["measured"].values()
    tokens = found["tokens each"] - 1  # without the first one
    assert found["states each"] == -(-tokens // 3)
    assert found["n"] == 1


def test_adapters_without_memory_tokens_are_refused(run, models, texts):
    result = run("evaluate", "autoencoding", "--method", "icae", "--data", texts, "--model", models.trained)
    assert result.exit_code == 1
    assert "have no memory tokens" in result.stderr
    assert "recipes/smollm2-135m-icae.yaml trains a set" in result.stderr


def test_every_name_of_a_task_or_method_has_what_it_names():
    from dodo.evaluation.endless import READERS
    from dodo.evaluation.language_models import LANGUAGE_MODELS
    from dodo.evaluation.methods import METHODS
    from dodo.evaluation.names import METHODS_OF, PEERS, WITHOUT_RATIO
    from dodo.evaluation.tasks import TASKS

    assert set(METHODS_OF) == {*TASKS, "highlight", "optimal-selection", "efficiency", "perplexity", "endless"}
    assert set(METHODS_OF["endless"]) == set(READERS)
    assert set(METHODS_OF["squad"]) == {*METHODS, *PEERS}
    assert all(set(METHODS_OF[task]) <= {*METHODS, *PEERS} for task in TASKS)
    assert set(METHODS_OF["perplexity"]) == set(LANGUAGE_MODELS)
    assert {name for names in METHODS_OF.values() for name in names} >= set(WITHOUT_RATIO)


@pytest.mark.parametrize("method", ["top-k", "compressive", "full"])
def test_perplexity_at_each_number_of_states(run, models, texts, tmp_path, method):
    flags = ("--states", "8", "--states", "4", "--segment", "8", "--ratio", "3", "--limit", "90", "--batch", "16")
    out = tmp_path / "ppl.json"
    result = run("evaluate", "perplexity", "--data", texts, "--method", method, *flags, "--out", out, "--model", models.trained)
    assert "8 states" in result.stdout
    record = json.loads(out.read_text())
    assert list(record["measured"]) == ["8 states", "4 states"]
    assert (record["settings"]["states"], record["settings"]["segment"]) == ([8, 4], 8)
    assert record["settings"]["ratio"] == (None if method == "full" else 3)
    for states in (8, 4):
        found = record["measured"][f"{states} states"]
        assert found["states each"] == states + 1
        assert 90 <= found["subwords, all"] < 98
        assert found["subwords"] < found["subwords, all"]
        assert found["subword perplexity"] > 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("perplexity", "--states", "7"), "--states 7: a share of 0.5 of them is no whole number"),
        (("perplexity", "--states", "64", "--whole", "0.9"), "--states 64: a share of 0.9 of them is no whole number"),
        (("perplexity", "--method", "theta", "--whole", "0.75"), "--whole 0.75: all states of theta are whole tokens"),
        (("perplexity", "--whole", "1"), "--whole"),
        (("squad", "--whole", "0.5"), "--whole 0.5: has no effect in squad"),
        (("perplexity", "--states", "0"), "--states"),
        (("perplexity", "--method", "nodoc"), "--method nodoc: can't do perplexity; its methods are dodo, threshold"),
        (("squad", "--method", "compressive"), "--method compressive: can't do squad"),
        (("autoencoding", "--method", "kvpress-knorm"), "--method kvpress-knorm: can't do autoencoding; its methods are dodo"),
        (("squad", "--peers-python", "python"), "--peers-python python: has no effect on dodo"),
        (("squad", "--states", "8"), "--states 8: has no effect in squad"),
        (("autoencoding", "--segment", "8"), "--segment 8: has no effect in autoencoding"),
        (("perplexity", "--length", "8"), "--length 8: has no effect in perplexity"),
        (("squad", "--method", "full", "--ratio", "5"), "--ratio 5: full does not compress; leave it out"),
        (("endless", "--method", "window", "--ratio", "5"), "--ratio 5: window does not compress; leave it out"),
        (("summarization", "--length", "8"), "--length 8: has no effect in summarization"),
        (("endless", "--segment", "8"), "--segment 8: has no effect in endless"),
        (("endless", "--states", "8", "--states", "10"), "--states 10: endless takes one number of states"),
        (("perplexity", "--examples", "1"), "--examples 1: has no effect in perplexity"),
        (("perplexity", "--ratio", "2.5"), "--ratio 2.5: perplexity needs a whole number"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_a_model_is_loaded(run, no_model, texts, flags, message):
    result = run("evaluate", *flags, "--data", texts)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_peer_without_its_environment_is_refused_before_a_model_is_loaded(run, no_model, questions, tmp_path):
    flags = ("--data", questions, "--method", "llmlingua", "--peers-python", tmp_path / "none")
    assert "make peers sets it up" in run("evaluate", "squad", *flags).stderr


def test_adapters_without_thresholds_and_a_short_window_are_refused(run, models, texts, tmp_path):
    flags = ("--data", texts, "--model", models.trained, "--out", tmp_path / "x.json")
    assert "dodo calibrate" in run("evaluate", "perplexity", "--states", "8", *flags).stderr
    assert "room for 512" in run("evaluate", "perplexity", "--method", "full", "--states", "256", *flags).stderr
    assert not (tmp_path / "x.json").exists()


def test_data_of_another_task_is_refused_by_name(run, models, texts, questions, tmp_path):
    flags = ("--out", tmp_path / "x.json", "--model", models.base)
    assert "no field 'answers'" in run("evaluate", "squad", "--data", texts, *flags).stderr
    assert "no text field 'text'" in run("evaluate", "autoencoding", "--data", questions, *flags).stderr
    assert "can't do autoencoding" in run("evaluate", "autoencoding", "--data", texts, "--method", "full", *flags).stderr
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("squad", "smollm2-135m"),
        ("perplexity", "smollm2-135m-autoregressive"),
        ("endless", "smollm2-135m-autoregressive"),
    ],
)
def test_each_task_takes_the_adapters_that_were_trained_for_it(task, model, run, texts, monkeypatch):
    asked: list[str] = []

    def load(loading):
        asked.append(loading.model)
        raise InputError("no more is wanted")

    monkeypatch.setattr("dodo.cli.evaluate.load_model", load)
    run("evaluate", task, "--data", texts)
    run("evaluate", task, "--data", texts, "--model", "mine")
    assert asked == [model, "mine"]
