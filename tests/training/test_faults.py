"""What can go wrong around a run, and what is left then."""

import dataclasses
import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dodo.data.batches import Batch, Draw, QuestionSource
from dodo.data.shards import Ragged, Shard, prepare, read_shard
from dodo.errors import DodoWarning, InputError
from dodo.model import Dodo
from dodo.training import in_place
from dodo.training.callbacks import Checkpoints, Validation, _forget_later_rows, _forget_later_samples
from dodo.training.in_place import put_in_place, recover
from dodo.training.mixture import BatchMaker
from dodo.training.module import TrainingModule, rate_at
from dodo.training.objectives import batch_loss
from dodo.training.recipe import Mixture, Running, load_recipe
from dodo.training.run import load_for_training, train
from dodo.training.sources import _between_paragraphs, open_sources
from dodo.training.validation import question_batches
from tests.training.test_training import WORDS, _trained, recipe_file  # noqa: F401 (a fixture)

CONSTANT = ["optimizer.shape=constant", "optimizer.warmup=1", "optimizer.period=1"]


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Sixty documents, each longer than the one before."""
    rows = [{"context": "a dodo " * (i + 3), "question": "Who?", "answers": ["the dodo"], "license": "CC0"} for i in range(60)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(tmp_path / "questions.jsonl")


# -- time


def test_a_run_with_little_time_goes_on_where_it_was_by_whole_steps(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    """Also in the middle of what is accumulated: the time is up after the first pass of a step."""
    recipe = load_recipe(recipe_file, [*CONSTANT, "running.steps=3", "running.accumulate=2"])
    whole = train(recipe, tmp_path / "whole", progress=False)
    for step in (1, 2, 3):
        part = train(recipe, tmp_path / "parts", resume=step > 1, max_minutes=1e-9, progress=False)
        assert (part.steps, part.finished) == (step, step == 3)
    assert part.tokens == whole.tokens
    a, b = _trained(tmp_path / "whole"), _trained(tmp_path / "parts")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=0, rtol=0, msg=name)


# -- data


@pytest.mark.parametrize("tokens", [60, 140, 800])
def test_validation_asks_about_so_many_documents_however_long_they_are(tokens: int) -> None:
    def rows(lengths: Any) -> Ragged:
        return Ragged(np.full(sum(lengths), 5, np.uint16), np.cumsum([0, *lengths]))

    each = range(tokens - 40, tokens + 41)
    shard = Shard("question", rows(each), rows([2] * 81), rows([1] * 81), np.arange(81))
    source = QuestionSource(shard, bos=None, eos=2, longest=1000)
    assert source.median == tokens
    for count, expected in ((16, 16), (100, 81)):
        found = question_batches(source, Mixture(), Running(validation_texts=count, validation_ratios=(2.0, 4.0)))
        assert [len(batch.documents) for batch in found.values()] == [expected] * 2


def test_questions_among_other_paragraphs_are_trained_and_validated(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    rows = [{"context": f"The dodo number {i} was a bird.", "question": "Which?", "answers": [str(i)]} for i in range(100, 400)]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({**row, "license": "CC0"}) for row in rows), encoding="utf-8")
    asked = ["mixture.autoencoding=0", "mixture.question=1.0", f"data.questions={path}", "data.validation=[]"]
    validated = ["running.validation_texts=8", "running.validation_ratios=[2.0]"]
    recipe = load_recipe(recipe_file, [*asked, *validated, "mixture.among={low: 10, mode: 60, high: 150}"])
    dodo = load_for_training(recipe)
    _, source, checks = open_sources(recipe, dodo, tmp_path / "data")
    assert source is not None
    alone, long = checks["question/r2"], checks["question/n150/r2"]
    assert len(long.documents) == 2  # a quarter as many
    assert alone.documents.shape[1] < 40
    assert 100 < long.documents.shape[1] <= 150
    assert dodo.tokenizer.decode(long.documents[0].tolist()).count("bird.\n\nThe dodo number") == 3
    make = BatchMaker(recipe, None, source)
    lengths = {make(number).documents.shape[1] for number in range(20)}
    assert min(lengths) < 40 < 90 < max(lengths) <= 150
    assert train(recipe, tmp_path / "run", progress=False).finished
    with pytest.raises(InputError, match=r"need up to 6\d\d positions.*window of 512; lower data.longest and mixture.among"):
        wide = load_recipe(recipe_file, [*asked, "mixture.among={low: 10, mode: 150, high: 600}"])
        open_sources(wide, dodo, tmp_path / "wide")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ({"end.\n\nThe": [5, 6, 9, 9, 7], "end.": [5, 6], "The": [7], "\n\n": [8, 9, 9]}, [9, 9]),  # a stop of its own
        ({"end.\n\nThe": [5, 4, 7], "end.": [5, 6], "The": [7], "\n\n": [3]}, [3]),  # the stop goes into the empty line
    ],
)
def test_an_empty_line_stands_between_paragraphs(pieces: dict[str, list[int]], expected: list[int]) -> None:
    class Tokenizer:
        def __call__(self, text: str, **_: Any) -> Any:
            return SimpleNamespace(input_ids=pieces[text])

        def decode(self, ids: list[int]) -> str:
            return "".join({3: "\n\n", 9: "\n"}.get(token, "?") for token in ids)

    assert _between_paragraphs(Tokenizer()) == expected  # type: ignore[arg-type]


def test_sources_of_one_name_are_not_taken_for_each_other(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    other = tmp_path / "other" / "text.jsonl"
    other.parent.mkdir()
    other.write_text(json.dumps({"text": "other words " * 30, "license": "CC0"}), encoding="utf-8")
    recipe = load_recipe(recipe_file, [f"data.validation=[{other}]"])
    dodo = load_for_training(recipe)
    text, _, checks = open_sources(recipe, dodo, tmp_path / "run")
    (batch,) = checks.values()
    assert text is not None
    assert "other" in dodo.tokenizer.decode(batch.documents[0].tolist())
    assert "other" not in dodo.tokenizer.decode(text.windows(1, 12, np.random.default_rng(0))[0].tolist())


def test_a_run_whose_data_changed_is_not_gone_on_with(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    train(load_recipe(recipe_file, [*CONSTANT, "running.steps=1"]), tmp_path / "run", progress=False)
    text = tmp_path / "text.jsonl"
    text.write_text(text.read_text() + "\n" + json.dumps({"text": "more " * 40, "license": "CC0"}), encoding="utf-8")
    with pytest.raises(InputError, match=r"text.jsonl is not what it was when the run began"):
        train(load_recipe(recipe_file, [*CONSTANT, "running.steps=2"]), tmp_path / "run", resume=True, progress=False)


def test_long_documents_with_questions_are_left_out_as_the_recipe_says_and_counted(
    recipe_file: Path,  # noqa: F811
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["mixture.autoencoding=0", "mixture.question=1.0", f"data.questions={questions}", "data.validation=[]"]
    recipe = load_recipe(recipe_file, [*asked, "data.longest=60"])
    _, source, _ = open_sources(recipe, load_for_training(recipe), tmp_path / "run", progress=True)
    assert source is not None
    assert source.left_out > 0
    assert f"{source.left_out} documents with questions have more than 60 tokens and are left out" in capsys.readouterr().err
    with open(questions, "a", encoding="utf-8") as more:
        more.write("\n" + json.dumps({"context": "a dodo " * 72, "question": "Who?", "answers": ["the dodo"], "license": "CC0"}))
    recipe = load_recipe(recipe_file, [*asked, "data.longest=100000"])
    with pytest.raises(InputError, match=r"need up to [\d,]+ positions.*window of 512; lower data.longest"):
        open_sources(recipe, load_for_training(recipe), tmp_path / "run")


def test_no_document_is_asked_about_much_more_often_than_others(recipe_file: Path, questions: str, tmp_path: Path) -> None:  # noqa: F811
    recipe = load_recipe(recipe_file, ["mixture.autoencoding=0", "mixture.question=1.0", f"data.questions={questions}"])
    dodo = load_for_training(recipe)
    prepare([questions], tmp_path / "q.safetensors", dodo.tokenizer, kind="question")
    source = QuestionSource(read_shard(tmp_path / "q.safetensors", dodo.tokenizer), bos=1, eos=2)
    drawn: list[int] = []
    source.batch = lambda *_, at, **__: drawn.append(at) or _nothing()  # type: ignore[method-assign, assignment, return-value]
    maker = BatchMaker(recipe, None, source)
    for number in range(3000):
        maker(number)
    counts = np.bincount(drawn, minlength=len(source))
    assert counts.min() > 0
    assert counts.max() < 3 * 3000 / len(source)


def test_each_token_of_a_step_counts_alike(recipe_file: Path, questions: str, tmp_path: Path) -> None:  # noqa: F811
    """Answers have few tokens and many: a mean of batches' means would favour the short ones."""
    rows = [
        json.loads(line) | {"answers": ["the dodo" if i % 2 else "dodo"]}
        for i, line in enumerate(Path(questions).read_text().split("\n"))
    ]
    Path(questions).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = ["mixture.autoencoding=0", "mixture.question=1.0", f"data.questions={questions}", "running.accumulate=3"]
    recipe = load_recipe(recipe_file, settings)
    dodo = load_for_training(recipe)
    _, source, _ = open_sources(recipe, dodo, tmp_path / "run")
    maker = BatchMaker(recipe, None, source)
    batches = [maker(number) for number in (3, 4, 5)]
    counts = [batch.loss_tokens for batch in batches]
    assert len(set(counts)) > 1
    assert [batch.divisor for batch in batches] == [sum(counts) / 3] * 3
    losses = [batch_loss(dodo.compressor, batch, divisor=batch.divisor) for batch in batches]
    mean = sum(loss.sum for loss in losses) / sum(loss.tokens for loss in losses)
    assert sum(float(loss.total.detach()) for loss in losses) / 3 == pytest.approx(mean, rel=1e-5)
    assert BatchMaker(load_recipe(recipe_file, settings[:-1]), None, source)(3).divisor is None


def _nothing() -> Batch:
    ids = torch.zeros(1, 1, dtype=torch.long)
    return Batch("question", 1.0, ids, ids.bool(), ids, ids.bool(), ids)


def test_documents_begin_in_training_as_they_do_in_use(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    """A tokenizer that puts BOS in front, as LLaMA's does, and a recipe that does not keep the first token."""
    recipe = load_recipe(recipe_file, ["config.keep_first=false"])
    dodo = load_for_training(recipe)
    plain = dodo.tokenizer

    class AddsBos:
        def __call__(self, text: Any, add_special_tokens: bool = True, **more: Any) -> Any:
            found = plain(text, add_special_tokens=False, **more)
            bos = [plain.bos_token_id] if add_special_tokens else []
            return {"input_ids": [*bos, *found["input_ids"]]} if isinstance(text, str) else found

        def __len__(self) -> int:
            return len(plain)

        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

    for tokenizer, begins in ((AddsBos(), True), (plain, False)):
        dodo.tokenizer = tokenizer  # type: ignore[assignment]
        _, _, checks = open_sources(recipe, dodo, tmp_path / str(begins))
        (batch,) = checks.values()
        assert (batch.documents[0, 0] == plain.bos_token_id) == begins
        assert (dodo.document_ids("a dodo")[0] == plain.bos_token_id) == begins


# -- what is validated


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["running.validation_lengths=[240]"], r"no held-out text has 240 tokens"),
        (["running.validation_lengths=[12, 240]"], r"no held-out text has 240 tokens"),
        (["running.validation_lengths=[300]"], r"running.validation_lengths needs up to 603 positions"),
        (["data.validation=[]", "running.patience=2"], r"running.patience needs something to be validated by"),
    ],
)
def test_a_validation_that_can_not_be_is_refused_before_the_first_step(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    settings: list[str],
    message: str,
) -> None:
    with pytest.raises(InputError, match=message):
        train(load_recipe(recipe_file, settings), tmp_path / "run", progress=False)


def test_a_continuation_is_validated_where_something_is_behind_its_text(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    longest = open_sources(recipe := load_recipe(recipe_file), load_for_training(recipe), tmp_path)[0].longest
    settings = ["mixture.autoencoding=0", "mixture.continuation=1", "mixture.context={low: 8, mode: 12, high: 16}"]
    for length, said in ((longest - 2, None), (longest - 1, f"no held-out text has {longest - 1} tokens and 2 to go on with")):
        recipe = load_recipe(recipe_file, [*settings, f"running.validation_lengths=[{length}]", "mixture.following=8"])
        with pytest.raises(InputError, match=said) if said else nullcontext():
            open_sources(recipe, load_for_training(recipe), tmp_path)


def test_recall_is_validated_by_itself_where_nothing_is_rebuilt(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    for weights, expected in (("0", {"recall"}), ("1", {"autoencoding"})):
        recipe = load_recipe(recipe_file, [f"mixture.autoencoding={weights}", "mixture.recall=1"])
        checks = open_sources(recipe, load_for_training(recipe), tmp_path)[2]
        assert {batch.objective for batch in checks.values()} == expected


def test_draws_longer_than_documents_are_get_a_warning(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    dodo = load_for_training(load_recipe(recipe_file))
    with pytest.warns(DodoWarning, match=r"mixture.length: up to 400 tokens are to be drawn, but only a tenth of all tokens"):
        open_sources(load_recipe(recipe_file, ["mixture.length={low: 8, mode: 12, high: 400}"]), dodo, tmp_path)


def test_data_is_what_its_name_and_kind_say(recipe_file: Path, questions: str, tmp_path: Path) -> None:  # noqa: F811
    dodo = load_for_training(load_recipe(recipe_file))
    bracketed = tmp_path / "text[1].jsonl"
    bracketed.write_bytes((tmp_path / "text.jsonl").read_bytes())
    for name in ("one", "two"):
        prepare([str(bracketed)], tmp_path / "shards" / f"{name}.safetensors", dodo.tokenizer)
    one, _, _ = open_sources(load_recipe(recipe_file, [f"data.text=['{bracketed}']"]), dodo, tmp_path)
    both, _, _ = open_sources(load_recipe(recipe_file, [f"data.text=['{tmp_path}/shards/*.safetensors']"]), dodo, tmp_path)
    assert both._ends[-1] == 2 * one._ends[-1]
    asked = tmp_path / "asked.safetensors"
    prepare([questions], asked, dodo.tokenizer, kind="question")
    with pytest.raises(InputError, match=r"asked.safetensors is a shard of kind question, not text"):
        open_sources(load_recipe(recipe_file, [f"data.text=['{asked}']"]), dodo, tmp_path)
    with pytest.raises(InputError, match=r"shards can't be read: Is a directory"):
        open_sources(load_recipe(recipe_file, [f"data.text=['{tmp_path / 'shards'}']"]), dodo, tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["optimizer.shape=constant", "optimizer.period=150000"], "after the warm-up the rate is at most 0.0% of optimizer.lr"),
        (["optimizer.shape=constant", "optimizer.period=14"], "after the warm-up the rate is at most 42.9% of optimizer.lr"),
        (["optimizer.shape=constant", "optimizer.period=12"], None),
        (["optimizer.period=7"], "the rate is 0 from step 7 on"),
        (["optimizer.period=7", "optimizer.floor=0.1"], None),
    ],
)
def test_a_rate_for_another_number_of_steps_gets_a_warning(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    settings: list[str],
    said: str | None,
) -> None:
    with pytest.warns(DodoWarning, match=said) if said else nullcontext():
        train(load_recipe(recipe_file, settings), tmp_path / "run", progress=False)


def test_the_log_has_the_rates_of_its_last_step_and_the_speed_of_steps(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Validation._measured

    def slow(*arguments: Any) -> dict[str, float]:
        time.sleep(1.5)
        return measured(*arguments)

    monkeypatch.setattr(Validation, "_measured", slow)
    recipe = load_recipe(recipe_file, ["running.validate_every=1"])
    began = time.perf_counter()
    result = train(recipe, tmp_path / "run", progress=False)
    seconds = time.perf_counter() - began
    rows = [line.split(",") for line in (tmp_path / "run" / "train.csv").read_text().splitlines()]
    last = {name: float(value) for step, name, value in rows if step == "8"}
    factor = rate_at(7, recipe.optimizer, 8)
    assert (last["lr"], last["lr/scorer"]) == (pytest.approx(1e-2 * factor, rel=1e-4), pytest.approx(1e-3 * factor, rel=1e-4))
    assert last["tokens_per_second"] > result.tokens / (seconds - 8)  # eight of twelve for validations


def test_a_validation_without_a_number_is_not_the_best(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter([float("nan"), 3.0, 2.0])
    monkeypatch.setattr(Validation, "_measured", lambda *_: {"loss": next(found)})
    result = train(load_recipe(recipe_file, ["running.steps=3", "running.validate_every=1"]), tmp_path / "run", progress=False)
    assert result.loss == 2.0


def test_batches_are_validated_on_the_models_device(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[tuple[str, torch.device]] = []
    to = Batch.to
    monkeypatch.setattr(Batch, "to", lambda self, device, **more: moved.append((self.objective, device)) or to(self, device))
    monkeypatch.setattr(
        "dodo.training.callbacks.validate", lambda *_: moved.append(("validated", torch.device("cpu"))) or {"loss": 1.0}
    )
    train(load_recipe(recipe_file, ["running.steps=1", "running.validate_every=1"]), tmp_path / "run", progress=False)
    at = moved.index(("validated", torch.device("cpu")))
    assert moved[at - 1] == ("autoencoding", torch.device("cpu"))


def test_a_run_that_ended_early_has_ended_when_it_is_resumed(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Validation, "_measured", lambda *_: {"loss": 1.0})
    recipe = load_recipe(recipe_file, ["running.steps=9", "running.validate_every=1", "running.patience=2"])
    first = train(recipe, tmp_path / "run", progress=False)
    again = train(recipe, tmp_path / "run", resume=True, progress=False)
    assert (first.steps, again.steps) == (3, 3)
    assert first.finished and first.out_of_patience
    for steps in (2, 3):  # the third is the last, and the one that patience ends at
        whole = load_recipe(recipe_file, [f"running.steps={steps}", "running.validate_every=1", "running.patience=2"])
        found = train(whole, tmp_path / f"whole-{steps}", progress=False)
        assert (found.finished, found.out_of_patience) == (True, False)


def test_reconstructions_shown_behind_a_checkpoint_are_forgotten_with_their_rows(tmp_path: Path) -> None:
    samples = tmp_path / "samples.txt"
    kept = "== step 9, n128/r5, BLEU 1.0\n-- 'a text == step 11, no'\n++ 'a'\n== step 10, n128/r5, BLEU 2.0\n-- 'b'\n++ 'c'\n"
    samples.write_text(kept + "== step 11, n128/r5, BLEU 3.0\n-- 'd'\n++ 'e'\n", encoding="utf-8")
    _forget_later_samples(samples, 10)
    assert samples.read_text(encoding="utf-8") == kept
    _forget_later_samples(samples, 8)
    assert samples.read_text(encoding="utf-8") == ""


# -- files


def test_the_best_adapters_are_there_before_a_checkpoint_says_so(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    adapters, save = TrainingModule.save_adapters, Checkpoints._save
    monkeypatch.setattr(TrainingModule, "save_adapters", lambda self, to: order.append(to.name) or adapters(self, to))
    monkeypatch.setattr(Checkpoints, "_save", lambda self, trainer: order.append("checkpoint") or save(self, trainer))
    settings = ["running.steps=1", "running.validate_every=1", "running.save_every=1"]
    train(load_recipe(recipe_file, settings), tmp_path / "run", progress=False)
    assert order == ["best", "checkpoint", "checkpoint", "last"]


def test_a_folder_is_old_or_new_wherever_its_replacing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(Exception):
        pass

    rename, rmtree = Path.rename, in_place.shutil.rmtree
    for at in range(4):
        target, part = tmp_path / str(at) / "best", tmp_path / str(at) / "best.part"
        for folder, name in ((target, "old"), (part, "new")):
            folder.mkdir(parents=True)
            (folder / name).write_text(name)
        left = iter([None] * at)

        def step(work: Any, left: Any = left) -> Any:
            def done(*arguments: Any, **more: Any) -> Any:
                if next(left, Cut) is Cut:
                    raise Cut
                return work(*arguments, **more)

            return done

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", step(rename))
            patched.setattr(in_place.shutil, "rmtree", step(rmtree))
            with pytest.raises(Cut):
                put_in_place(part, target)
        recover(target)
        assert [path.name for path in target.iterdir()] == ["new" if at == 3 else "old"]
        put_in_place(part, target) if part.exists() else None
        assert [path.name for path in target.iterdir()] == ["new"]
        assert not (tmp_path / str(at) / "best.before").exists()


def test_processes_that_recover_a_folder_at_the_same_time_all_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, target = Path.rename, tmp_path / "best"
    (tmp_path / "best.before" / "old").mkdir(parents=True)

    def rename_behind_another(path: Path, to: Path) -> Path:
        monkeypatch.undo()
        recover(target)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", rename_behind_another)
    recover(target)
    assert list(tmp_path.rglob("*")) == [target, target / "old"]


def test_rows_that_were_cut_off_or_come_later_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("step,name,value\n10,loss,1.5\n\n20,loss,1.25\n30,loss,1.0\n4", encoding="utf-8")
    _forget_later_rows(path, 20)
    assert path.read_text() == "step,name,value\n10,loss,1.5\n20,loss,1.25\n"


# -- what it starts from


def test_adapters_of_another_use_or_base_are_no_start(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    train(load_recipe(recipe_file, ["running.steps=1"]), tmp_path / "run", progress=False)
    start = f"start={tmp_path / 'run' / 'last'}"
    load_for_training(load_recipe(recipe_file, [start, "config.selection=density"]))  # may differ
    for setting, name in (("config.feature_layer=1", "feature_layer: 2"), ("config.keep_first=false", "keep_first: True")):
        with pytest.raises(InputError, match=f"the adapters in .* have {name}, the recipe has"):
            load_for_training(load_recipe(recipe_file, [start, setting]))
    with pytest.raises(InputError, match="the adapters in .* have feature_layer: 2, the recipe has 1"):
        load_for_training(load_recipe(recipe_file, [start, "start_with=scorer", "config.feature_layer=1"]))
    with pytest.raises(InputError, match=r"dodo_config.json"):
        load_for_training(load_recipe(recipe_file, [f"start={tmp_path}"]))
    file = tmp_path / "run" / "last" / "dodo_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_fingerprint": "0" * 16}), encoding="utf-8")
    for what in ("all", "scorer"):
        with pytest.raises(InputError, match="were trained on another base"):
            load_for_training(load_recipe(recipe_file, [start, f"start_with={what}"]))


def test_a_checkpoint_of_another_model_is_refused(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe = load_recipe(recipe_file, [*CONSTANT, "running.steps=1"])
    train(recipe, tmp_path / "run", progress=False)
    path = tmp_path / "run" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    name = next(name for name in checkpoint["state_dict"] if "lora_B" in name)
    checkpoint["state_dict"][f"{name}.other"] = checkpoint["state_dict"].pop(name)
    torch.save(checkpoint, path)
    with pytest.raises(InputError, match=f"is of another model: {name} is in one of them alone"):
        train(dataclasses.replace(recipe, running=dataclasses.replace(recipe.running, steps=2)), tmp_path / "run", resume=True)


def test_a_checkpoint_without_weights_of_its_own_is_taken(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    """DeepSpeed writes and reads them itself."""
    recipe = load_recipe(recipe_file)
    module = TrainingModule(load_for_training(recipe), recipe, tmp_path)
    module.on_load_checkpoint({"dodo": {"recipe": recipe.as_dict(), "tokens_seen": 7}})
    assert module.tokens_seen == 7


# -- values


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("running.validate_every=0", "running.validate_every is at least 1, not 0"),
        ("running.save_every=0", "running.save_every is at least 1"),
        ("running.accumulate=0", "running.accumulate is at least 1"),
        ("running.tokens=-5", "running.tokens is at least 1"),
        ("running.validation_ratios=[0.5]", "numbers of at least 1"),
        ("optimizer.lr=-1", "optimizer.lr is at least 0"),
        ("optimizer.clip=-1", "optimizer.clip is at least 0"),
        ("optimizer.betas=[0.9, 1.5]", "betas are from 0 to below 1"),
        ("selection.handover=[100, 10]", "ends no sooner than it begins"),
        ("mixture.ratio_steps=5", "ratio_from and ratio_steps go together"),
        ("mixture.following=0", "mixture.following is at least 1"),
        ("memory.tokens=0", "memory.tokens is at least 1"),
        ("mixture.autoencoding=.nan", "autoencoding: a finite number is wanted, not nan"),
        ("optimizer.lr=.inf", "lr: a finite number is wanted, not inf"),
        ("running.validation_ratios=[.inf]", "validation_ratios: a finite number is wanted, not inf"),
        ("mixture.length={low: 0.2, mode: 0.3, high: 0.4}", "mixture.length: at least 1 token is drawn, not 0.2"),
    ],
)
def test_values_that_can_not_be_are_refused_by_name(recipe_file: Path, setting: str, message: str) -> None:  # noqa: F811
    with pytest.raises(InputError, match=message):
        load_recipe(recipe_file, [setting])


def test_without_a_clip_gradients_are_taken_as_they_are(recipe_file: Path, tmp_path: Path) -> None:  # noqa: F811
    for name, clip in (("none", 0), ("large", 1e9)):
        train(load_recipe(recipe_file, [f"optimizer.clip={clip}", "running.steps=2"]), tmp_path / name, progress=False)
    a, b = _trained(tmp_path / "none"), _trained(tmp_path / "large")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=0, rtol=0, msg=name)
    assert any(value.abs().max() > 0 for name, value in a.items() if "lora_B" in name)


@pytest.mark.parametrize(
    ("settings", "trained_as"),
    [
        ([], "compressor"),
        (["mixture.autoencoding=0", "mixture.autoregressive=1"], "autoregressive"),
        (["mixture.autoregressive=1"], None),
        (["model=compressive", "mixture.autoencoding=0", "mixture.autoregressive=1"], "compressive"),
        (["model=icae"], "icae"),
    ],
    ids=str,
)
def test_adapters_say_what_they_learned_to_be(recipe_file: Path, settings: list[str], trained_as: str | None) -> None:  # noqa: F811
    fixed = ["mixture.ratio={low: 4, mode: 4, high: 4}", "mixture.whole={low: 24, mode: 24, high: 24}"]
    assert load_recipe(recipe_file, [*fixed, *settings]).trained_as == trained_as


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["mixture.window={low: 8, mode: 8, high: 200}", "mixture.segment=100"], "window and segment are up to 300 tokens; half"),
        (["mixture.segment=48", "mixture.whole={low: 24, mode: 24, high: 490}"], "mixture.whole is up to 490 .* are 480"),
        (["mixture.segment=48", "running.validation_lengths=[482]"], "validation_lengths is up to 482 .* are 480"),
    ],
)
def test_what_the_lm_can_not_read_is_refused_before_the_first_step(
    recipe_file: Path,  # noqa: F811
    tmp_path: Path,
    settings: list[str],
    message: str,
) -> None:
    """A window is drawn for each batch, so that the first too long one might come late."""
    asked = ["mixture.autoencoding=0", "mixture.autoregressive=1", "mixture.whole={low: 24, mode: 24, high: 24}", *settings]
    with pytest.raises(InputError, match=message):
        train(load_recipe(recipe_file, asked), tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "train.csv").exists()


@pytest.mark.parametrize(
    ("objectives", "question_ratio", "trained"),
    [
        ({"autoencoding": 1.0}, Draw(1.0, 5.0, 2.0), (10.0, 20.0)),
        ({"question": 1.0}, Draw(1.0, 5.0, 2.0), (1.0, 5.0)),
        ({"question": 1.0}, None, (10.0, 20.0)),
        ({"question": 1.0, "recall": 0.5}, Draw(1.0, 5.0, 2.0), (1.0, 20.0)),
        ({"question": 1.0, "recall": 0.5}, None, (10.0, 20.0)),
    ],
)
def test_trained_ratios_are_those_that_the_objectives_draw_from(
    objectives: dict[str, float], question_ratio: Draw | None, trained: tuple[float, float]
) -> None:
    kinds = {"autoencoding": 0.0, **objectives}
    assert Mixture(**kinds, ratio=Draw(10.0, 20.0, 10.0), question_ratio=question_ratio).trained_ratios == trained


def test_the_ratios_of_questions_are_trained_ratios_too(recipe_file: Path, questions: str, tmp_path: Path) -> None:  # noqa: F811
    settings = ["mixture.question=1.0", f"data.questions={questions}", "mixture.question_ratio={low: 1.5, mode: 6.0, high: 14.0}"]
    train(load_recipe(recipe_file, [*settings, "running.steps=1"]), tmp_path / "run", progress=False)
    learned = Dodo.from_pretrained(tmp_path / "run" / "last").config
    assert (learned.trained_ratios, learned.trained_as) == ((1.5, 14.0), "compressor")
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["mixture"]["ratio"]["high"] == 4.0
