"""What `generate` and `chat` share: a language model with bounded memory by its flags, and what it holds."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dodo.cli.options import ratio_option, size
from dodo.errors import InputError

if TYPE_CHECKING:
    from dodo.autoregressive import Autoregressive
    from dodo.model import Dodo
    from dodo.streaming import StreamingCache

__all__ = ["check_threshold", "held", "held_line", "language_model", "memory_options"]

F = TypeVar("F", bound=Callable[..., Any])


def check_threshold(ratio: float | None, threshold: float | None) -> None:
    """Refuse --ratio and --threshold at once, and a threshold that is no number."""
    if threshold is not None and math.isnan(threshold):
        raise click.UsageError("--threshold nan: must be a number, inf (keep no token) or -inf (keep all)")
    if ratio is not None and threshold is not None:
        raise click.UsageError(f"--ratio {ratio:g} and --threshold {threshold:g}: give one of them, not both")


def memory_options(function: F) -> F:
    """--ratio, --threshold, --window, --max-states, --segment."""
    for option in (
        click.option(
            "--segment",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            metavar="N",
            help="Tokens between two looks at what leaves the window.",
        ),
        click.option(
            "--max-states",
            type=click.IntRange(min=1),
            metavar="S",
            help="Tokens held at most; the oldest nuggets go first. [default: as many as the base's window]",
        ),
        click.option(
            "--window",
            type=click.IntRange(min=1),
            default=128,
            show_default=True,
            metavar="TAU",
            help="Latest tokens that are held uncompressed.",
        ),
        click.option("--threshold", type=float, metavar="L", help="Keep tokens that score above it, instead of a ratio."),
        ratio_option,
    ):
        function = option(function)
    return function


def language_model(
    dodo: "Dodo",
    model: str,
    *,
    ratio: float | None,
    threshold: float | None,
    window: int,
    segment: int,
    max_states: int | None,
) -> "Autoregressive":
    """The model that the flags describe.

    Raises:
        click.UsageError: it has no thresholds for the ratio, or a flag does not fit the base.
    """
    asked = dodo.config.ratio if ratio is None else ratio
    if threshold is None and asked != 1 and dodo.thresholds is None:
        raise click.UsageError(
            f"--ratio {asked:g}: --model {model} has no thresholds yet; estimate them with: dodo calibrate CORPUS --model {model}"
        )
    try:
        return dodo.autoregressive(ratio=ratio, threshold=threshold, window=window, segment=segment, max_states=max_states)
    except InputError as error:
        flags = {"window and": "--window and --segment", "max_states": "--max-states"}
        flag = next((flag for start, flag in flags.items() if str(error).startswith(start)), f"--ratio {asked:g}")
        raise click.UsageError(f"{flag}: {error}") from None


def held(cache: "StreamingCache") -> dict[str, int]:
    """What a stream has read and what it holds, for machines."""
    return {"tokens": cache.tokens, "states": len(cache.positions), "bytes_held": cache.nbytes}


def held_line(cache: "StreamingCache") -> str:
    """The same for people."""
    return f"{cache.tokens:,} tokens seen, {len(cache.positions):,} states held, {size(cache.nbytes)}"
