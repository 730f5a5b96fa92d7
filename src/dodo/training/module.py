"""The training step as a Lightning module: gradients to adapters, scorer and soft token; the base stays as it is.

Paper: Section 2.4 and 3. The checkpoint holds trained parameters only, and the recipe that made them.
"""

import dataclasses
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning import LightningModule
from torch import Tensor

from dodo.autoregressive import Autoregressive
from dodo.data.batches import Batch
from dodo.errors import DodoError, InputError
from dodo.model import Dodo
from dodo.thresholds import RATIOS, Thresholds
from dodo.training.fsdp import split_base
from dodo.training.in_place import put_in_place
from dodo.training.mixture import way_at
from dodo.training.objectives import batch_loss
from dodo.training.recipe import Optimizer, Recipe

__all__ = ["NanLossError", "TrainingModule", "rate_at"]


class NanLossError(DodoError):
    """The loss or a gradient is not a number; the batch has been saved."""


def rate_at(step: int, settings: Optimizer, steps: int) -> float:
    """Factor on the learning rates at a step of a run of `steps`: linear warm-up, then half a cosine down to the floor (Paper:
    Appendix B), or the full rate and at the end a line down."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    if settings.shape == "constant":
        return max(settings.floor, min(1.0, (steps - step) / max(1, settings.period)))
    done = min(1.0, (step - settings.warmup) / max(1, settings.period - settings.warmup))
    return settings.floor + (1 - settings.floor) * 0.5 * (1 + math.cos(math.pi * done))


class TrainingModule(LightningModule):
    """One compressor in training.

    Args:
        dodo: with its base in the dtype of the run.
        recipe: see `Recipe`.
        folder: where a batch is saved that gave a NaN.
        sample: token ids of texts, from which thresholds are estimated whenever adapters are saved.

    Attributes:
        tokens_seen: of documents, by all processes.
        last: objective, loss and the like of the latest batches, one of each process.
        gradient_norms, rates: of the latest step, before clipping; by group of parameters.
        aside: seconds that validations and saving took.
    """

    def __init__(self, dodo: Dodo, recipe: Recipe, folder: Path, sample: Sequence[Sequence[int]] = ()) -> None:
        super().__init__()
        self.dodo = dodo
        self.compressor = dodo.compressor
        self.recipe, self.folder, self.sample = recipe, folder, sample
        self.tokens_seen = 0
        self.gradient_norms: dict[str, float] = {}
        self.rates: dict[str, float] = {}
        self.aside = 0.0
        self._average: dict[str, Tensor] = {}

    # -- processes

    def configure_model(self) -> None:
        """Called when the processes of the run have met, before anything is on its device."""
        if self._split:
            split_base(self, self.compressor.base, self.trainer.strategy.root_device)

    @property
    def _split(self) -> bool:
        return self.recipe.running.strategy == "fsdp"

    @property
    def takes_part(self) -> bool:
        """Whether this process runs the base outside of steps: the first does; all do, where each holds a part of the base."""
        return self._split or self.trainer.is_global_zero

    # -- the step

    def training_step(self, batch: Batch, _: int) -> Tensor:
        way = way_at(self.recipe, batch.number)
        kl = (self.recipe.mixture.kl_forward, self.recipe.mixture.kl_reverse)
        loss = batch_loss(self.compressor, batch, way, divisor=batch.divisor, kl_weights=kl)
        tokens, broken = self._over_processes(batch.document_tokens, int(not math.isfinite(loss.sum)))
        if broken:  # in whichever process: all stop
            self._stop_for_nan(batch, "the loss", keep=not math.isfinite(loss.sum))
        self.tokens_seen += tokens
        counted, correct = self._over_processes(loss.tokens, loss.correct)
        total = float(self.trainer.strategy.reduce(torch.tensor(loss.sum, device=self.device), reduce_op="sum"))
        values = {"loss": total / max(1, counted), "accuracy": correct / max(1, counted), "ratio": batch.ratio}
        self.last = {"objective": batch.objective, "way": way, "length": batch.documents.shape[1], **values}
        mixture = self.recipe.mixture
        scale = {"question": mixture.question_scale, "continuation": mixture.continuation_scale}.get(batch.objective, 1.0)
        return loss.total * scale

    def _over_processes(self, *counts: int) -> list[int]:
        """The sums over the processes of the run."""
        total = torch.tensor(counts, dtype=torch.int64, device=self.device)
        summed: list[int] = self.trainer.strategy.reduce(total, reduce_op="sum").tolist()
        return summed

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._batch = batch

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """The adapters' gradient and the scorer's are clipped apart: the one would drown the other."""
        clip = self.recipe.optimizer.clip or math.inf
        self.rates = {g["name"]: float(g["lr"]) for g in optimizer.param_groups}
        self.gradient_norms = {
            g["name"]: float(torch.nn.utils.clip_grad_norm_(g["params"], clip)) for g in optimizer.param_groups
        }
        if not all(math.isfinite(norm) for norm in self.gradient_norms.values()):
            self._stop_for_nan(self._batch, "a gradient")

    def _stop_for_nan(self, batch: Batch, what: str, *, keep: bool = True) -> None:
        if not keep:
            raise NanLossError(f"{what} of another process's batch is not a finite number; that process has saved it")
        path = self.folder / f"nan-batch-{batch.number}.pt"
        torch.save({"batch": dataclasses.asdict(batch), "step": self.global_step, "recipe": self.recipe.as_dict()}, path)
        raise NanLossError(f"{what} of batch {batch.number} is not a finite number; the batch is in {path}")

    # -- optimiser

    def parameter_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        """Adapters with soft token and memory tokens, and scorer."""
        memory = self.compressor.memory
        others = [self.compressor.soft_token, *([] if memory is None else [memory.embeddings])]
        return {
            "adapters": [*self.compressor.adapters.parameters(), *others],
            "scorer": list(self.compressor.scorer.parameters()),
        }

    def configure_optimizers(self) -> Any:
        settings = self.recipe.optimizer
        rates = {"adapters": settings.lr, "scorer": settings.scorer_lr}
        groups = [{"params": p, "lr": rates[name], "name": name} for name, p in self.parameter_groups().items()]
        optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, settings, self.recipe.running.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """The rate of a run that was taken up again with another end is that of the new one from its first step on."""
        factor = rate_at(self.global_step, self.recipe.optimizer, self.recipe.running.steps)
        schedule: Any = self.lr_schedulers()
        for group, rate in zip(self.trainer.optimizers[0].param_groups, schedule.base_lrs, strict=True):
            group["lr"] = rate * factor
            self.rates[group["name"]] = group["lr"]

    # -- running average (`optimizer.average`)

    def _learning(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    @torch.no_grad()
    def take_into_average(self, step: int) -> None:
        """After step `step`: with decay d, d of the average so far and 1 - d of what learns; d is less in the first steps."""
        if not self.recipe.optimizer.average:
            return
        decay = min(self.recipe.optimizer.average, step / (10 + step))
        for name, parameter in self._learning().items():
            before = self._average.get(name, parameter).to(parameter.device)  # a resumed run's was loaded before it had a device
            self._average[name] = before.lerp(parameter, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The running average, if there is one, in the place of what learns."""
        learning = self._learning()
        latest = {name: learning[name].detach().clone() for name in self._average}
        self._put(self._average)
        try:
            yield
        finally:
            self._put(latest)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        learning = self._learning()
        for name, value in values.items():
            learning[name].copy_(value)

    # -- checkpoints

    def save_adapters(self, folder: Path) -> None:
        """Write the set of adapters as it is, or its running average, in fp16, with what it was trained as and the ratios that it
        has seen. Of the processes that take part, the first writes."""
        with self.averaged():
            self._save_adapters(folder)

    def _save_adapters(self, folder: Path) -> None:
        self.compressor.config = dataclasses.replace(
            self.compressor.config, trained_ratios=self.recipe.mixture.trained_ratios, trained_as=self.recipe.trained_as
        )
        self.dodo.thresholds = self._thresholds()
        if not self.trainer.is_global_zero:
            return
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        self.dodo.save_pretrained(part, dtype=torch.float16)
        (part / "recipe.yaml").write_text(yaml.safe_dump(self.recipe.as_dict(), sort_keys=False), encoding="utf-8")
        put_in_place(part, folder)

    def _thresholds(self) -> Thresholds | None:
        """Of the scorer as it is now. Paper: Section 2.2."""
        lm = Autoregressive(self.compressor, threshold=-math.inf, window=1, segment=1)
        scores = lm.sampled_scores(self.sample)
        enough = len(scores) >= 2 * max(RATIOS)
        return Thresholds.estimate(scores, feature_window=lm.feature_window) if enough else None

    @property
    def strict_loading(self) -> bool:
        return False

    @strict_loading.setter
    def strict_loading(self, _: bool) -> None:
        """Always off: the base is not in the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = self._learning()
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}
        checkpoint["dodo"] = {"recipe": self.recipe.as_dict(), "tokens_seen": self.tokens_seen, "average": self._average}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = set(self._learning())
        weights = checkpoint.get("state_dict", trained)  # DeepSpeed keeps them elsewhere
        if odd := sorted(trained ^ set(weights)):
            raise InputError(f"the checkpoint in {self.folder} is of another model: {odd[0]} is in one of them alone")
        self.tokens_seen = checkpoint["dodo"]["tokens_seen"]
        self._average = checkpoint["dodo"].get("average", {})  # of an older version: none
