"""Flags that several verbs share, and what they stand for: a loaded model, nuggets of a source, settings of generation."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from dodo.cli.sources import Source
from dodo.cli.terminal import note, reporter, silence_libraries
from dodo.errors import FingerprintMismatch, InputError
from dodo.loading import Loading

if TYPE_CHECKING:
    from dodo.config import Use
    from dodo.model import Dodo
    from dodo.nuggets import Nuggets

__all__ = [
    "DEFAULT_LANGUAGE_MODEL",
    "DEFAULT_MODEL",
    "FOR",
    "Sampling",
    "adapters_state",
    "check_device",
    "check_selection",
    "generation_options",
    "json_option",
    "language_model_options",
    "load_model",
    "load_nuggets",
    "model_options",
    "note_fresh",
    "ratio_option",
    "ratio_value",
    "refuse_selection",
    "sampling_options",
    "selection_options",
    "size",
    "use_option",
]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_LANGUAGE_MODEL = "smollm2-135m-autoregressive"

F = TypeVar("F", bound=Callable[..., Any])


def ratio_value(value: str) -> float:
    """r: a finite number of at least 1."""
    try:
        ratio = float(value)
    except ValueError:
        ratio = math.nan
    if not math.isfinite(ratio) or ratio < 1:
        raise click.BadParameter(f"{value} must be a number of at least 1 (10 keeps one token in ten)")
    return ratio


def model_options_for(default: str | None, *, shown: str | bool = True) -> Callable[[F], F]:
    """--model with a default, and what help says of it, --base, --device, --dtype, --quantization: one argument,
    `loading`. Without a default, its model is "" where none is named."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def with_loading(
            *args: Any, model: str | None, base: str | None, device: str | None, dtype: str, quantization: Any, **flags: Any
        ) -> Any:
            return function(*args, loading=Loading(model or "", base, device, dtype, quantization), **flags)

        decorated: Any = with_loading
        for option in (
            click.option(
                "--dtype",
                type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                default="auto",
                show_default=True,
                help="Type of the base's weights in memory; auto takes the stored one, or float32 on a CPU that is slow in it.",
            ),
            click.option(
                "--quantization",
                type=click.Choice(["4bit", "8bit"]),
                help="Hold the base's weights in so many bits, through bitsandbytes. [default: no]",
            ),
            click.option("--device", help="Where to compute: cpu, cuda, cuda:1, mps. [default: a GPU if there is one]"),
            click.option(
                "--base",
                metavar="B",
                help="The base, in place of the one that the adapters name: alias, folder, .gguf file or hub id.",
            ),
            click.option(
                "--model",
                "-m",
                default=default,
                show_default=shown,
                metavar="M",
                help="Adapters (folder or hub id), or a base: alias, folder, .gguf file or hub id.",
            ),
        ):
            decorated = option(decorated)
        return cast(F, decorated)

    return decorate


model_options = model_options_for(DEFAULT_MODEL)
language_model_options = model_options_for(DEFAULT_LANGUAGE_MODEL)
"""Of `generate` and `chat`, whose adapters are those of an autoregressive LM."""

ratio_option = click.option(
    "--ratio", "-r", type=ratio_value, metavar="R", help="Tokens per nugget; 10 keeps one in ten. [default: the model's]"
)


def selection_options(function: F) -> F:
    """--ratio, --nuggets."""
    nuggets = click.option("--nuggets", type=click.IntRange(min=1), metavar="K", help="Number of nuggets, instead of a ratio.")
    return ratio_option(nuggets(function))


def generation_options(function: F) -> F:
    """Those of sampling, and --trust-nuggets."""
    trust = click.option(
        "--trust-nuggets", is_flag=True, help="Use nuggets although their fingerprint says that another model made them."
    )
    return sampling_options(trust(function))


def sampling_options(function: F) -> F:
    """--max-new-tokens, --temperature, --top-p, --seed."""
    for option in (
        click.option(
            "--seed", type=click.IntRange(0, 2**63 - 1), metavar="S", help="Of sampling; the same seed gives the same text."
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(0, 1, min_open=True),
            metavar="P",
            help="Sample among the likeliest tokens that make up this probability.",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(0, 100),
            metavar="T",
            help="Sample at this temperature. [default: 0, the likeliest token each time]",
        ),
        click.option("--max-new-tokens", type=click.IntRange(min=1), metavar="N", help="At most so many tokens."),
    ):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for flag, value in (("--temperature", self.temperature), ("--top-p", self.top_p)):
            if value is not None and not math.isfinite(value):
                raise click.UsageError(f"{flag} {value}: must be a number")
        if self.temperature == 0 and self.top_p is not None:
            raise click.UsageError(f"--top-p {self.top_p:g}: has no effect with --temperature 0; leave one of them out")
        if self.seed is not None and not self.on:
            raise click.UsageError(f"--seed {self.seed}: has no effect without sampling; add --temperature or --top-p")

    @property
    def on(self) -> bool:
        """Whether tokens are drawn, rather than the likeliest taken."""
        return bool(self.temperature) or (self.temperature is None and self.top_p is not None)

    def settings(self) -> dict[str, Any]:
        """For `Dodo.generate`; seeds torch's generator."""
        if not self.on:
            return {}
        import torch

        if self.seed is not None:
            torch.manual_seed(self.seed)
        return {"do_sample": True, "temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}


FOR: dict["Use", str] = {"questions": "questions about the text", "text": "the text itself, to rebuild it"}
"""What nuggets are for, in words."""

use_option = click.option(
    "--for",
    "use",
    type=click.Choice(["questions", "text"]),
    default="questions",
    show_default=True,
    help="What the nuggets are for: questions about the text, or to rebuild it. Of no effect on adapters that don't tell.",
)


def check_selection(ratio: float | None, nuggets: int | None) -> None:
    """Refuse both flags at once."""
    if ratio is not None and nuggets is not None:
        raise click.UsageError(f"--ratio {ratio:g} and --nuggets {nuggets}: give one of them, not both")


def load_model(loading: Loading) -> tuple["Dodo", float]:
    """The model that --model and the flags beside it name, and the seconds it took to load, imports included.

    Raises:
        click.UsageError: a flag's value names nothing that can be used.
    """
    began = time.perf_counter()
    with reporter() as report:
        report(f"loading {loading.model}", 0, 0)
        silence_libraries()
        from dodo.base import computes_in

        if loading.device is not None:
            check_device(loading.device)
        try:
            loaded = loading.load(report)
        except InputError as error:
            named = f"--model {loading.model}" + ("" if loading.base is None else f" --base {loading.base}")
            raise click.UsageError(f"{named}: {error}") from None
    held = loaded.compressor.base.dtype
    if loading.dtype != "auto" and not computes_in(held, loaded.device):
        note(f"this CPU is slower in {loading.dtype}: reading a text takes up to several times as long as with --dtype float32")
    return loaded, time.perf_counter() - began


def note_fresh(dodo: "Dodo") -> None:
    """Say so if the adapters have never been trained."""
    if not dodo.is_trained:
        note(
            "adapters are fresh (untrained): nuggets are the base model's own states of tokens picked by an untrained scorer, "
            "so expect little from them above ratio 1"
        )


def adapters_state(dodo: "Dodo") -> str:
    """'trained' or 'fresh'."""
    return "trained" if dodo.is_trained else "fresh"


def load_nuggets(
    dodo: "Dodo", source: Source, *, ratio: float | None, nuggets: int | None, use: "Use", trust: bool
) -> tuple["Nuggets", dict[str, float]]:
    """Nuggets of one text: out of a file, or by compressing it now. Also the seconds of that.

    Raises:
        NuggetsFileError: the file is damaged, or holds several texts.
        FingerprintMismatch: another model made it, and `trust` is false.
    """
    from dodo.errors import NuggetsFileError
    from dodo.nuggets import Nuggets

    began = time.perf_counter()
    if isinstance(source, str):
        made = dodo.compress(source, ratio=ratio, nuggets=nuggets, use=use)
        return made, {"compress": time.perf_counter() - began}
    made = Nuggets.load(source)
    if made.batch_size != 1:
        raise NuggetsFileError(
            f"{source} holds the nuggets of {made.batch_size} texts; the command line takes one: save nuggets[i]"
        )
    if trust:
        return dodo.adopt(made), {"read": time.perf_counter() - began}
    try:
        dodo.fingerprint.check(made.fingerprint, what=str(source))
    except FingerprintMismatch as error:
        raise FingerprintMismatch(f"{error} (--trust-nuggets)") from None
    return made, {"read": time.perf_counter() - began}


def refuse_selection(source: Source, ratio: float | None, nuggets: int | None) -> None:
    """Refuse --ratio and --nuggets for a file that is compressed already."""
    for flag, value in (("--ratio", ratio), ("--nuggets", nuggets)):
        if isinstance(source, Path) and value is not None:
            raise click.UsageError(f"{flag} {value:g}: has no effect on {source}, which is compressed already; leave it out")


def size(count: int) -> str:
    """Bytes for people, three figures.

    >>> size(999), size(12_345), size(1_234_567)
    ('999 bytes', '12.3 kB', '1.23 MB')
    """
    if count < 1000:
        return f"{count} bytes"
    power = min((len(str(count)) - 1) // 3, 3)
    return f"{count / 1000**power:.3g} {('kB', 'MB', 'GB')[power - 1]}"


def check_device(device: str) -> None:
    """Refuse a device that torch does not have.

    Raises:
        click.UsageError: names the flag and the value.
    """
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError:
        raise click.UsageError(f"--device {device}: there is no such device; use cpu, cuda, cuda:1 or mps") from None
    try:
        there = kind.type != "meta" and torch.empty(1, device=kind.type).device.type == kind.type
    except (RuntimeError, NotImplementedError, AssertionError, ImportError):  # backends each have their own
        there = False
    if not there:
        raise click.UsageError(f"--device {device}: this machine has none that torch can use; use --device cpu")
    if kind.type == "cuda" and kind.index is not None and kind.index >= torch.cuda.device_count():
        raise click.UsageError(f"--device {device}: this machine has {torch.cuda.device_count()}, counted from cuda:0")
