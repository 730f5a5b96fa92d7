"""Laws of the trainer, on a tiny model and a tiny text."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dodo.data.batches import Batch, Draw, TextSource
from dodo.data.shards import Ragged, Shard
from dodo.errors import DodoWarning, InputError
from dodo.evaluation.language_models import whole_of
from dodo.model import Dodo
from dodo.thresholds import Pace
from dodo.training import run as run_module
from dodo.training.callbacks import Validation
from dodo.training.mixture import BatchMaker
from dodo.training.module import NanLossError, TrainingModule, rate_at
from dodo.training.objectives import Way, batch_loss
from dodo.training.recipe import Optimizer, load_recipe
from dodo.training.run import load_for_training, train
from dodo.training.sources import open_sources
from tests.standins.models import save_base, tiny_llama

ROOT = Path(__file__).parents[2]
WORDS = tuple("the dodo of Mauritius was a bird and nobody has seen one since the last sighting".split())  # noqa: SIM905


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    save_base(tmp_path / "base")
    rows = [{"text": " ".join(WORDS[i:] + WORDS[:i]) * 3, "license": "CC0"} for i in range(len(WORDS))]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    recipe = {
        "base": str(tmp_path / "base"),
        "config": {"feature_layer": 2, "encoder": {"rank": 4, "alpha": 8.0}, "decoder": {"rank": 4, "alpha": 8.0}},
        "data": {"text": [str(tmp_path / "text.jsonl")], "validation": [str(tmp_path / "text.jsonl")]},
        "mixture": {
            "autoencoding": 1.0,
            "ratio": {"low": 2.0, "mode": 3.0, "high": 4.0},
            "length": {"low": 8.0, "mode": 12.0, "high": 16.0},
        },
        "optimizer": {"lr": 1.0e-2, "scorer_lr": 1.0e-3, "warmup": 2, "period": 40},
        "running": {
            "steps": 8,
            "tokens": 48,
            "accelerator": "cpu",
            "validate_every": 4,
            "validation_texts": 2,
            "validation_lengths": [12],
            "validation_ratios": [3.0],
            "reconstruct": 0,
            "save_every": 2,
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def _trained(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    return state


def test_an_interrupted_run_goes_on_to_the_same_weights(recipe_file: Path, tmp_path: Path) -> None:
    whole = train(load_recipe(recipe_file), tmp_path / "whole", progress=False)
    half = load_recipe(recipe_file, ["running.steps=4"])
    train(half, tmp_path / "parts", progress=False)
    record = tmp_path / "parts" / "recipe.yaml"
    record.write_text((tmp_path / "whole" / "recipe.yaml").read_text())  # as if it had been stopped on its way to 8
    parts = train(load_recipe(recipe_file), tmp_path / "parts", resume=True, progress=False)
    assert (whole.steps, whole.tokens, whole.finished) == (parts.steps, parts.tokens, True)
    a, b = _trained(tmp_path / "whole"), _trained(tmp_path / "parts")
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=0, rtol=0, msg=name)


def test_a_killed_run_goes_on_to_the_same_losses(recipe_file: Path, tmp_path: Path) -> None:
    settings = ["running.steps=24"]
    train(load_recipe(recipe_file, settings), tmp_path / "whole", progress=False)
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dodo.training.module import TrainingModule\n"
        "from dodo.training.recipe import load_recipe\n"
        "from dodo.training.run import train\n"
        "step = TrainingModule.training_step\n"
        "def killed(self, batch, index):\n"
        "    if batch.number == 15:  # checkpoints are written every two steps, so one step is lost\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(self, batch, index)\n"
        "TrainingModule.training_step = killed\n"
        "train(load_recipe(Path(sys.argv[1]), sys.argv[3:]), Path(sys.argv[2]), progress=False)\n"
    )
    command = [sys.executable, "-c", program, str(recipe_file), str(tmp_path / "killed"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert train(load_recipe(recipe_file, settings), tmp_path / "killed", resume=True, progress=False).finished
    for file in ("train.csv", "validation.csv"):
        rows = [(tmp_path / run / file).read_text().splitlines() for run in ("whole", "killed")]
        a, b = ([row for row in run if "second" not in row] for run in rows)
        assert len(a) > 1
        assert a == b
    one, two = _trained(tmp_path / "whole"), _trained(tmp_path / "killed")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=0, rtol=0, msg=name)


def test_adapters_are_the_running_average_of_what_the_steps_came_to(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[dict[str, torch.Tensor]] = []
    taken = TrainingModule.take_into_average

    def watched(self: TrainingModule, step: int) -> None:
        steps.append({name: p.detach().clone() for name, p in self.named_parameters() if p.requires_grad})
        taken(self, step)

    monkeypatch.setattr(TrainingModule, "take_into_average", watched)
    plain = train(load_recipe(recipe_file), tmp_path / "plain", progress=False)
    latest = steps.copy()
    steps.clear()
    settings = ["optimizer.average=0.3"]
    mean = train(load_recipe(recipe_file, settings), tmp_path / "mean", progress=False)
    for one, two in zip(latest, steps, strict=True):  # the steps do not know of it
        assert all(one[name].equal(two[name]) for name in one)
    assert plain.loss != mean.loss  # validation does

    name = next(name for name in steps[0] if "lora_B.theta" in name)
    expected = steps[0][name]
    for step, now in enumerate(steps[1:], start=2):
        decay = min(0.3, step / (10 + step))
        expected = decay * expected + (1 - decay) * now[name]
    average = torch.load(tmp_path / "mean" / "last.ckpt", weights_only=True)["dodo"]["average"]
    torch.testing.assert_close(average[name], expected)
    saved = Dodo.from_pretrained(str(tmp_path / "mean" / "last"))
    module = TrainingModule(saved, load_recipe(recipe_file), tmp_path)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.detach(), average[name], atol=1e-3, rtol=1e-3)

    half = load_recipe(recipe_file, [*settings, "running.steps=4"])
    train(half, tmp_path / "parts", progress=False)
    (tmp_path / "parts" / "recipe.yaml").write_text((tmp_path / "mean" / "recipe.yaml").read_text())
    train(load_recipe(recipe_file, settings), tmp_path / "parts", resume=True, progress=False)
    again = torch.load(tmp_path / "parts" / "last.ckpt", weights_only=True)["dodo"]["average"]
    assert all(again[name].equal(average[name]) for name in average)


@pytest.mark.slow
def test_the_smoke_recipe_halves_its_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # its data lie beside it
    done = train(load_recipe(Path("recipes/smoke.yaml")), tmp_path / "smoke", progress=False)
    rows = [row.split(",") for row in (tmp_path / "smoke" / "train.csv").read_text().splitlines()[1:]]
    losses = [float(value) for _, name, value in rows if name == "loss/autoencoding"]
    assert done.finished
    assert losses[-1] < 0.5 * losses[0]


def test_training_lowers_the_loss(recipe_file: Path, tmp_path: Path) -> None:
    first = train(load_recipe(recipe_file, ["running.steps=1", "running.validate_every=1"]), tmp_path / "first", progress=False)
    last = train(load_recipe(recipe_file, ["running.steps=40"]), tmp_path / "last", progress=False)
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < 0.9 * first.loss


def test_a_resumed_run_whose_recipe_changed_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe_file, ["running.steps=2"]), tmp_path / "run", progress=False)
    with pytest.raises(InputError, match=r"optimizer\.lr"):
        train(load_recipe(recipe_file, ["running.steps=2", "optimizer.lr=0.5"]), tmp_path / "run", resume=True, progress=False)


def test_a_folder_with_a_run_is_not_overwritten(recipe_file: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe_file, ["running.steps=2"]), tmp_path / "run", progress=False)
    with pytest.raises(InputError, match="--resume"):
        train(load_recipe(recipe_file, ["running.steps=2"]), tmp_path / "run", progress=False)
    with pytest.raises(InputError, match="nothing to resume"):
        train(load_recipe(recipe_file), tmp_path / "none", resume=True, progress=False)


@pytest.mark.parametrize(
    "setting",
    [
        "running.stesp=3",
        "running.strategy=deepspeed_stage_3",
        "optimiser.lr=1",
        "running.steps=many",
        "mixture.ratio.low=0",
        "optimizer.average=1",
        "running.quantization=3bit",
        "mixture.among={low: 60, mode: 60, high: 60}",  # of questions, and there are none
        "running={strategy: fsdp, quantization: 4bit}",
        "mixture.ratio={low: 1",
    ],
)
def test_unknown_keys_and_wrong_values_are_refused(recipe_file: Path, setting: str) -> None:
    with pytest.raises(InputError):
        load_recipe(recipe_file, [setting])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nbase: b\n running: {}\n", "line 3, column 9"),
        ("name: [\n", "line 2, column 1"),
        ("name: a\n", "recipe.yaml: base is missing"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=said):
        load_recipe(tmp_path / "recipe.yaml")


def test_empty_data_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("")
    with pytest.raises(InputError, match="no data"):
        train(load_recipe(recipe_file), tmp_path / "run", progress=False)


def test_lengths_beyond_the_window_are_refused_before_the_first_step(recipe_file: Path, tmp_path: Path) -> None:
    long = ["mixture.length.high=400", "mixture.length.mode=12"]
    with pytest.raises(InputError, match=r"mixture\.length needs up to 803 positions.*window of 512"):
        train(load_recipe(recipe_file, long), tmp_path / "run", progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("setting", ["running.accelerator=gpu", "running.strategy=deepspeed_stage_2"])
def test_what_the_machine_can_not_run_is_named(recipe_file: Path, tmp_path: Path, setting: str) -> None:
    with pytest.raises(InputError, match="this machine can't run"):
        train(load_recipe(recipe_file, [setting]), tmp_path / "run", progress=False)


@pytest.mark.parametrize(("has_it", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_cpu_is_not_slower_in_it(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, has_it: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr("dodo.training.run.computes_in", lambda *_: has_it)
    dodo = load_for_training(load_recipe(recipe_file, ["running.dtype=auto"]))
    assert dodo.compressor.base.dtype == expected
    assert all(parameter.dtype == torch.float32 for parameter in dodo.compressor.adapters.parameters())


def test_a_run_keeps_the_type_that_auto_was_when_it_began(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["running.dtype=auto", "running.steps=4"]
    monkeypatch.setattr("dodo.training.run.computes_in", lambda kind, _: kind == torch.float32)
    train(load_recipe(recipe_file, settings), tmp_path / "whole", progress=False)
    train(load_recipe(recipe_file, [*settings, "running.steps=2"]), tmp_path / "parts", progress=False)
    monkeypatch.setattr("dodo.training.run.computes_in", lambda *_: True)  # as by a timing beside other work
    train(load_recipe(recipe_file, settings), tmp_path / "parts", resume=True, progress=False)
    assert load_recipe(tmp_path / "parts" / "recipe.yaml").running.dtype == "float32"
    whole, parts = _trained(tmp_path / "whole"), _trained(tmp_path / "parts")
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    monkeypatch.setenv("LOCAL_RANK", "1")  # a process that the first one started
    assert run_module._settled(load_recipe(recipe_file, settings), tmp_path / "parts", resume=False).running.dtype == "float32"
    assert run_module._settled(load_recipe(recipe_file, settings), tmp_path / "new", resume=False).running.dtype == "bfloat16"


@pytest.mark.parametrize(("name", "expected"), [("LOCAL_RANK", "cuda:1"), ("SLURM_LOCALID", "cuda:1"), ("RANK", "cuda:0")])
def test_a_quantised_base_is_loaded_onto_its_process_s_own_gpu(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    for other in ("LOCAL_RANK", "SLURM_LOCALID", "RANK"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    running = load_recipe(recipe_file, ["running.quantization=4bit", "running.accelerator=gpu"]).running
    assert run_module._device(running) == expected


def test_a_run_in_a_type_that_the_cpu_is_slower_in_gets_a_warning(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dodo.training.run.computes_in", lambda *_: False)
    with pytest.warns(DodoWarning, match="running.dtype=float32"):
        assert load_for_training(load_recipe(recipe_file, ["running.dtype=bfloat16"])).compressor.base.dtype == torch.bfloat16


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantized_base_trains_and_goes_on_to_the_same_weights(recipe_file: Path, tmp_path: Path, bits: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")
    shutil.rmtree(tmp_path / "base")
    save_base(tmp_path / "base", model=tiny_llama(hidden_size=64, intermediate_size=128))
    settings = [f"running.quantization={bits}", "running.steps=4"]
    train(load_recipe(recipe_file, settings), tmp_path / "whole", progress=False)
    train(load_recipe(recipe_file, [*settings, "running.steps=2"]), tmp_path / "parts", progress=False)
    train(load_recipe(recipe_file, settings), tmp_path / "parts", resume=True, progress=False)
    whole, parts = _trained(tmp_path / "whole"), _trained(tmp_path / "parts")
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    fresh = load_for_training(load_recipe(recipe_file)).compressor.state_dict()
    assert any(not torch.equal(weight, fresh[name.removeprefix("compressor.")]) for name, weight in whole.items())
    plain = Dodo.from_pretrained(tmp_path / "whole" / "last")  # on the base as it is
    assert plain.is_trained


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning import Trainer

    save, saved = Trainer.save_checkpoint, []

    def full(self: Trainer, path: Path, *args: Any, **kwargs: Any) -> None:
        saved.append(path)
        if len(saved) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(self, path, *args, **kwargs)

    monkeypatch.setattr(Trainer, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        train(load_recipe(recipe_file), tmp_path / "run", progress=False)
    monkeypatch.undo()
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["global_step"] == 2
    assert train(load_recipe(recipe_file), tmp_path / "run", resume=True, progress=False).steps == 8


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_can_go_on(
    how: signal.Signals, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = TrainingModule.training_step

    def told(self: TrainingModule, batch: Batch, index: int) -> torch.Tensor:
        if batch.number == 4:
            os.kill(os.getpid(), how)
        return step(self, batch, index)

    monkeypatch.setattr(TrainingModule, "training_step", told)
    before = signal.getsignal(how)
    stopped = train(load_recipe(recipe_file), tmp_path / "run", progress=False)
    assert (stopped.steps, stopped.finished, stopped.interrupted) == (5, False, how == signal.SIGINT)
    assert signal.getsignal(how) == before
    monkeypatch.undo()
    done = train(load_recipe(recipe_file), tmp_path / "run", resume=True, progress=False)
    assert (done.steps, done.finished) == (8, True)


def test_questions_are_held_back_by_whole_groups() -> None:
    import numpy as np

    from dodo.data.shards import Ragged, Shard

    groups = np.repeat(np.arange(40), 5)
    shard = Shard("question", Ragged(np.zeros(200, np.int64), np.arange(201)), groups=groups)
    back = shard.held_back(0.1)
    assert 20 <= back.sum() <= 25
    assert all(len(set(back[groups == g])) == 1 for g in range(40))
    assert (back == shard.held_back(0.1)).all()
    assert set(groups[back]) != set(groups[shard.held_back(0.1, seed=1)])
    one = Shard("question", Ragged(np.zeros(5, np.int64), np.arange(6)), groups=np.zeros(5, np.int64))
    assert not one.held_back(0.1).any()


def test_the_paper_schedule_warms_up_and_ends_at_its_floor() -> None:
    settings = Optimizer(warmup=10, period=110, floor=0.1)
    assert rate_at(0, settings, 500) == pytest.approx(0.1)
    assert rate_at(10, settings, 500) == pytest.approx(1.0)
    assert rate_at(60, settings, 500) == pytest.approx(0.55)
    assert rate_at(500, settings, 500) == pytest.approx(0.1)


def test_a_constant_rate_ends_in_a_line() -> None:
    settings = Optimizer(shape="constant", warmup=10, period=100, floor=0.0)
    assert rate_at(4, settings, 500) == pytest.approx(0.5)
    assert rate_at(400, settings, 500) == pytest.approx(1.0)
    assert rate_at(450, settings, 500) == pytest.approx(0.5)
    assert rate_at(500, settings, 500) == 0.0


def test_a_run_at_a_constant_rate_may_be_made_longer(recipe_file: Path, tmp_path: Path) -> None:
    constant = ["optimizer.shape=constant", "optimizer.period=2"]
    train(load_recipe(recipe_file, [*constant, "running.steps=2"]), tmp_path / "run", progress=False)
    longer = train(load_recipe(recipe_file, [*constant, "running.steps=4"]), tmp_path / "run", resume=True, progress=False)
    assert longer.steps == 4
    with pytest.raises(InputError, match=r"optimizer\.period"):
        changed = load_recipe(recipe_file, ["optimizer.shape=constant", "optimizer.period=3", "running.steps=6"])
        train(changed, tmp_path / "run", resume=True, progress=False)


def test_a_run_starts_from_given_adapters(recipe_file: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe_file, ["running.steps=4"]), tmp_path / "first", progress=False)
    start = load_recipe(recipe_file, [f"start={tmp_path / 'first' / 'last'}", "running.steps=1", "optimizer.lr=0.0"])
    train(start, tmp_path / "second", progress=False)
    first, second = _trained(tmp_path / "first"), _trained(tmp_path / "second")
    name = next(n for n in first if "lora_B.phi" in n)
    torch.testing.assert_close(second[name], first[name].half().float(), atol=0, rtol=0)
    assert first[name].abs().max() > 0


def test_a_run_may_start_from_the_scorer_alone(recipe_file: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe_file, ["running.steps=2"]), tmp_path / "first", progress=False)
    other = ["config.encoder={rank: 2, alpha: 4.0, targets: [q_proj]}", "config.decoder={rank: 2, alpha: 4.0, targets: [q_proj]}"]
    made = load_for_training(load_recipe(recipe_file, [*other, f"start={tmp_path / 'first' / 'last'}", "start_with=scorer"]))
    fresh = load_for_training(load_recipe(recipe_file, other))
    scorer = dict(Dodo.from_pretrained(tmp_path / "first" / "last").compressor.named_parameters())
    for (name, p), (_, q) in zip(made.compressor.named_parameters(), fresh.compressor.named_parameters(), strict=True):
        assert torch.equal(p, (scorer[name] if name.startswith("scorer.") else q).float()), name


def test_both_adapters_may_start_from_the_theta_of_another_run(recipe_file: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe_file, ["running.steps=2"]), tmp_path / "first", progress=False)
    last = tmp_path / "first" / "last"
    made = load_for_training(load_recipe(recipe_file, [f"start_theta={last}"]))
    first, fresh = Dodo.from_pretrained(last), load_for_training(load_recipe(recipe_file, []))
    theta = dict(first.compressor.adapters.named_parameters("theta"))
    for name, p in made.compressor.adapters.named_parameters():
        assert torch.equal(p, theta[name.replace(".phi.", ".theta.")].float()), name
    for (name, p), (_, q) in zip(
        made.compressor.scorer.named_parameters(), fresh.compressor.scorer.named_parameters(), strict=True
    ):
        assert torch.equal(p, q), name
    with pytest.raises(InputError, match="start_theta: the adapters in .* have keep_first"):
        load_for_training(load_recipe(recipe_file, [f"start_theta={last}", f"config.keep_first={not made.config.keep_first}"]))
    with pytest.raises(InputError, match="nothing"):
        load_for_training(load_recipe(recipe_file, [f"start_theta={tmp_path / 'nothing'}"]))


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_two_processes_equal_accumulation_in_one(recipe_file: Path, tmp_path: Path, strategy: str) -> None:
    settings = ["running.steps=3", "running.validate_every=3"]
    whole = train(load_recipe(recipe_file, [*settings, "running.accumulate=2"]), tmp_path / "one", progress=False)
    chosen = [f"--set={setting}" for setting in (*settings, "running.devices=2", f"running.strategy={strategy}")]
    command = [sys.executable, "-m", "dodo", "train", str(recipe_file), "--out", str(tmp_path / "two"), "--json", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["steps"], result["tokens"]) == (3, whole.tokens)
    assert result["loss"] == pytest.approx(whole.loss, rel=1e-4)
    logged = [_logged(tmp_path / name) for name in ("one", "two")]
    assert logged[0].keys() == logged[1].keys() >= {"loss/autoencoding", "accuracy/autoencoding", "lr", "lr/scorer"}
    for name in logged[0].keys() - {"tokens_per_second"}:
        assert logged[1][name] == pytest.approx(logged[0][name], rel=1e-3), name
    a, b = _trained(tmp_path / "one"), _trained(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3, msg=name)
    resumed = subprocess.run([*command, "--resume", "--set=running.steps=3"], capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr[-2000:]


def test_two_machines_equal_accumulation_in_one_process(recipe_file: Path, tmp_path: Path) -> None:
    settings = ["running.steps=2", "running.validate_every=2"]
    whole = train(load_recipe(recipe_file, [*settings, "running.accumulate=2"]), tmp_path / "one", progress=False)
    chosen = [f"--set={setting}" for setting in (*settings, "running.nodes=2", "running.strategy=ddp")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "dodo", "train", str(recipe_file), "--out", str(tmp_path / "two"), "--json", *chosen],
            env=os.environ | where | {"RANK": rank, "GROUP_RANK": rank, "TORCHELASTIC_RUN_ID": "as torchrun does"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    written = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], written[0][1][-2000:] + written[1][1][-2000:]
    assert json.loads(written[0][0])["tokens"] == whole.tokens
    a, b = _trained(tmp_path / "one"), _trained(tmp_path / "two")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3, msg=name)


def _logged(folder: Path) -> dict[str, float]:
    rows = [line.split(",") for line in (folder / "train.csv").read_text().splitlines()[1:]]
    return {name: float(value) for _, name, value in rows}


@pytest.mark.slow
def test_deepspeed_on_two_processes_equals_accumulation_in_one_and_resumes(recipe_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    # DeepSpeed clips adapters and scorer together
    settings = ["optimizer.clip=1e9", "optimizer.shape=constant", "optimizer.warmup=1", "optimizer.period=1"]
    one, two = tmp_path / "one", tmp_path / "two"
    whole = train(load_recipe(recipe_file, [*settings, "running.steps=4", "running.accumulate=2"]), one, progress=False)
    script = Path(__file__).parents[1] / "standins" / "deepspeed_on_cpu.py"
    settings += ["running.devices=2", "running.strategy=deepspeed_stage_2"]
    command = [sys.executable, str(script), "train", str(recipe_file), "--out", str(two), "--json"]
    command += [f"--set={setting}" for setting in settings]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    for more in (["--set=running.steps=2"], ["--set=running.steps=4", "--resume"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
    assert (json.loads(done.stdout)["steps"], json.loads(done.stdout)["tokens"]) == (4, whole.tokens)
    a, b = (Dodo.from_pretrained(folder / "last").compressor.named_parameters() for folder in (one, two))
    for (name, p), (_, q) in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.slow
def test_fsdp_on_two_processes_equals_accumulation_in_one_and_resumes(recipe_file: Path, tmp_path: Path) -> None:
    settings = [
        *("optimizer.shape=constant", "optimizer.warmup=1", "optimizer.period=1"),
        *("mixture.continuation=2", "mixture.context={low: 8, mode: 12, high: 16}", "mixture.following=4"),
        *("mixture.autoregressive=2", *AUTOREGRESSIVE[2:]),
        *("running.checkpoint_gradients=true", "running.reconstruct=2", "running.validate_every=2"),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    whole = train(load_recipe(recipe_file, [*settings, "running.steps=4", "running.accumulate=2"]), one, progress=False)
    command = [sys.executable, "-m", "dodo", "train", str(recipe_file), "--out", str(two), "--json"]
    command += [f"--set={setting}" for setting in (*settings, "running.devices=2", "running.strategy=fsdp")]
    for more in (["--set=running.steps=2"], ["--set=running.steps=4", "--resume"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["steps"], result["tokens"], result["finished"]) == (4, whole.tokens, True)
    a, b = _trained(one), _trained(two)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-3, msg=name)
    a, b = _validation(one), _validation(two)
    assert a.keys() == b.keys()
    assert len({name.split("/")[1] for _, name in a if name.startswith("loss/")}) >= 3, a.keys()
    for key in a:
        assert b[key] == pytest.approx(a[key], abs=1e-4), key
    assert (one / "samples.txt").read_text() == (two / "samples.txt").read_text()


def _validation(folder: Path) -> dict[tuple[str, str], float]:
    rows = [line.split(",") for line in (folder / "validation.csv").read_text().splitlines()[1:]]
    return {(step, name): float(value) for step, name, value in rows if name not in ("tokens", "seconds")}


def test_a_run_that_is_resumed_with_a_later_end_equals_one_that_had_it_from_the_start(recipe_file: Path, tmp_path: Path) -> None:
    settings = ["optimizer.shape=constant", "optimizer.warmup=1", "optimizer.period=1"]
    train(load_recipe(recipe_file, [*settings, "running.steps=4"]), tmp_path / "whole", progress=False)
    for steps, resume in ((2, False), (4, True)):
        recipe = load_recipe(recipe_file, [*settings, f"running.steps={steps}"])
        train(recipe, tmp_path / "parts", resume=resume, progress=False)
    a, b = _trained(tmp_path / "whole"), _trained(tmp_path / "parts")
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=0, rtol=0, msg=name)


# -- the loss


def _dodo(recipe_file: Path) -> Any:
    from dodo.training.run import load_for_training

    return load_for_training(load_recipe(recipe_file))


def _batch(rows: list[list[int]], *, pad: int) -> Batch:
    """Autoencoding of rows of unequal lengths, by hand."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    targets = torch.full((len(rows), longest + 1), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), True
        targets[i, : len(row)], targets[i, len(row)] = torch.tensor(row), 1
    return Batch("autoencoding", 2.0, ids, mask, ids, mask, targets)


AUTOREGRESSIVE = [
    "mixture.autoencoding=0",
    "mixture.autoregressive=1",
    "mixture.whole={low: 16, mode: 24, high: 32}",
    "mixture.window={low: 4, mode: 4, high: 8}",
    "mixture.segment=4",
]


def test_the_autoregressive_lm_learns_and_is_saved_with_its_thresholds(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, [*AUTOREGRESSIVE, "running.steps=60", "optimizer.period=60"])
    train(recipe, tmp_path / "run", progress=False)
    rows = [line.split(",") for line in (tmp_path / "run" / "validation.csv").read_text().splitlines()]
    losses = [float(value) for _, name, value in rows if name == "loss/autoregressive/n12/r3/scorer"]
    assert losses[-1] < losses[0] - 0.5, losses
    dodo = Dodo.from_pretrained(tmp_path / "run" / "last")
    assert dodo.thresholds is not None
    assert dodo.autoregressive(ratio=3, window=4, segment=4).threshold == Pace(dodo.thresholds, 3)
    assert dodo.write("the dodo of", dodo.autoregressive(ratio=3, window=4, segment=4), max_new_tokens=2) is not None


@pytest.mark.parametrize("nuggets", [None, 2])
@pytest.mark.parametrize("way", ["scorer", "stride"])
def test_an_autoregressive_loss_is_that_of_the_parallel_pass_with_one_token_in_r(
    recipe_file: Path, way: Way, nuggets: int | None
) -> None:
    recipe = load_recipe(recipe_file)
    dodo = Dodo.from_pretrained(recipe.base, config=recipe.config, attn_implementation="sdpa")
    source = TextSource([_words_as_shard()], bos=1, eos=2)
    batch = source.autoregressive(1, 31, 3.0, np.random.default_rng(0), window=4, segment=5, nuggets=nuggets)
    found = batch_loss(dodo.compressor, batch, way)
    lm = dodo.autoregressive(threshold=0.0, window=4, segment=5, max_states=nuggets and 4 + 5 + dodo.config.keep_first + nuggets)
    if way == "stride":
        kept = torch.arange(31)[None] % 3 == 2
    else:
        scores = lm.score(batch.documents)
        kept = torch.zeros(1, 31, dtype=torch.bool).index_fill(
            1, scores[0, lm.keep_first :].topk(10).indices + lm.keep_first, True
        )
    logits = lm.forward(batch.documents, kept=kept)
    wanted = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
    torch.testing.assert_close(found.total, wanted, atol=1e-5, rtol=1e-5)
    assert found.tokens == 31
    unlimited = batch_loss(dodo.compressor, dataclasses.replace(batch, nuggets=None), way)
    assert (abs(found.sum - unlimited.sum) > 1e-3) == (nuggets is not None)


@pytest.mark.parametrize("share", [0.5, 0.875, 0.9375])
def test_a_share_of_whole_tokens_holds_as_many_nuggets_as_perplexity_is_measured_with(recipe_file: Path, share: float) -> None:
    made = load_recipe(recipe_file, [*AUTOREGRESSIVE, f"mixture.share={share}"])
    for states in (64, 128, 256):
        assert made.mixture.nuggets(whole_of(states, share)) == states - whole_of(states, share)
    assert made.mixture.nuggets(1) == 1
    batches = BatchMaker(made, TextSource([_words_as_shard()], bos=1, eos=2), None)
    for batch in map(batches, range(4)):
        assert batch.nuggets == made.mixture.nuggets(batch.window)
    assert load_recipe(recipe_file, AUTOREGRESSIVE).mixture.nuggets(4) is None
    for wrong in (0, 1, 1.5):
        with pytest.raises(InputError, match="mixture.share is between 0 and 1"):
            load_recipe(recipe_file, [*AUTOREGRESSIVE, f"mixture.share={wrong}"])
    with pytest.raises(InputError, match="give mixture.autoregressive a weight"):
        load_recipe(recipe_file, ["mixture.share=0.5"])


def _words_as_shard() -> Shard:
    ids = np.random.default_rng(1).integers(5, 60, 200)
    return Shard("text", Ragged(ids.astype(np.uint16), np.array([0, 200])))


def test_ratios_are_drawn_from_the_objectives_range_and_capped_by_the_schedule(recipe_file: Path) -> None:
    settings = ["mixture.ratio={low: 3, mode: 5, high: 20}", "mixture.ratio_from=4", "mixture.ratio_steps=50"]
    narrow = "mixture.question_ratio={low: 1, mode: 1.5, high: 2}"
    maker = BatchMaker(load_recipe(recipe_file, [*settings, narrow]), None, None)
    assert maker._ratio_range(0, "autoencoding") == Draw(3, 4, 4)
    assert maker._ratio_range(25, "recall") == Draw(3, 12, 5)
    assert maker._ratio_range(50, "autoencoding") == Draw(3, 20, 5)
    assert maker._ratio_range(0, "question") == maker._ratio_range(50, "question") == Draw(1, 2, 1.5)
    assert BatchMaker(load_recipe(recipe_file, settings), None, None)._ratio_range(50, "question") == Draw(3, 20, 5)
    wide = "mixture.question_ratio={low: 1, mode: 2, high: 54}"
    maker = BatchMaker(load_recipe(recipe_file, [*settings, wide]), None, None)
    assert [maker._ratio_range(step, "question").high for step in (0, 25, 49, 50)] == [4, 29, 53, 54]


def test_every_recipe_loads() -> None:
    recipes = sorted(Path(__file__).parents[2].glob("recipes/*.yaml"))
    assert len(recipes) > 5
    for path in recipes:
        assert load_recipe(path).name == path.stem


def test_a_run_from_before_a_key_was_known_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe_file, ["running.steps=2"]), tmp_path / "run", progress=False)
    record = tmp_path / "run" / "recipe.yaml"
    values = yaml.safe_load(record.read_text())
    del values["mixture"]["recall"]
    record.write_text(yaml.safe_dump(values))
    assert train(load_recipe(recipe_file, ["running.steps=2"]), tmp_path / "run", resume=True, progress=False).steps == 2


def test_padding_does_not_enter_the_loss(recipe_file: Path) -> None:
    compressor = _dodo(recipe_file).compressor
    rows = [[0, 10, 11, 12, 13, 14, 15], [0, 20, 21]]
    sums = []
    for pad in (5, 99):
        loss = batch_loss(compressor, _batch(rows, pad=pad))
        sums.append((loss.sum, loss.tokens))
    assert sums[0] == sums[1]
    alone = [batch_loss(compressor, _batch([row], pad=5)) for row in rows]
    assert sum(loss.tokens for loss in alone) == sums[0][1]
    assert sum(loss.sum for loss in alone) == pytest.approx(sums[0][0], rel=1e-4)


def test_only_the_first_process_takes_rows_out_of_the_logs(recipe_file: Path, tmp_path: Path) -> None:
    """Two that rewrite one file at once can empty it."""
    log = tmp_path / "validation.csv"
    log.write_text("step,name,value\n2,loss,1\n4,loss,1\n", encoding="utf-8")
    checks = Validation({}, tmp_path, load_recipe(recipe_file))
    module: Any = SimpleNamespace()
    for first, rows in ((False, 3), (True, 2)):
        trainer: Any = SimpleNamespace(is_global_zero=first, global_step=2)
        checks.on_train_start(trainer, module)
        assert len(log.read_text().splitlines()) == rows


def test_a_nan_stops_the_run_and_saves_the_batch(recipe_file: Path, tmp_path: Path) -> None:
    dodo = _dodo(recipe_file)
    with torch.no_grad():
        dodo.compressor.soft_token.fill_(float("nan"))
    (tmp_path / "run").mkdir()
    module = TrainingModule(dodo, load_recipe(recipe_file), tmp_path / "run")
    alone = SimpleNamespace(reduce=lambda counts, reduce_op: counts)
    module._trainer = SimpleNamespace(strategy=alone, global_step=0)  # type: ignore[assignment]
    with pytest.raises(NanLossError, match="batch 7"):
        module.training_step(dataclasses.replace(_batch([[0, 10, 11, 12]], pad=5), number=7), 0)
    assert list((tmp_path / "run").glob("nan-batch-7*"))


def test_a_nan_in_another_process_stops_this_one_too(recipe_file: Path, tmp_path: Path) -> None:
    module = TrainingModule(_dodo(recipe_file), load_recipe(recipe_file), tmp_path)
    both = SimpleNamespace(reduce=lambda counts, reduce_op: counts + torch.tensor([5, 1]))
    module._trainer = SimpleNamespace(strategy=both)  # type: ignore[assignment]
    with pytest.raises(NanLossError, match="another process's batch"):
        module.training_step(_batch([[0, 10, 11, 12]], pad=5), 0)
    assert not list(tmp_path.glob("nan-batch-*"))


def test_one_long_document_among_short_ones_is_not_all_that_is_trained_on(recipe_file: Path, tmp_path: Path) -> None:
    rows = [{"text": " ".join(WORDS[i:] + WORDS[:i])} for i in range(len(WORDS))] * 9 + [{"text": "x " * 200}]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    longer = ["mixture.length={low: 300, mode: 400, high: 500}", "mixture.whole={low: 400, mode: 450, high: 500}"]
    recipe = load_recipe(recipe_file, [*longer, "mixture.autoregressive=1"])
    with pytest.warns(DodoWarning, match="longer draws are cut"):
        text, questions, _ = open_sources(recipe, load_for_training(recipe), tmp_path / "run")
    assert text is not None and text.longest == 400 and text.usual < 200
    make = BatchMaker(recipe, text, questions)
    beginnings = {tuple(row[1:9].tolist()) for number in range(30) for row in make(number).documents}
    assert len(beginnings) > 10


def test_a_longer_run_by_the_same_rates_is_the_same_run(recipe_file: Path, tmp_path: Path) -> None:
    train(load_recipe(recipe_file, ["running.steps=4"]), tmp_path / "run", progress=False)
    assert train(load_recipe(recipe_file), tmp_path / "run", resume=True, progress=False).steps == 8
    with pytest.raises(InputError, match=r"it differs in optimizer\.lr"):
        train(load_recipe(recipe_file, ["optimizer.lr=1.0"]), tmp_path / "run", resume=True, progress=False)
