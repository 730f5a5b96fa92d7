"""A recipe: everything that a training run depends on, in one YAML file.

Frozen dataclasses own the defaults and refuse what can't be; unknown keys fail. The resolved recipe is kept with every
checkpoint. Paper: Section 3 and Appendix B for the defaults of rates, betas and warm-up.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from dodo.config import DodoConfig, TrainedAs
from dodo.data.batches import Draw, Objective
from dodo.errors import InputError

__all__ = ["Data", "Memory", "Mixture", "Optimizer", "Recipe", "Running", "Selection", "load_recipe"]


@dataclass(frozen=True)
class Data:
    """Where the tokens come from: tokenised shards, or sources that are tokenised when the run starts."""

    text: tuple[str, ...] = ()
    """Shards (.safetensors) or sources of documents."""
    questions: str | None = None
    """Shard of documents with questions."""
    longest: int = 512
    """Documents with questions of more tokens are left out, and how many is told."""
    validation: tuple[str, ...] = ()
    """Shards or sources of documents that are never trained on."""
    commercial_only: bool = True
    """Leave out records whose licence forbids commercial use, when sources are tokenised."""
    tokens: int = 0
    """Of each source, when it is tokenised, so many and the rest of the last document; 0: all. A dataset of the hub is streamed,
    and read no further."""

    def __post_init__(self) -> None:
        _at_least("data", self, 0, "tokens")
        _at_least("data", self, 1, "longest")


@dataclass(frozen=True)
class Mixture:
    """What a batch is. Weights are relative."""

    autoencoding: float = 1.0
    """Texts to be rebuilt. Paper: Section 4."""
    recall: float = 0.0
    """Beyond the paper: some of a text from anywhere within it, given the few tokens before."""
    continuation: float = 0.0
    """A text's next tokens, given what is before them as nuggets. Paper: Section 6, zero-shot."""
    question: float = 0.0
    """Answers to questions about a document. Paper: Section 6, fine-tuning."""
    distillation: float = 0.0
    """Continuations, towards what the base itself, reading everything, expects. Beyond the paper."""
    autoregressive: float = 0.0
    """Eq. 11; the adapters become those of an autoregressive LM, and are saved with thresholds."""
    ratio: Draw = Draw(10.0, 10.0, 10.0)
    """Tokens per nugget, drawn per batch. Paper: fixed."""
    question_ratio: Draw | None = None
    """Of question batches; None: as of all. Answers are learned at low ratios first."""
    length: Draw = Draw(512.0, 512.0, 512.0)
    """Tokens of a text to be rebuilt or recalled, drawn per batch."""
    context: Draw = Draw(512.0, 512.0, 512.0)
    """Tokens encoded before a continuation."""
    following: int = 128
    """Tokens of the continuation; never more than half the context."""
    whole: Draw = Draw(1024.0, 1024.0, 1024.0)
    """Tokens of a text that is predicted token by token."""
    window: Draw = Draw(128.0, 128.0, 128.0)
    """tau, recent tokens seen uncompressed, drawn per batch."""
    share: float | None = None
    """tau / S: what part of its states a token sees uncompressed, like `--whole` of `dodo evaluate perplexity`; its nuggets are
    the latest tau (1 - share) / share. None: all of the text's. Paper: half, where it measures (Table 1)."""
    segment: int = 64
    """Tokens that share a splitting index."""
    questions_per_document: int = 2
    """At most; drawn from those that a document has."""
    among: Draw | None = None
    """Tokens of a document with questions, drawn per batch: paragraphs one after the other up to so many, with questions about
    any of them, so that an answer has to be found; at least one, however long. None: one. Beyond the paper."""
    question_scale: float = 1.0
    """Factor on the loss of question batches: they have few tokens with a loss, so their gradient is noisy."""
    continuation_scale: float = 1.0
    """Likewise of continuations."""
    kl_forward: float = 1.0
    """Weight of KL(base, decoder) in distillation."""
    kl_reverse: float = 0.0
    """Weight of KL(decoder, base)."""
    ratio_from: float | None = None
    """Schedule: draws are capped at this ratio at first, and the cap rises to the whole range over `ratio_steps` steps."""
    ratio_steps: int = 0

    @property
    def trained_ratios(self) -> tuple[float, float]:
        """Lowest and highest ratio that a batch may have."""
        objectives = [name for name in typing.get_args(Objective) if getattr(self, name)]
        drawn = {(name == "question" and self.question_ratio) or self.ratio for name in objectives}
        return min(ratio.low for ratio in drawn), max(ratio.high for ratio in drawn)

    def nuggets(self, window: int) -> int | None:
        """Held at most beside a window of so many tokens."""
        return None if self.share is None else max(1, round(window * (1 - self.share) / self.share))

    def __post_init__(self) -> None:
        weights = [getattr(self, name) for name in typing.get_args(Objective)]
        if min(weights) < 0 or sum(weights) == 0:
            raise InputError("mixture: the weights of the objectives must not be negative, and one must be positive")
        if self.among is not None and not self.question:
            raise InputError("mixture.among is of questions, and the mixture has none: give mixture.question a weight")
        if self.segment < 1 or self.window.low < 1:
            raise InputError("mixture: window and segment are at least 1 token")
        if self.share is not None and not 0 < self.share < 1:
            raise InputError(f"mixture.share is between 0 and 1, not {self.share:g}")
        if self.share is not None and not self.autoregressive:
            raise InputError("mixture.share is of an autoregressive LM: give mixture.autoregressive a weight")
        for name in ("length", "context", "whole", "among"):
            if (tokens := getattr(self, name)) is not None and tokens.low < 1:
                raise InputError(f"mixture.{name}: at least 1 token is drawn, not {tokens.low}")
        for ratio in filter(None, (self.ratio, self.question_ratio)):
            if ratio.low < 1:
                raise InputError(f"mixture.ratio: ratios are at least 1, not {ratio.low}")
        if (self.ratio_from is None) != (self.ratio_steps == 0):
            raise InputError("mixture: ratio_from and ratio_steps go together")
        _at_least("mixture", self, 1, "following", "questions_per_document")
        _at_least("mixture", self, 0, "ratio_steps", "question_scale", "continuation_scale", "kl_forward", "kl_reverse")


@dataclass(frozen=True)
class Selection:
    """How tokens are selected while the scorer learns."""

    warm_start: int = 0
    """Steps before the first in which the scorer learns to tell how surprising each token is to the base (`lessons.py`)."""
    cost_start: int = 0
    """Steps before the first, after those, in which the scorer learns what these adapters lose with each token (`lessons.py`)."""
    asked_start: int = 0
    """Steps before the first, after those, in which the scorer learns besides which tokens questions ask for (`lessons.py`)."""
    asked: float = 30.0
    """What an answer's token costs more then, if it is lost; the others cost about 1 to 3."""
    handover: tuple[int, int] = (0, 0)
    """A fixed stride selects until the first of these steps, then the scorer more and more often, and always from the second. The
    first may lie before the run."""

    def __post_init__(self) -> None:
        if self.asked <= 0:
            raise InputError(f"selection.asked is above 0, not {self.asked}")
        _at_least("selection", self, 0, "warm_start", "cost_start", "asked_start")
        if self.handover[0] > self.handover[1]:
            raise InputError(f"selection.handover ends no sooner than it begins, not {list(self.handover)}")

    @property
    def lessons(self) -> bool:
        """Whether the scorer is taught before the first step."""
        return bool(self.warm_start or self.cost_start or self.asked_start)


@dataclass(frozen=True)
class Memory:
    """Memory tokens of the baseline ICAE."""

    tokens: int = 128
    """M. Paper: Section 4.1."""
    fixed: bool = True
    """Every text gets all of them (paper); or, as many as it would get nuggets, tokens / ratio, at most all."""
    aligned: bool = False
    """They stand at positions along the text, and their outputs are as long as embeddings (`icae.py`). Beyond the paper."""
    lesson: int = 0
    """Steps before the first in which they learn to give each token's embedding back (`lessons.py`). Beyond the paper."""
    lesson_lr: float = 3e-3
    """Of that lesson alone."""

    def __post_init__(self) -> None:
        _at_least("memory", self, 1, "tokens")
        _at_least("memory", self, 0, "lesson", "lesson_lr")
        if self.lesson and not self.aligned:
            raise InputError("memory.lesson needs memory.aligned: other slots belong to no part of a text")


@dataclass(frozen=True)
class Optimizer:
    """AdamW, cosine with warm-up. Paper: Appendix B."""

    lr: float = 1e-4
    """Of LoRA, soft token and memory tokens."""
    scorer_lr: float = 1e-4
    """Of the scorer."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-5
    weight_decay: float = 0.0
    warmup: int = 2000
    """Steps."""
    shape: Literal["cosine", "constant"] = "cosine"
    """Over `period` steps, or constant until the last `period` steps and a straight line down in them: such a run can be ended
    anywhere."""
    period: int = 150_000
    """Steps of the cosine's half wave, or of the line."""
    floor: float = 0.0
    """Where the rate ends, as a fraction."""
    clip: float = 1.0
    """Largest norm of the gradient of the adapters, and of the scorer's apart; 0: as they are."""
    average: float = 0.0
    """Decay of a running average of what learns, such as 0.99 (shorter at first); 0: none. The average is what is validated and
    saved as adapters; the steps themselves do not know of it."""

    def __post_init__(self) -> None:
        if not 0 <= self.average < 1:
            raise InputError(f"optimizer.average is from 0 to below 1, not {self.average}")
        _at_least("optimizer", self, 0, "lr", "scorer_lr", "weight_decay", "warmup", "floor", "clip")
        _at_least("optimizer", self, 1, "period")
        if self.eps <= 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer: eps is above 0, betas are from 0 to below 1, not {self.eps} and {list(self.betas)}")


@dataclass(frozen=True)
class Running:
    """How the run goes."""

    steps: int = 150_000
    """Optimiser steps."""
    tokens: int = 512
    """Document tokens of one forward pass (rows = tokens / length)."""
    accumulate: int = 1
    """Forward passes in one step."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Of the frozen base; trained parameters stay fp32. auto: bfloat16, but float32 where that is clearly faster or a GPU lacks
    bfloat16; the run keeps it. On several machines name one."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Of the frozen base, through bitsandbytes (an extra), as by QLoRA. Not with fsdp or DeepSpeed."""
    attention: Literal["eager", "sdpa"] = "sdpa"
    """transformers' attention of the base."""
    fused: bool = True
    """LoRA layers and the loss compute with fewer copies (`fused.py`); the same numbers."""
    checkpoint_gradients: bool = False
    """Layers are computed again in the backward pass: less memory, more time; the same gradients."""
    devices: int = 1
    """Of each machine."""
    nodes: int = 1
    """Machines, on each of which the command is started by `torchrun` or SLURM, with one folder that all of them see."""
    strategy: Literal["auto", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2"] = "auto"
    """How several devices work together. All but fsdp hold the whole base on each of them; fsdp splits its layers (`fsdp.py`) and
    is DDP for what learns. DeepSpeed is an extra; it clips adapters and scorer by one norm, and its stage 3, which splits all
    parameters, is refused: the loss reads the output matrix outside of the base's own forward pass."""
    accelerator: str = "auto"
    """Lightning's: auto, cpu, gpu, mps."""
    validate_every: int = 500
    """Steps between validations."""
    validation_texts: int = 16
    """Of each length, the same at every validation."""
    validation_lengths: tuple[int, ...] = (64, 128)
    """Tokens."""
    validation_ratios: tuple[float, ...] = (5.0, 10.0)
    """What is best is best by the mean over all lengths and ratios."""
    reconstruct: int = 4
    """Validation texts that are rebuilt greedily for BLEU, at the first length and ratio; 0: none."""
    save_every: int = 100
    """Steps between checkpoints."""
    patience: int = 0
    """Validations without a better loss after which the run stops; 0: never."""
    seed: int = 0
    """Of the batches. A run that goes on from another's adapters takes another, or it sees the same texts and questions again."""

    def __post_init__(self) -> None:
        _at_least("running", self, 1, "steps", "tokens", "accumulate", "devices", "nodes")
        _at_least("running", self, 1, "validate_every", "validation_texts", "save_every")
        _at_least("running", self, 0, "reconstruct", "patience", "seed")
        if self.quantization and self.strategy not in ("auto", "ddp"):
            raise InputError(f"running.quantization is for the strategies auto and ddp, not for {self.strategy}")
        if min(self.validation_lengths, default=0) < 1 or min(self.validation_ratios, default=0) < 1:
            raise InputError("running: validation_lengths and validation_ratios are lists of numbers of at least 1")

    @property
    def batches_per_step(self) -> int:
        """Forward passes of all processes in one optimiser step."""
        return self.accumulate * self.devices * self.nodes


@dataclass(frozen=True)
class Recipe:
    """A named run."""

    base: str
    name: str = "dodo"
    model: Literal["dodo", "compressive", "icae", "full"] = "dodo"
    """What is trained: Dodo; theta alone over means of the past, the baseline of Section 5.1; memory tokens with phi, that of
    Section 4.1; or theta alone over the whole text, Full as trained for Section 5 and fine-tuned for Section 6."""
    start: str | None = None
    """Folder of adapters and scorer to start from; None: fresh ones."""
    start_with: Literal["all", "scorer"] = "all"
    """What is taken from there. Paper: Section 2.2, the autoregressive LM's scorer starts from the compressor's."""
    start_theta: str | None = None
    """Folder of a trained Full, or other adapters, whose theta both adapters begin with: what is kept of a text is then first
    read as its whole tokens are, by a theta that reads them well. Not from the paper."""
    config: DodoConfig = field(default_factory=DodoConfig)
    data: Data = field(default_factory=Data)
    mixture: Mixture = field(default_factory=Mixture)
    selection: Selection = field(default_factory=Selection)
    memory: Memory = field(default_factory=Memory)
    optimizer: Optimizer = field(default_factory=Optimizer)
    running: Running = field(default_factory=Running)

    def __post_init__(self) -> None:
        if self.optimizer.average and self.running.strategy.startswith("deepspeed"):
            raise InputError("optimizer.average is for the strategies auto, ddp and fsdp")
        if self.model == "compressive":
            self._check_compressive()
        if self.model == "full":
            self._check_full()
        if self.model != "icae" and self.memory.lesson:
            raise InputError("memory.lesson is for model: icae, which alone has memory tokens")
        if self.model == "icae" and (self.mixture.autoregressive or self.mixture.distillation or self.selection.lessons):
            raise InputError(
                "ICAE is no language model and has no scorer: autoregressive, distillation and its lessons (*_start) are 0"
            )

    def _check_compressive(self) -> None:
        ratio, others = self.mixture.ratio, [name for name in typing.get_args(Objective) if name != "autoregressive"]
        if ratio.low != ratio.high or ratio.low != int(ratio.low):
            raise InputError(
                "mixture.ratio: the compressive model averages a fixed whole number of tokens: low, mode and high alike"
            )
        if any(getattr(self.mixture, name) for name in others) or self.selection.lessons:
            names = ", ".join([*others, "warm_start", "cost_start"])
            raise InputError(f"the compressive model has no scorer and one objective: {names} and asked_start are 0")

    def _check_full(self) -> None:
        whole = Draw(1.0, 1.0, 1.0)
        if self.mixture.ratio != whole or self.mixture.question_ratio not in (None, whole):
            raise InputError(
                "model: full reads the whole text, so mixture.ratio and question_ratio are {low: 1, mode: 1, high: 1}"
            )
        fits = ("question", "continuation", "autoregressive")
        others = [name for name in typing.get_args(Objective) if name not in fits]
        if any(getattr(self.mixture, name) for name in others) or self.selection.lessons:
            names = ", ".join([*others, "warm_start", "cost_start"])
            raise InputError(f"model: full selects nothing and can learn {', '.join(fits)}: {names} and asked_start are 0")

    @property
    def trained_as(self) -> TrainedAs | None:
        """What the adapters learn to be; None where they learn both of Dodo's uses."""
        if self.model != "dodo":
            return self.model
        learned = {name for name in typing.get_args(Objective) if getattr(self.mixture, name)}
        if "autoregressive" not in learned:
            return "compressor"
        return "autoregressive" if len(learned) == 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON have them."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` settings (`running.steps=100`).

    Raises:
        InputError: no such file, not YAML, an unknown key, or a value that can't be.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"recipe {path} can't be read: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"recipe {path} is not YAML: {_told(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"recipe {path} must hold keys and values")
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r}: key=value is wanted, as in running.steps=100")
        place = values
        *parents, last = key.strip().split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise InputError(f"--set {setting!r}: {parent} is not a group of keys")
        try:
            place[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError(f"--set {setting!r}: the value is not YAML: {_told(error)}") from None
    recipe: Recipe = build(Recipe, values, where=str(path))
    return recipe


def _told(error: yaml.YAMLError) -> str:
    """What is wrong, and where."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return str(error).splitlines()[0]


def build(kind: Any, value: Any, *, where: str) -> Any:
    """A dataclass out of nested plain values, with every type checked."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise InputError(f"{where}: keys and values are wanted, not {value!r}")
        hints = typing.get_type_hints(kind)
        if unknown := sorted(set(value) - set(hints)):
            raise InputError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(hints))}")
        needed = {f.name for f in dataclasses.fields(kind) if f.init and f.default is f.default_factory is dataclasses.MISSING}
        if missing := sorted(needed - set(value)):
            raise InputError(f"{where}: {missing[0]} is missing")
        made = {key: build(hints[key], entry, where=f"{where}: {key}") for key, entry in value.items()}
        try:
            return kind(**made)
        except TypeError as error:
            raise InputError(f"{where}: {error}") from None
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return build(option, value, where=where)
            except InputError:
                continue
        raise InputError(f"{where}: {value!r} is not of a kind that fits")
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{where}: {value!r} is none of {', '.join(map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{where}: a list is wanted, not {value!r}")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) != len(value):
            raise InputError(f"{where}: {len(kinds)} values are wanted, not {len(value)}")
        return tuple(build(k, v, where=where) for k, v in zip(kinds, value, strict=True))
    return _scalar(kind, value, where=where)


def _at_least(where: str, settings: Any, least: int, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < least:
            raise InputError(f"{where}.{name} is at least {least}, not {getattr(settings, name)}")


def _scalar(kind: Any, value: Any, *, where: str) -> Any:
    if kind is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a string
        try:
            value = float(value)
        except ValueError:
            raise InputError(f"{where}: a number is wanted, not {value!r}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is type(None) and value is None:
        return None
    if not isinstance(kind, type) or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{where}: {getattr(kind, '__name__', kind)} is wanted, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where}: a finite number is wanted, not {value}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
