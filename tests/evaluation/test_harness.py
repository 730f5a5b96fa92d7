"""Dodo in lm-evaluation-harness."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dodo.config import DodoConfig
from dodo.errors import InputError
from dodo.model import Dodo
from tests.cli.tiny import TEXT, save_model
from tests.conftest import stir

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra")
    from lm_eval.models.huggingface import HFLM

    from dodo.evaluation import harness
    from dodo.evaluation.harness import DodoLM

pytestmark = pytest.mark.filterwarnings("ignore")

CONTEXTS = [TEXT[:90], TEXT[:25], "a", "", TEXT]
CONTINUATIONS = [" bird", " of the sea.", " dodo", "The dodo", " was"]
WRITING = {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False}


def asked(*rows: tuple[Any, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=row) for row in rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("harness") / "base")


@pytest.fixture(scope="module")
def fresh(base: Path) -> Dodo:
    return Dodo.from_pretrained(base, config=DodoConfig(feature_layer=2, keep_first=False))


@pytest.fixture(scope="module")
def theirs(base: Path) -> HFLM:
    return HFLM(pretrained=str(base), device="cpu", batch_size=1, dtype="float32")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_ratio_one_with_fresh_adapters_scores_and_writes_as_the_harness_own_model(
    fresh: Dodo, theirs: HFLM, batch_size: int
) -> None:
    ours = DodoLM(fresh, ratio=1, whole=5, batch_size=batch_size)
    pairs = asked(*zip(CONTEXTS, CONTINUATIONS, strict=True))
    for (a, greedy), (b, wanted) in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert a == pytest.approx(b, abs=1e-3)
        assert greedy == wanted
    texts = asked((TEXT,), (TEXT[:30],), ("x",))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    writing = asked(*((context, dict(WRITING)) for context in CONTEXTS if len(context) > 1))
    assert ours.generate_until(writing) == theirs.generate_until(writing)


def test_a_context_is_compressed_but_for_its_end(base: Path) -> None:
    dodo = Dodo.from_pretrained(base, config=DodoConfig(feature_layer=2))
    stir(dodo.compressor)
    dodo.stamp()
    context, continuation = TEXT[:90], " bird"
    ((found, _),) = DodoLM(dodo, ratio=4, whole=6).loglikelihood(asked((context, continuation)))
    ids, behind = dodo.document_ids(context), dodo.tokenizer(continuation)["input_ids"]
    with torch.no_grad():
        nuggets = dodo.compressor.encode(torch.tensor([ids[:-6]]), ratio=4)
        logits = dodo.compressor.decode(nuggets, torch.tensor([ids[-6:] + behind[:-1]]))[0, 5:].float()
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(behind)[:, None]).sum()
    assert found == pytest.approx(float(wanted), abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_context_is_compressed_once_for_all_its_continuations(
    fresh: Dodo, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [" bird", " fish, and no more", " dodo", " ship of"]
    pairs = [(context, option) for option in options for context in (TEXT[:90], TEXT, TEXT[20:110])]
    alone = [DodoLM(fresh, ratio=3, whole=6).loglikelihood(asked(pair))[0] for pair in pairs]
    compressed, compress_ids = [], fresh.compress_ids

    def noted(rows: list[list[int]], **how: Any) -> Any:
        compressed.extend(rows)
        return compress_ids(rows, **how)

    monkeypatch.setattr(fresh, "compress_ids", noted)
    together = DodoLM(fresh, ratio=3, whole=6, batch_size=batch_size).loglikelihood(asked(*pairs))
    assert len(compressed) == 3
    for (a, greedy), (b, wanted) in zip(together, alone, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
        assert greedy == wanted


def test_a_continuation_of_no_tokens_is_certain(fresh: Dodo) -> None:
    ours = DodoLM(fresh, ratio=3)
    for context in (fresh.document_ids(TEXT), [5]):
        assert ours._loglikelihood_tokens([(("", ""), context, [])], disable_tqdm=True) == [(0.0, True)]


def test_logits_are_made_of_a_few_tokens_at_a_time(fresh: Dodo, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = DodoLM(fresh, ratio=1)
    whole = ours.loglikelihood_rolling(asked((TEXT,)))
    monkeypatch.setattr("dodo.evaluation.harness.AT_ONCE", 7)
    rows, logits_of = [], harness.logits_of

    def noted(base: Any, states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return logits_of(base, states)

    monkeypatch.setattr(harness, "logits_of", noted)
    monkeypatch.setattr(type(fresh.compressor.base), "forward", None)  # which would make those of all of them
    assert ours.loglikelihood_rolling(asked((TEXT,))) == pytest.approx(whole, abs=1e-4)
    assert len(rows) > 20 and max(rows) == 7


def test_a_task_of_the_harness_runs_on_local_data(fresh: Dodo, theirs: HFLM, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate

    rows = [{"passage": TEXT[i : i + 80], "next": TEXT[i + 80 : i + 90]} for i in range(0, 60, 10)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {
        "task": "passages",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{passage}}",
        "doc_to_target": "{{next}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    }
    records = [
        simple_evaluate(model=model, tasks=[dict(task)], bootstrap_iters=0, log_samples=False)
        for model in (DodoLM(fresh, ratio=1), theirs)
    ]
    config = records[0]["config"]
    assert (config["adapter_fingerprint"], config["model_dtype"], config["ratio"]) == (fresh.fingerprint.adapter, "float32", 1.0)
    rows = [record["results"]["passages"] for record in records]
    ours, hf = (next(value for name, value in row.items() if name.startswith("perplexity,")) for row in rows)
    assert ours == pytest.approx(hf, rel=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the harness asks for by default")
def test_without_a_gpu_the_harness_default_is_the_cpu(fresh: Dodo, tmp_path: Path) -> None:
    fresh.save_pretrained(tmp_path / "adapters")
    assert DodoLM(str(tmp_path / "adapters"), device="cuda:0").dodo.device.type == "cpu"


def test_what_can_not_be_is_refused(fresh: Dodo) -> None:
    with pytest.raises(InputError, match="batch_size and whole"):
        DodoLM(fresh, batch_size="auto")
    with pytest.raises(InputError, match="less than 2 tokens"):
        DodoLM(fresh, ratio=1).generate_until(asked(("", dict(WRITING))))
    with pytest.raises(InputError, match="takes no ratoi, peft; it takes model, ratio, whole"):
        DodoLM(fresh, ratoi=20, peft="a")
    with pytest.raises(InputError, match="two names of one thing"):
        DodoLM("other", pretrained="my/run")


def test_the_harness_usual_name_of_a_model_is_taken(base: Path) -> None:
    assert DodoLM(pretrained=str(base), max_batch_size=3).dodo.config.base == str(base)


def test_strings_to_stop_at_are_those_of_new_text_alone(fresh: Dodo, theirs: HFLM) -> None:
    ours = DodoLM(fresh, ratio=1, whole=5)
    (made,) = theirs.generate_until(asked((TEXT[:40], {"max_gen_toks": 1, "do_sample": False, "until": ["@"]})))
    until = [TEXT[39:40] + made]  # stands across the end of the context
    rows = asked((TEXT[:40], {"until": until, "max_gen_toks": 12, "do_sample": False}))
    assert ours.generate_until(rows) == theirs.generate_until(rows)
    assert len(ours.generate_until(rows)[0]) > len(made)


def test_blanks_before_a_continuation_are_scored_with_it(fresh: Dodo) -> None:
    ours = DodoLM(fresh, ratio=1, whole=5)
    (blanks, _), (nothing, _) = ours.loglikelihood(asked(("  ", "dodo"), ("", "  dodo")))
    assert blanks == pytest.approx(nothing, abs=1e-4)
