"""A scorer with a score for each use of a text: itself, and questions about it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

from dodo import nuggets_file
from dodo.cli import dodo
from dodo.compressor import Compressor
from dodo.config import CONFIG_FILE, DodoConfig
from dodo.data.batches import Batch
from dodo.errors import InputError, NuggetsFileError
from dodo.evaluation.methods import make_method
from dodo.evaluation.run import TASKS, evaluate
from dodo.inspection import inspect_text
from dodo.model import Dodo
from dodo.nuggets import Nuggets
from dodo.parameters import parameters_of_config
from dodo.scorer import Scorer
from dodo.training.objectives import encode
from tests.cli.tiny import TEXT, save_model
from tests.conftest import tokens


def oppose(compressor: Compressor) -> Compressor:
    """The token that is wanted most for the text is wanted least by questions."""
    with torch.no_grad():
        compressor.scorer.output.weight[1] = -compressor.scorer.output.weight[0]
        compressor.scorer.output.bias.zero_()
    return compressor


@pytest.fixture
def compressor(pair) -> Compressor:
    return oppose(pair(scores_by_use=True).compressor)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Dodo.from_pretrained(base, config=DodoConfig(feature_layer=2, ratio=3.0, scores_by_use=True))
    oppose(made.compressor)
    path = tmp_path_factory.mktemp("adapters")
    made.save_pretrained(path)
    return path


def test_one_score_serves_all_uses_unless_told_otherwise():
    features = torch.randn(2, 5, 8)
    scorer = Scorer(8)
    assert not scorer.by_use
    assert torch.equal(scorer(features), scorer(features, "questions"))
    two = Scorer(8, by_use=True)
    assert two.by_use
    assert two(features).shape == (2, 5)
    assert not torch.equal(two(features), two(features, "questions"))


def test_each_use_selects_by_its_own_score_and_teaches_that_alone(compressor):
    ids = tokens(1, 30)
    text, asked = compressor.score(ids), compressor.score(ids, "questions")
    torch.testing.assert_close(asked, -text)
    for use, scores in (("text", text), ("questions", asked)):
        chosen = compressor.encode(ids, nuggets=6, use=use)
        expected = {29, *scores[0, :29].topk(5).indices.tolist()}
        assert set(chosen.indices[0].tolist()) == expected
        compressor.zero_grad()
        chosen.scores.sum().backward()
        gradient = compressor.scorer.output.bias.grad
        assert (gradient != 0).tolist() == [use == "text", use == "questions"]


def test_texts_longer_than_the_window_are_scored_for_their_use_too(compressor):
    ids = tokens(1, 600)  # the window is 256
    torch.testing.assert_close(compressor.score(ids, "questions"), -compressor.score(ids))


def test_training_takes_the_score_of_the_batchs_use(compressor):
    ids = tokens(1, 24)
    real = torch.ones_like(ids, dtype=torch.bool)
    for objective, use in (("question", "questions"), ("autoencoding", "text"), ("recall", "text"), ("continuation", "text")):
        batch = Batch(objective, 4.0, ids, real, ids, real, ids)
        assert torch.equal(encode(compressor, batch).indices, compressor.encode(ids, ratio=4, use=use).indices)


def test_a_file_of_adapters_keeps_both_scores(folder):
    loaded = Dodo.from_pretrained(folder)
    assert loaded.config.scores_by_use
    ids = tokens(1, 20)
    torch.testing.assert_close(loaded.compressor.score(ids, "questions"), -loaded.compressor.score(ids))
    one = json.loads((folder / CONFIG_FILE).read_text())
    assert one["scores_by_use"] is True
    with pytest.raises(InputError, match="scores_by_use must be true or false, not 'yes'"):
        DodoConfig(scores_by_use="yes")  # type: ignore[arg-type]


def test_adapters_with_one_score_start_both_and_the_texts_score_starts_one(base, folder, tmp_path):
    settings = DodoConfig(feature_layer=2, scores_by_use=True)
    one, two = Dodo.from_pretrained(base, config=dataclasses.replace(settings, scores_by_use=False, seed=3)), None
    one.save_pretrained(tmp_path)
    ids = tokens(1, 20)
    two = Dodo.from_pretrained(base, config=settings)
    with pytest.raises(InputError, match="other settings than this model's: scores_by_use"):
        two.load_adapters(tmp_path)
    two.load_adapters(tmp_path, ignore_config=True)
    for use in ("text", "questions"):
        torch.testing.assert_close(two.compressor.score(ids, use), one.compressor.score(ids))
    one.load_adapters(folder, ignore_config=True)
    wanted = Dodo.from_pretrained(folder).compressor.score(ids)
    torch.testing.assert_close(one.compressor.score(ids, "questions"), wanted)


def test_texts_are_compressed_for_questions_unless_they_are_to_be_rebuilt(folder):
    made = Dodo.from_pretrained(folder)
    both = {use: made.compress(TEXT, ratio=4, use=use).indices.tolist() for use in ("text", "questions")}
    assert both["text"] != both["questions"]
    assert made.compress(TEXT, ratio=4).indices.tolist() == both["questions"]
    for use, places in both.items():
        seen = inspect_text(made, TEXT, ratio=4, use=use)
        assert [token.index for token in seen.tokens if token.selected] == places[0]
        held = make_method("dodo", made, 4.0, use=use).read([TEXT])
        assert held.what.indices.tolist() == places
    strides = [make_method("stride", made, 4.0, use=use).read([TEXT]).what.indices.tolist() for use in ("text", "questions")]
    assert strides[0] == strides[1]
    assert {name: task.use for name, task in TASKS.items()} == {
        "autoencoding": "text",
        "multilingual": "text",
        "delimiters": "text",
        "squad": "questions",
        "summarization": "questions",
    }


def test_another_use_is_refused_whatever_the_scorer(base, folder):
    for name in (base, folder):
        with pytest.raises(InputError, match="texts are compressed for 'text' or 'questions', not for 'fun'"):
            Dodo.from_pretrained(name).compress(TEXT, ratio=4, use="fun")


def test_the_second_output_is_counted(folder):
    made = Dodo.from_pretrained(folder)
    shape = made.compressor.base.config
    counts = [
        {row.module: row.count for row in parameters_of_config(shape, name="base", settings=settings)}
        for settings in (dataclasses.replace(made.config, scores_by_use=False), made.config)
    ]
    differing = {name: counts[1][name] - count for name, count in counts[0].items() if counts[1][name] != count}
    assert set(differing.values()) == {33}


def test_the_command_line_compresses_for_either_use(folder, tmp_path, monkeypatch):
    document = tmp_path / "dodo.txt"
    document.write_text(TEXT, encoding="utf-8")
    loaded = Dodo.from_pretrained(folder)
    wanted = {use: loaded.compress(TEXT, ratio=4, use=use).indices.tolist() for use in ("text", "questions")}
    for flags, use in (([], "questions"), (["--for", "questions"], "questions"), (["--for", "text"], "text")):
        out = tmp_path / "made.nuggets"
        result = CliRunner().invoke(
            dodo, ["compress", str(document), "-o", str(out), "-r", "4", "--model", str(folder), "--force", *flags]
        )
        assert result.exit_code == 0, result.output
        assert Nuggets.load(out).indices.tolist() == wanted[use]
    corpus = tmp_path / "corpus"
    common = ["compress-corpus", str(document), str(corpus), "-r", "4", "--model", str(folder)]
    for flags, uses in (([], ["questions"]), (["--for", "text"], ["questions", "text"])):
        result = CliRunner().invoke(dodo, [*common, *flags])
        assert result.exit_code == 0, result.output
        made = [Nuggets.load(path).indices.tolist() for path in corpus.glob("*.nuggets")]
        assert sorted(made) == sorted(wanted[use] for use in uses)  # neither takes the other's place
    shown = {
        use: CliRunner().invoke(dodo, ["inspect", str(document), "-r", "4", "--model", str(folder), "--for", use, "--json"])
        for use in wanted
    }
    for use, result in shown.items():
        found = [token["index"] for token in json.loads(result.stdout)["tokens"] if token["selected"]]
        assert found == wanted[use][0]

    asked: list[str] = []
    compress = Dodo.compress
    monkeypatch.setattr(Dodo, "compress", lambda *a, **k: asked.append(k["use"]) or compress(*a, **k))
    for arguments in (["reconstruct", str(document)], ["ask", str(document), "Who?"]):
        result = CliRunner().invoke(dodo, [*arguments, "-r", "4", "--model", str(folder), "--max-new-tokens", "2"])
        assert result.exit_code == 0, result.output
    assert asked == ["text", "questions"]


def test_records_say_what_was_compressed_for(base, folder, tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text(json.dumps({"context": TEXT, "question": "Who?", "answers": ["Sailors"], "text": TEXT}), encoding="utf-8")
    common = {"method": "dodo", "ratio": 4.0, "sources": [str(data)]}
    made = Dodo.from_pretrained(folder)
    for task, use, more in (("squad", "questions", {}), ("autoencoding", "text", {"lengths": [20]})):
        record = evaluate(made, task, **common, **more, out=tmp_path / f"{task}.json")
        assert record["settings"]["compressed for"] == use
    record = evaluate(Dodo.from_pretrained(base), "squad", **common, out=tmp_path / "one.json")
    assert "compressed for" not in record["settings"]


def test_nuggets_say_what_they_were_chosen_for(compressor, pair, tmp_path):
    ids = tokens(1, 30)
    text, asked = (compressor.encode(ids, ratio=4, use=use) for use in ("text", "questions"))
    assert (text.use, asked.use) == ("text", "questions")
    long = compressor.encode(ids, ratio=4, use="questions", segment=12)
    assert long.use == "questions"
    given = compressor.encode(ids, ratio=4, use="questions", scores=torch.randn(1, 30))
    by_hand = compressor.encode(ids, ratio=4, use="questions", select_by=torch.rand(1, 30))
    one_score = pair().compressor.encode(ids, ratio=4, use="questions")
    assert {given.use, by_hand.use, one_score.use} == {None}

    for join in (Nuggets.stack, Nuggets.cat):
        assert (join([asked, asked]).use, join([asked, text]).use) == ("questions", None)
    assert Nuggets.stack([asked, asked])[1].use == "questions"

    asked.save(tmp_path / "asked.nuggets")
    assert Nuggets.load(tmp_path / "asked.nuggets").use == "questions"


def _with_header(path: Path, change) -> Path:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        header = json.loads(file.metadata()["dodo_nuggets"])
    change(header)
    del header["checksum"]
    whole = {**header, "checksum": nuggets_file._checksum(tensors, header)}
    save_file(tensors, path, metadata={"dodo_nuggets": json.dumps(whole)})
    return path


def test_files_of_before_say_nothing_of_use_and_others_nothing_unknown(compressor, tmp_path):
    path = tmp_path / "asked.nuggets"
    compressor.encode(tokens(1, 30), ratio=4, use="questions").save(path)
    assert Nuggets.load(_with_header(path, lambda header: header.pop("use"))).use is None
    with pytest.raises(NuggetsFileError, match="is damaged: .*it says that it was compressed for 'fun'"):
        Nuggets.load(_with_header(path, lambda header: header.update(use="fun")))


def test_the_command_line_says_so_where_nuggets_were_chosen_for_something_else(folder, base, tmp_path):
    document, made = tmp_path / "dodo.txt", tmp_path / "made.nuggets"
    document.write_text(TEXT, encoding="utf-8")

    def run(*arguments: str, model: Path = folder) -> Any:
        result = CliRunner().invoke(dodo, [*arguments, "--model", str(model)])
        assert result.exit_code == 0, result.output
        return result

    shown = run("compress", str(document), "-o", str(made), "-r", "4", "--for", "text")
    assert "compressed for  the text itself, to rebuild it" in shown.stdout
    asked = run("ask", str(made), "Who?", "--max-new-tokens", "2")
    assert (
        "chosen for the text itself, to rebuild it; for questions about the text, compress with --for questions" in asked.stderr
    )
    told = run("ask", str(made), "Who?", "--max-new-tokens", "2", "--json")
    assert json.loads(told.stdout)["compressed_for"] == "text"
    assert "chosen for" not in run("reconstruct", str(made), "--max-new-tokens", "2").stderr
    plain = run("compress", str(document), "-o", str(made), "-r", "4", "--force", "--json", model=base)
    assert json.loads(plain.stdout)["compressed_for"] is None
    assert "chosen for" not in run("ask", str(made), "Who?", "--max-new-tokens", "2", model=base).stderr
