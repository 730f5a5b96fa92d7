"""A training run from recipe to finished adapters, on Lightning: data, loop, logs, checkpoints, resuming.

The run's folder holds `recipe.yaml`, `train.csv`, `validation.csv`, `samples.txt`, TensorBoard files, `last.ckpt` for resuming,
and the adapters as `save_pretrained` writes them in `best/` and `last/`.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from dodo.adapter_files import load_scorer
from dodo.adapters import THETA
from dodo.base import computes_in
from dodo.config import CONFIG_FILE, DodoConfig
from dodo.data.batches import Batch, QuestionSource, TextSource, draw_skewed
from dodo.errors import DodoWarning, InputError
from dodo.files import write_whole
from dodo.memory import MemoryTokens
from dodo.model import Dodo
from dodo.training.callbacks import Averaging, Checkpoints, Deadline, Progress, TrainingLog, Validation
from dodo.training.fused import fused_lora
from dodo.training.in_place import recover
from dodo.training.lessons import learn_asked, learn_cost, learn_embeddings, learn_surprisal
from dodo.training.mixture import BatchMaker
from dodo.training.module import TrainingModule
from dodo.training.recipe import Memory as MemorySettings
from dodo.training.recipe import Recipe, Running, load_recipe
from dodo.training.sources import open_sources

__all__ = ["Result", "load_for_training", "train"]


@dataclass(frozen=True)
class Result:
    """What a run came to.

    steps: optimiser steps in all. loss: the best validation loss, nats per token. interrupted: by Ctrl-C. out_of_patience:
    finished before the last step, for validation got no better (`running.patience`).
    """

    folder: str
    steps: int
    tokens: int
    loss: float | None
    finished: bool
    interrupted: bool = False
    out_of_patience: bool = False


class _Endless(IterableDataset[Batch]):
    """One process's batches, from the trainer's step on: no length, so that Lightning stops by steps alone."""

    def __init__(self, make: BatchMaker, trainer: Any, per_step: int) -> None:
        self._make, self._trainer, self._per_step = make, trainer, per_step

    def __iter__(self) -> Iterator[Batch]:
        number = self._trainer.global_step * self._per_step + self._trainer.global_rank  # a resumed run's step is known by now
        while True:
            yield self._make(number)
            number += self._trainer.world_size


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    max_minutes: float | None = None,
    progress: bool = True,
    dodo: Dodo | None = None,
) -> Result:
    """Run a recipe, or go on with it.

    Args:
        recipe: see `Recipe`.
        folder: of the run.
        resume: go on from the folder's last checkpoint.
        max_minutes: stop, resumably, after this time.
        progress: show a progress bar on stderr.
        dodo: instead of loading the recipe's base (tests).

    Raises:
        InputError: the folder holds another run, there is nothing to resume, or there is no data.
        NanLossError: see there.
    """
    from lightning import Trainer
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.loggers import TensorBoardLogger

    recipe = _settled(recipe, folder, resume=resume)
    checkpoint = _claim(folder, recipe, resume=resume)
    dodo = dodo or load_for_training(recipe)
    _check_window(recipe, dodo.compressor.window)
    _check_rate(recipe)
    running = recipe.running
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    text, questions, validation = open_sources(recipe, dodo, folder, resume=resume, progress=progress)
    module = TrainingModule(dodo, recipe, folder, _sample(recipe, text))
    checks = Validation(validation, folder, recipe)
    checkpoints = Checkpoints(folder, every=running.save_every, best=checks)
    callbacks: list[Any] = [Averaging(), TrainingLog(folder), checks, checkpoints]
    callbacks += [Progress(running.steps)] if progress else []
    callbacks += [] if max_minutes is None else [Deadline(max_minutes)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        try:
            trainer = Trainer(
                accelerator=running.accelerator,
                devices=running.devices,
                num_nodes=running.nodes,
                strategy=_strategy(running),
                max_steps=running.steps,
                max_epochs=-1,
                accumulate_grad_batches=running.accumulate,
                gradient_clip_val=recipe.optimizer.clip,
                callbacks=callbacks,
                logger=TensorBoardLogger(str(folder), name="tensorboard", version="", purge_step=_next_step(checkpoint)),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                log_every_n_steps=1,
                limit_val_batches=0,
            )
        except (MisconfigurationException, RuntimeError, ImportError, ValueError) as error:
            raise _cannot(running, error) from None
        maker = BatchMaker(recipe, text, questions)
        if checkpoint is None and trainer.is_global_zero:  # the others get its weights
            if running.strategy != "fsdp":  # which puts the base's layers where they belong
                module.to(trainer.strategy.root_device)
            _teach(recipe, dodo, text, questions, progress=progress)
        loader = DataLoader(_Endless(maker, trainer, running.batches_per_step), batch_size=None)
        with fused_lora(dodo.compressor.base) if running.fused else nullcontext():
            try:
                trainer.fit(module, loader, ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=True)
            except RuntimeError as error:
                if "only supported on CUDA" in str(error):  # some strategies look at the device here only
                    raise _cannot(running, error) from None
                raise
    return Result(
        folder=str(folder),
        steps=trainer.global_step,
        tokens=module.tokens_seen,
        loss=checks.best,
        finished=trainer.global_step >= running.steps or checks.out_of_patience,
        interrupted=checkpoints.interrupted,
        out_of_patience=checks.out_of_patience and trainer.global_step < running.steps,
    )


def load_for_training(recipe: Recipe) -> Dodo:
    """The recipe's base in the dtype of the run, or quantised, with fp32 adapters: fresh ones, or those that it starts from."""
    running = recipe.running
    dodo = Dodo.from_pretrained(
        recipe.base,
        config=recipe.config,
        dtype=_dtype(running),
        attn_implementation=running.attention,
        quantization=running.quantization,
        device=_device(running),
    )
    if recipe.start is not None and recipe.start_with == "scorer":
        _check_start(recipe, dodo, "start", Path(recipe.start), names=("feature_layer",))
        load_scorer(dodo.compressor, Path(recipe.start))
        dodo.stamp()
    elif recipe.start is not None:
        _check_start(recipe, dodo, "start", Path(recipe.start))
        dodo.load_adapters(recipe.start, ignore_config=True)  # of which `_check_start` has seen to what must agree
    if recipe.start_theta is not None:
        _check_start(recipe, dodo, "start_theta", Path(recipe.start_theta))
        dodo.compressor.adapters.load(Path(recipe.start_theta), both_from=THETA)
        dodo.stamp()
    _give_memory(recipe, dodo)
    if running.checkpoint_gradients:
        dodo.compressor.adapters.checkpoint_gradients()
    for parameter in dodo.compressor.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return dodo


def _check_start(
    recipe: Recipe, dodo: Dodo, key: str, folder: Path, *, names: Sequence[str] = ("feature_layer", "keep_first", "positions")
) -> None:
    """Refuse adapters that were trained for another base, or to be used in another way: what the settings in `names` say."""
    there = DodoConfig.load(folder / CONFIG_FILE)
    if there.base_fingerprint not in (None, dodo.config.base_fingerprint):
        raise InputError(f"{key}: the adapters in {folder} were trained on another base ({there.base}), not on {recipe.base}")
    for name in names:
        one, two = getattr(there, name), getattr(recipe.config, name)
        if one != two:
            raise InputError(f"{key}: the adapters in {folder} have {name}: {one}, the recipe has {two}")


def _next_step(checkpoint: Path | None) -> int | None:
    """The first step that a resumed run will do again, for TensorBoard to forget."""
    if checkpoint is None or checkpoint.is_dir():
        return None
    return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"]) + 1


def _device(running: Running) -> str:
    """Where the base is loaded. Lightning moves it, but a quantised one is made where it stays."""
    on_cuda = running.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return f"cuda:{_local_rank()}" if running.quantization and on_cuda else "cpu"


def _local_rank() -> int:
    """Of this process on its machine, as Lightning or torchrun says it, or else SLURM."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))


def _on_cpu(running: Running) -> bool:
    return running.accelerator == "cpu" or (running.accelerator == "auto" and not torch.cuda.is_available())


def _settled(recipe: Recipe, folder: Path, *, resume: bool) -> Recipe:
    """The recipe with a type of its own in the place of `auto`, which the run keeps: a resumed run has that of its folder, and
    processes that Lightning starts have that of the first."""
    if recipe.running.dtype != "auto":
        return recipe
    record = folder / "recipe.yaml"
    of_folder = record.is_file() and (resume or _local_rank())
    dtype = load_recipe(record).running.dtype if of_folder else _fitting(recipe.running)
    return replace(recipe, running=replace(recipe.running, dtype=dtype))


def _fitting(running: Running) -> Literal["bfloat16", "float32"]:
    """bfloat16 where it takes about as long as float32, or less."""
    if _on_cpu(running):
        return "bfloat16" if computes_in(torch.bfloat16, "cpu") else "float32"
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"


def _dtype(running: Running) -> torch.dtype:
    """Of the base. A type that the CPU is slower in gets a warning, not another type: a run is what its recipe says."""
    dtype: torch.dtype = getattr(torch, _fitting(running) if running.dtype == "auto" else running.dtype)
    if running.dtype != "auto" and _on_cpu(running) and not computes_in(dtype, "cpu"):
        warnings.warn(
            f"this CPU is slower in {running.dtype}, and a step takes up to many times as long as in float32: "
            "--set running.dtype=float32",
            DodoWarning,
            stacklevel=2,
        )
    return dtype


def _give_memory(recipe: Recipe, dodo: Dodo) -> None:
    """Fresh memory tokens for ICAE, unless the adapters that it starts from have some; none for others."""
    compressor, wanted = dodo.compressor, recipe.memory
    if recipe.model != "icae":
        compressor.memory = None
    elif compressor.memory is None:
        kind = {"fixed": wanted.fixed, "aligned": wanted.aligned}
        compressor.memory = MemoryTokens.fresh(compressor.base, wanted.tokens, seed=recipe.config.seed, **kind)
    elif _kind(compressor.memory, len(compressor.memory)) != _kind(wanted, wanted.tokens):
        found = _kind(compressor.memory, len(compressor.memory))
        raise InputError(f"{recipe.start} has {found}; the recipe wants {_kind(wanted, wanted.tokens)}")


def _kind(memory: MemoryTokens | MemorySettings, tokens: int) -> str:
    return f"{tokens} memory tokens, fixed: {memory.fixed}, aligned: {memory.aligned}"


def _check_rate(recipe: Recipe) -> None:
    """Tell of a run whose rate was meant for another number of steps: most of it would learn little, or nothing."""
    rate, steps = recipe.optimizer, recipe.running.steps
    if rate.shape == "constant" and 0 < 2 * (steps - rate.warmup) < rate.period:
        share = (steps - rate.warmup) / rate.period
        told = f"after the warm-up the rate is at most {share:.1%} of optimizer.lr, and falls"
    elif rate.shape == "cosine" and rate.floor == 0 and steps > rate.period:
        told = f"the rate is 0 from step {rate.period:,} on, and nothing is learned there"
    else:
        return
    warnings.warn(
        f"the run has {steps:,} steps, {rate.warmup:,} of warm-up, and optimizer.period is {rate.period:,} ({rate.shape}): "
        f"{told}. Set optimizer.period for the steps that are run",
        DodoWarning,
        stacklevel=3,
    )


def _check_window(recipe: Recipe, window: int) -> None:
    """Refuse lengths that the base has no positions for, before the first step."""
    mixture = recipe.mixture
    needed = {
        "mixture.length": 2 * mixture.length.high + 3 if mixture.autoencoding or mixture.recall else 0,  # the text, twice
        "running.validation_lengths": _validated(recipe),
        "mixture.whole": mixture.whole.high if mixture.autoregressive else 0,
        "mixture.context and following": mixture.context.high + mixture.following + 1
        if mixture.continuation or mixture.distillation
        else 0,
    }
    for name, tokens in needed.items():
        if tokens > window:
            raise InputError(f"{name} needs up to {tokens:,.0f} positions, but {recipe.base} has a window of {window:,}")
    if mixture.autoregressive and recipe.model == "dodo":
        half, whole = window // 2, window // mixture.segment * mixture.segment
        recent = round(mixture.window.high) + mixture.segment
        if recent > half:
            raise InputError(
                f"mixture.window and segment are up to {recent:,} tokens; half the window of {recipe.base} is {half:,}"
            )
        validated = max(recipe.running.validation_lengths) if recipe.data.validation else 0
        for name, tokens in {"mixture.whole": mixture.whole.high, "running.validation_lengths": validated}.items():
            if tokens > whole:
                raise InputError(
                    f"{name} is up to {tokens:,.0f} tokens; whole segments in the window of {recipe.base} are {whole:,}"
                )


def _validated(recipe: Recipe) -> int:
    """Positions that the longest text of a validation needs."""
    mixture, longest = recipe.mixture, max(recipe.running.validation_lengths)
    if not recipe.data.validation:
        return 0
    behind = longest + 2 if mixture.autoencoding or mixture.recall else 0
    return longest + max(behind, mixture.following if mixture.continuation or mixture.distillation else 0) + 1


def _sample(recipe: Recipe, text: TextSource | None) -> list[list[int]]:
    """Texts to estimate thresholds from: about sixteen thousand tokens."""
    if text is None or recipe.model in ("icae", "full"):  # which have no scorer
        return []
    length = min(512, text.usual)
    return text.autoencoding(16_384 // length, length, 1.0, np.random.default_rng((recipe.running.seed, 4))).documents.tolist()


def _teach(recipe: Recipe, dodo: Dodo, text: TextSource | None, questions: QuestionSource | None, *, progress: bool) -> None:
    selection = recipe.selection

    def placed(batches: list[Batch]) -> list[Batch]:
        return [batch.to(dodo.device) for batch in batches]

    if selection.warm_start:
        learn_surprisal(dodo.compressor, placed(_texts_alone(recipe, text)))
    if selection.cost_start:
        batches = placed(_texts_rebuilt(recipe, text, selection.cost_start, "selection.cost_start"))
        learn_cost(dodo.compressor, batches, seed=recipe.running.seed)
    if selection.asked_start:
        batches = placed(_questions_alone(recipe, questions))
        learn_asked(dodo.compressor, dodo.tokenizer, batches, asked=selection.asked)
    if recipe.memory.lesson:
        batches = placed(_texts_rebuilt(recipe, text, recipe.memory.lesson, "memory.lesson"))
        with fused_lora(dodo.compressor.base) if recipe.running.fused else nullcontext():
            shown = tqdm(batches, "memory's lesson", unit="step", disable=not progress)
            loss = learn_embeddings(dodo.compressor, shown, lr=recipe.memory.lesson_lr)
        if progress:
            tqdm.write(f"memory's lesson: cosine {1 - loss:.2f} to the texts' embeddings", file=sys.stderr)


def _texts_alone(recipe: Recipe, text: TextSource | None) -> list[Batch]:
    """Batches for the scorer's warm start, as large as four of the run's."""
    if text is None:
        raise InputError("selection.warm_start reads plain text, but no objective of the mixture does")
    length = min(round(recipe.mixture.length.high), text.usual)
    rows = max(1, 4 * recipe.running.tokens // length)
    seed = recipe.running.seed
    return [text.autoencoding(rows, length, 1.0, np.random.default_rng((seed, i, 2))) for i in range(recipe.selection.warm_start)]


def _texts_rebuilt(recipe: Recipe, text: TextSource | None, count: int, name: str) -> list[Batch]:
    """Batches for a lesson, as large as the run's, of lengths that the run has."""
    if text is None:
        raise InputError(f"{name} reads plain text, but no objective of the mixture does")
    found, seed = [], recipe.running.seed
    for i in range(count):
        rng = np.random.default_rng((seed, i, 6))
        length = min(round(draw_skewed(recipe.mixture.length, rng)), text.usual)
        found.append(text.autoencoding(max(1, recipe.running.tokens // length), length, 1.0, rng))
    return found


def _questions_alone(recipe: Recipe, questions: QuestionSource | None) -> list[Batch]:
    """Batches for what is asked for, as large as four of the run's, with every question of their documents."""
    if questions is None:
        raise InputError("selection.asked_start reads questions, but the mixture has none")
    size, count, seed = 4 * recipe.running.tokens, recipe.selection.asked_start, recipe.running.seed
    return [questions.batch(size, questions.most, 1.0, np.random.default_rng((seed, i, 5))) for i in range(count)]


def _cannot(running: Running, error: Exception) -> InputError:
    of = f" on each of {running.nodes} nodes" if running.nodes > 1 else ""
    wanted = f"accelerator={running.accelerator}, devices={running.devices}{of}, strategy={running.strategy}"
    return InputError(f"this machine can't run {wanted}: {str(error).strip().splitlines()[0]}")


def _strategy(running: Running) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    name = running.strategy
    if name.startswith("deepspeed_stage_"):
        stage = int(name.removeprefix("deepspeed_stage_"))
        return DeepSpeedStrategy(stage=stage, logging_batch_size_per_gpu=1, exclude_frozen_parameters=True)
    if name == "auto" and running.devices * running.nodes == 1:
        return name
    return DDPStrategy(find_unused_parameters=True)  # phi ends at the last layer's keys; not every batch has the soft token


def _claim(folder: Path, recipe: Recipe, *, resume: bool) -> Path | None:
    """Make the folder this recipe's; the checkpoint to go on from, if any."""
    for name in ("last.ckpt", "best", "last"):
        recover(folder / name)
    record, last = folder / "recipe.yaml", folder / "last.ckpt"
    wanted = recipe.as_dict()
    if resume:
        if not last.exists():
            raise InputError(f"there is nothing to resume in {folder}: no last.ckpt")
        before = load_recipe(record).as_dict()
        differing = _differences(before, wanted)
        if before["optimizer"] == wanted["optimizer"]:  # a rate depends on its period: a run may be ended sooner or later
            differing = [name for name in differing if name != "running.steps"]
        if differing:
            raise InputError(f"the run in {folder} had another recipe; it differs in {', '.join(differing)}")
        write_whole(record, yaml.safe_dump(wanted, sort_keys=False))
        return last
    if last.exists():
        raise InputError(f"{folder} holds a run already; pass --resume to go on with it, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(record, yaml.safe_dump(wanted, sort_keys=False))
    return None


def _differences(before: Any, wanted: Any, where: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*before, *wanted])
        return [d for k in keys for d in _differences(before.get(k), wanted.get(k), f"{where}.{k}" if where else str(k))]
    return [] if before == wanted else [where]
