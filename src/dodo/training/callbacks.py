"""What happens around the steps of a run: logs, validation, checkpoints, the progress bar."""

import csv
import math
import re
import shutil
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

from dodo.data.batches import Batch
from dodo.files import write_whole
from dodo.training.in_place import put_in_place
from dodo.training.objectives import Way
from dodo.training.recipe import Recipe
from dodo.training.validation import rebuild, validate

__all__ = ["Averaging", "Checkpoints", "Deadline", "Progress", "TrainingLog", "Validation"]


class _EachStep(Callback):
    """Calls `after_step` once per optimiser step."""

    _seen = -1
    _aside = False
    """Whether its time is none of the steps'."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.after_batch(module)
        if trainer.global_step != self._seen:
            self._seen = trainer.global_step
            began = time.perf_counter()
            self.after_step(trainer, module, trainer.global_step)
            module.aside += (time.perf_counter() - began) * self._aside

    def after_batch(self, module: Any) -> None:
        """After each forward and backward pass."""

    def after_step(self, trainer: Trainer, module: Any, step: int) -> None:
        """After each optimiser step."""


class Averaging(_EachStep):
    """`optimizer.average`, before anything is measured or saved."""

    def after_step(self, trainer: Trainer, module: Any, step: int) -> None:
        module.take_into_average(step)


class TrainingLog(_EachStep):
    """`train.csv` and TensorBoard: loss and accuracy by objective, over all processes; the adapters' rate (`lr`) and the scorer's
    in the last step; gradient norms; tokens, and tokens per second of steps; per ten steps and where a run ends."""

    def __init__(self, folder: Path, every: int = 10) -> None:
        self._path, self._every = folder / "train.csv", every
        self._sums: dict[str, list[float]] = defaultdict(list)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = defaultdict(list, state["sums"])

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        super().on_train_start(trainer, module)
        self._begin(module)
        if trainer.is_global_zero:
            _forget_later_rows(self._path, trainer.global_step)

    def _begin(self, module: Any) -> None:
        self._start, self._tokens = time.perf_counter(), module.tokens_seen
        module.aside = 0.0

    def after_batch(self, module: Any) -> None:
        for key in ("loss", "accuracy"):
            self._sums[f"{key}/{module.last['objective']}"].append(module.last[key])

    def after_step(self, trainer: Trainer, module: Any, step: int) -> None:
        for name, norm in module.gradient_norms.items():
            self._sums[f"norm/{name}"].append(norm)
        if step % self._every == 0:
            self._write(trainer, module, step)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if self._sums:
            self._write(trainer, module, trainer.global_step)

    def _write(self, trainer: Trainer, module: Any, step: int) -> None:
        seconds = time.perf_counter() - self._start - module.aside
        row: dict[str, Any] = {key: sum(values) / len(values) for key, values in sorted(self._sums.items())}
        row |= {"lr": module.rates["adapters"], "lr/scorer": module.rates["scorer"], "tokens": module.tokens_seen}
        row["tokens_per_second"] = (module.tokens_seen - self._tokens) / seconds
        self._sums.clear()
        self._begin(module)
        if trainer.is_global_zero:
            _append(self._path, step, row)
            if trainer.logger:
                trainer.logger.log_metrics(row, step=step)


class Validation(_EachStep):
    """Validation now and then, `validation.csv`, sample reconstructions in `samples.txt`; early stopping.

    Attributes:
        best: lowest validation loss so far.
        improved: whether the last validation was the best.
    """

    _aside = True

    def __init__(self, batches: dict[str, Batch], folder: Path, recipe: Recipe) -> None:
        self._batches, self._folder, self._recipe = batches, folder, recipe
        self.best: float | None = None
        self.improved = False
        self._since_best = 0

    @property
    def out_of_patience(self) -> bool:
        """Whether the run should stop early."""
        return 0 < self._recipe.running.patience <= self._since_best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "since_best": self._since_best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self._since_best = state["best"], state["since_best"]

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        super().on_train_start(trainer, module)
        if trainer.is_global_zero:
            _forget_later_rows(self._folder / "validation.csv", trainer.global_step)
            _forget_later_samples(self._folder / "samples.txt", trainer.global_step)
        if self.out_of_patience:  # of a run that is resumed: it had ended
            trainer.should_stop = True

    def after_step(self, trainer: Trainer, module: Any, step: int) -> None:
        self.improved = False
        running = self._recipe.running
        if not self._batches or (step % running.validate_every and step != running.steps):
            return
        start = time.perf_counter()
        with module.averaged():
            row = self._measured(trainer, module, step) if module.takes_part else {}
        row = trainer.strategy.broadcast(row)
        row |= {"tokens": module.tokens_seen, "seconds": time.perf_counter() - start}
        self.improved = math.isfinite(row["loss"]) and (self.best is None or row["loss"] < self.best)
        self._since_best = 0 if self.improved else self._since_best + 1
        if self.improved:
            self.best = row["loss"]
        if trainer.is_global_zero:
            _append(self._folder / "validation.csv", step, row)
            if trainer.logger:
                trainer.logger.log_metrics({f"validation/{k}": v for k, v in row.items()}, step=step)
        if self.out_of_patience:
            trainer.should_stop = True

    def _measured(self, trainer: Trainer, module: Any, step: int) -> dict[str, float]:
        own: dict[str, tuple[Way, ...]] = {"compressive": ("pooled",), "icae": ("memory",), "full": ("whole",)}
        ways = own.get(self._recipe.model, ("scorer", "stride"))
        batches = {name: batch.to(module.device) for name, batch in self._batches.items()}
        row = validate(module.dodo, batches, ways)
        first = next(iter(batches))
        if self._recipe.running.reconstruct and batches[first].objective == "autoencoding":
            made = rebuild(module.dodo, batches[first], texts=self._recipe.running.reconstruct, way=ways[0])
            row[f"bleu/{first}/{ways[0]}"] = made.bleu
            if trainer.is_global_zero:
                with open(self._folder / "samples.txt", "a", encoding="utf-8") as out:
                    out.write(f"== step {step}, {first}, BLEU {made.bleu:.1f}\n")
                    out.writelines(f"-- {a!r}\n++ {b!r}\n" for a, b in list(zip(made.texts, made.rebuilt, strict=True))[:3])
        return row


class Checkpoints(_EachStep):
    """`last.ckpt` every so many steps, whole; adapters in `best/` after the best validation and `last/` at the end.

    SIGTERM, sent to any process of the run, or Ctrl-C ends it after the step at hand, resumably; Ctrl-C again ends it at once.
    """

    _aside = True

    def __init__(self, folder: Path, *, every: int, best: Validation) -> None:
        self._folder, self._every, self._best = folder, every, best
        self._told_to_stop = False
        self.interrupted = False

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        super().on_train_start(trainer, module)
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._stop) for one in (signal.SIGTERM, signal.SIGINT)}

    def _stop(self, received: int, _: Any) -> None:
        if received == signal.SIGINT:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            print("stopping after this step; Ctrl-C once more stops at once, without saving", file=sys.stderr, flush=True)
        self._told_to_stop = True

    def after_step(self, trainer: Trainer, module: Any, step: int) -> None:
        if trainer.strategy.reduce_boolean_decision(self._told_to_stop, all=False):
            trainer.should_stop = True
        if self._best.improved and module.takes_part:  # before the checkpoint that says so
            module.save_adapters(self._folder / "best")
        if step % self._every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)
        self._save(trainer)
        if module.takes_part:
            module.save_adapters(self._folder / "last")

    def _save(self, trainer: Trainer) -> None:
        part, last = self._folder / "last.ckpt.part", self._folder / "last.ckpt"
        if part.is_dir() and trainer.is_global_zero:
            shutil.rmtree(part)
        trainer.save_checkpoint(part)  # a folder, where the processes hold a part each
        if trainer.is_global_zero:
            put_in_place(part, last)


class Deadline(_EachStep):
    """Ends a run, resumably, at the step after which the time is up; `minutes` from now on."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def after_step(self, trainer: Trainer, module: Any, step: int) -> None:
        if trainer.strategy.reduce_boolean_decision(time.monotonic() >= self._end, all=False):
            trainer.should_stop = True


class Progress(_EachStep):
    """One line on stderr with loss and tokens/s; a new line every so often where stderr is no terminal."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        from tqdm import tqdm

        super().on_train_start(trainer, module)
        quiet = not sys.stderr.isatty()
        self._bar = tqdm(
            total=self._steps,
            initial=trainer.global_step,
            unit="step",
            mininterval=30 if quiet else 0.5,
            file=sys.stderr,
            disable=not trainer.is_global_zero,
        )
        self._start, self._tokens, self._loss = time.perf_counter(), module.tokens_seen, math.nan

    def after_batch(self, module: Any) -> None:
        loss = module.last["loss"]
        self._loss = loss if math.isnan(self._loss) else 0.95 * self._loss + 0.05 * loss

    def after_step(self, trainer: Trainer, module: Any, step: int) -> None:
        rate = (module.tokens_seen - self._tokens) / (time.perf_counter() - self._start)
        self._bar.set_postfix_str(f"loss {self._loss:.3f}, {module.tokens_seen:,} tokens, {rate:.0f} tokens/s", refresh=False)
        self._bar.update(1)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self._bar.close()


def _append(path: Path, step: int, row: dict[str, Any]) -> None:
    """One line of a long table: step, name, value; new names may come at any time."""
    fresh = not path.exists()
    with open(path, "a", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        if fresh:
            writer.writerow(["step", "name", "value"])
        writer.writerows([step, name, f"{value:.6g}" if isinstance(value, float) else value] for name, value in row.items())


def _forget_later_rows(path: Path, step: int) -> None:
    """A resumed run does again what came after its checkpoint; a line that was cut off goes too."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [(line, line.partition(",")[0]) for line in lines if line.endswith("\n")]
    kept = [line for i, (line, number) in enumerate(rows) if i == 0 or (number.isdigit() and int(number) <= step)]
    write_whole(path, "".join(kept))


def _forget_later_samples(path: Path, step: int) -> None:
    """Likewise of the reconstructions shown."""
    if not path.exists():
        return
    shown = re.split(r"^(?=== step \d+,)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    write_whole(path, "".join(one for one in shown if one and int(one.split()[2].rstrip(",")) <= step))
