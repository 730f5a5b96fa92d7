"""Settings that belong to one set of adapters, kept beside them in `dodo_config.json`.

The only place with defaults. Frozen, validated at construction, plain values; unknown keys are an error.
Paper: Section 3 (LoRA rank 32), footnote of Section 2.1 (feature layer 3), Section 4 (ratios 10 and 20).
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, SupportsFloat, get_args

from dodo.errors import InputError

__all__ = [
    "CONFIG_FILE",
    "DodoConfig",
    "LoraSettings",
    "PositionScheme",
    "TrainedAs",
    "Use",
    "is_finite",
    "is_number",
    "read_versioned",
]

PositionScheme = Literal["original", "compact"]
Use = Literal["text", "questions"]
"""What nuggets are for: the text itself, or questions about it."""
TrainedAs = Literal["compressor", "autoregressive", "compressive", "icae", "full"]
"""What adapters learned to be: one of Dodo's two uses, or a baseline of the paper (Sections 4 and 5)."""

CONFIG_FILE = "dodo_config.json"
CONFIG_VERSION = 1


@dataclass(frozen=True)
class LoraSettings:
    """One LoRA adapter. Paper: Section 3."""

    rank: int = 32
    """Width of the low-rank update."""
    alpha: float = 64.0
    """The update is scaled by alpha / rank; the paper is silent on it."""
    targets: Literal["qkv", "all-linear"] | tuple[str, ...] = "qkv"
    """Which projections are adapted: q, k and v (what Table 5 counts), every linear layer of a block, or names."""

    def __post_init__(self) -> None:
        _whole("LoRA rank", self.rank, least=1)
        if not (is_number(self.alpha) and self.alpha > 0):
            raise InputError(f"LoRA alpha must be a number above 0, not {self.alpha!r}")
        if isinstance(self.targets, list):  # JSON has no tuples
            object.__setattr__(self, "targets", tuple(self.targets))
        names = isinstance(self.targets, tuple) and self.targets and all(isinstance(name, str) for name in self.targets)
        if not names and self.targets not in ("qkv", "all-linear"):
            raise InputError(f"LoRA targets must be 'qkv', 'all-linear' or a list of module names, not {self.targets!r}")


@dataclass(frozen=True)
class DodoConfig:
    """All that must be known, besides the weights, to use a set of adapters as it was trained."""

    feature_layer: int = 3
    """iota: the scorer reads the hidden states after this many layers of the base, adapters off (1 .. layers - 1)."""
    ratio: float = 10.0
    """r, tokens per nugget, where a call names neither a ratio nor a number of nuggets."""
    trained_ratios: tuple[float, float] | None = None
    """Lowest and highest ratio seen in training; outside them a warning is given. None: never trained."""
    trained_as: TrainedAs | None = None
    """What the adapters learned to be; used as something else they give a warning. None: nothing, several things, or unknown."""
    keep_first: bool = True
    """Keep the first token as one more nugget (attention sink); it is put in front if the tokenizer has a BOS token."""
    positions: PositionScheme = "original"
    """Rotary positions of nuggets: those of their tokens, decoder at n; or compact, 0 .. k-1, decoder at k."""
    selection: Literal["top-k", "density", "coverage"] = "top-k"
    """The k best-scored tokens (paper); or k tokens spread over the text, closer together where scores are high; or the k tokens
    that leave least out of their reach."""
    reach: float = 10.0
    """Tokens before a nugget that it holds, about; for selection by coverage."""
    runs: bool = False
    """Nuggets for the text itself lie where most of it comes back word for word; else where least is lost, as those for questions
    do. For selection by coverage."""
    scores_by_use: bool = False
    """The scorer has a score for each use of a text, itself and questions about it; else one serves all (paper)."""
    encoder: LoraSettings = field(default_factory=LoraSettings)
    """phi."""
    decoder: LoraSettings = field(default_factory=LoraSettings)
    """theta."""
    seed: int = 0
    """Seeds fresh adapters and scorer, so that two processes with the same settings agree."""
    base: str | None = None
    """Hub id, folder, GGUF file or alias of the base that the adapters belong to."""
    base_fingerprint: str | None = None
    """Fingerprint of that base's weights; checked at load."""

    def __post_init__(self) -> None:
        for name in ("encoder", "decoder"):
            value = getattr(self, name)
            if isinstance(value, dict):
                object.__setattr__(self, name, _from_mapping(LoraSettings, value, where=name))
            elif not isinstance(value, LoraSettings):
                raise InputError(f"{name} must be settings of a LoRA adapter, not {value!r}")
        if isinstance(self.trained_ratios, list):
            object.__setattr__(self, "trained_ratios", tuple(self.trained_ratios))
        _whole("feature_layer", self.feature_layer, least=1)
        _whole("seed", self.seed, least=0)
        if not _is_ratio(self.ratio):
            raise InputError(f"ratio must be a number of at least 1, not {self.ratio!r}")
        if self.trained_ratios is not None and not _is_range(self.trained_ratios):
            raise InputError(f"trained_ratios must be the lowest and the highest ratio, not {self.trained_ratios!r}")
        if self.trained_as is not None and self.trained_as not in get_args(TrainedAs):
            raise InputError(f"trained_as must be one of {', '.join(get_args(TrainedAs))} or nothing, not {self.trained_as!r}")
        if not isinstance(self.keep_first, bool):
            raise InputError(f"keep_first must be true or false, not {self.keep_first!r}")
        for name in ("scores_by_use", "runs"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.selection not in ("top-k", "density", "coverage"):
            raise InputError(f"selection must be 'top-k', 'density' or 'coverage', not {self.selection!r}")
        if not is_number(self.reach) or self.reach <= 0:
            raise InputError(f"reach must be a number of tokens above 0, not {self.reach!r}")
        if self.positions not in ("original", "compact"):
            raise InputError(f"positions must be 'original' or 'compact', not {self.positions!r}")
        for name in ("base", "base_fingerprint"):
            if not isinstance(getattr(self, name), str | None):
                raise InputError(f"{name} must be text, not {getattr(self, name)!r}")

    @property
    def by_use(self) -> bool:
        """Whether other tokens become nuggets for the text itself than for questions."""
        return self.scores_by_use or (self.runs and self.selection == "coverage")

    def to_json(self) -> str:
        """The whole configuration as indented JSON, with the version of its format."""
        return json.dumps({"version": CONFIG_VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    def identity(self) -> str:
        """What nuggets depend on, as JSON. What a later version adds is left out where it has no effect, so that the nuggets of
        earlier versions still belong to their adapters."""
        plain = dataclasses.replace(self, base=None, base_fingerprint=None, ratio=1.0, trained_ratios=None, seed=0)
        values = {"version": CONFIG_VERSION, **dataclasses.asdict(plain)}
        del values["trained_as"]
        if self.selection != "coverage":
            del values["reach"]
        if not (self.runs and self.selection == "coverage"):
            del values["runs"]
        if not self.scores_by_use:
            del values["scores_by_use"]
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "dodo_config.json") -> "DodoConfig":
        """Read what `to_json` wrote.

        Raises:
            InputError: not JSON, an unknown key, a bad value, or a version later than this package knows.
        """
        values = read_versioned(text, newest=CONFIG_VERSION, where=where)
        return _from_mapping(cls, values, where=where)

    @classmethod
    def load(cls, path: str | Path) -> "DodoConfig":
        """Read a `dodo_config.json` file.

        Raises:
            InputError: no such file, or see `from_json`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"could not read {path}: {error}") from None
        return cls.from_json(text, where=str(path))


def read_versioned(text: str, *, newest: int, where: str) -> dict[str, Any]:
    """The object in a JSON text that has the version of its format in it, without the version.

    Raises:
        InputError: not JSON, not an object, or a version that is none or later than the newest known.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{where} must hold a JSON object, not {type(values).__name__}")
    version = values.pop("version", None)
    if type(version) is not int or version < 1:
        raise InputError(f"{where} has no valid format version")
    if version > newest:
        raise InputError(f"{where} has format version {version}; this dodo reads up to {newest}: upgrade it")
    return values


def _from_mapping(cls: type, values: dict[str, Any], *, where: str) -> Any:
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - known):
        raise InputError(f"{where} has unknown keys: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _whole(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")


def is_number(value: object) -> bool:
    """Whether a value is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def is_finite(number: SupportsFloat) -> bool:
    """Whether a number, as a float, is finite; an int beyond all floats is not."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _is_ratio(value: Any) -> bool:
    return is_number(value) and value >= 1


def _is_range(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_ratio, value)) and value[0] <= value[1]
