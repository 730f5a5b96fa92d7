"""`dodo calibrate`: the thresholds of a scorer, tried on texts that it was not given."""

import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dodo.cli.options import adapters_state, json_option, load_model, model_options, note_fresh, ratio_value
from dodo.cli.sources import write_whole
from dodo.cli.terminal import counter, echo_json, note
from dodo.errors import DodoError
from dodo.loading import Loading

if TYPE_CHECKING:
    from dodo.model import Dodo

__all__ = ["command"]

FAR = 0.1
"""Relative error of a realised ratio above which it is pointed out, for ratios of `COMMON`."""
COMMON = (2, 20)


@click.command(
    epilog="""\b
Examples:
  dodo calibrate 'corpus/*.jsonl.xz' --model my-adapters
  dodo calibrate corpus.jsonl --check other.jsonl --tokens 200000 --model my-adapters --force
  dodo calibrate corpus.jsonl --out calibrated           a copy of the adapters that ship, with thresholds
"""
)
@click.argument("corpus", nargs=-1, required=True)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    metavar="N",
    help="Sampled for the estimate, and at most as many to try it on.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="Share of the texts that the thresholds are tried on. [default: 0.2]",
)
@click.option("--check", multiple=True, metavar="FILE", help="Texts to try them on, instead of a share; repeatable.")
@click.option("--ratio", "-r", "ratios", type=ratio_value, multiple=True, metavar="R", help="Report these only; repeatable.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Which texts are drawn.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="A new folder for adapters and thresholds. [default: beside the adapters, if --model is their folder]",
)
@click.option("--force", "-f", is_flag=True, help="Replace thresholds that are there.")
@model_options
@json_option
def command(
    corpus: tuple[str, ...],
    tokens: int,
    held_out: float | None,
    check: tuple[str, ...],
    ratios: tuple[float, ...],
    seed: int,
    out: Path | None,
    force: bool,
    loading: Loading,
    as_json: bool,
) -> None:
    """Estimate the thresholds on scores that `generate` and `chat` need for a --ratio, from the texts of CORPUS.

    CORPUS is files (JSONL, .xz or .gz of it, text, parquet), patterns or 'hf:' ids. Prints for each ratio the one that its
    threshold gives on other texts, and the threshold.
    """
    if held_out is not None and check:
        raise click.UsageError(f"--held-out {held_out:g} and --check {check[0]}: give one of them, not both")
    if 1 in ratios:
        raise click.UsageError("--ratio 1: keeps all tokens and needs no threshold; leave it out")
    from dodo import adapter_files
    from dodo.data.reading import resolve
    from dodo.evaluation.calibration import calibrate
    from dodo.thresholds import RATIOS

    for ratio in ratios:
        if not RATIOS[0] <= ratio <= RATIOS[-1]:
            raise click.UsageError(f"--ratio {ratio:g}: thresholds are for {RATIOS[0]:g} to {RATIOS[-1]:g}")
    resolve([*corpus, *check])
    home = adapter_files.find(loading.model)
    out = _checked_out(home, loading.model, out, force=force)
    dodo, _ = load_model(loading)
    note_fresh(dodo)
    share = {} if held_out is None else {"held_out": held_out}
    with counter("token") as progress:
        made = calibrate(dodo, corpus, tokens=tokens, check=check, seed=seed, progress=progress, **share)
    rows = [(ratio, made.thresholds.at(ratio), made.realised(ratio)) for ratio in ratios or made.thresholds.ratios]
    far = [ratio for ratio, _, realised in rows if COMMON[0] <= ratio <= COMMON[1] and abs(realised / ratio - 1) > FAR]
    checked = made.checked_scores.numel()
    if as_json:
        echo_json(
            {
                "model": loading.model,
                "adapters": adapters_state(dodo),
                "folder": str(out),
                "feature_window": made.thresholds.feature_window,
                "sampled": {"texts": made.texts, "tokens": made.thresholds.tokens},
                "checked": {"texts": made.checked_texts, "tokens": checked},
                "ratios": [
                    {"ratio": ratio, "threshold": value, "realised": _finite(realised), "error": _finite(realised / ratio - 1)}
                    for ratio, value, realised in rows
                ],
                "off": far,
            }
        )
    else:
        click.echo(f"{'ratio':>6}{'realised':>10}{'error':>9}{'threshold':>11}")
        for ratio, value, realised in rows:
            click.echo(f"{ratio:>6g}{realised:>10.2f}{realised / ratio - 1:>+9.1%}{value:>11.4f}")
    _store(dodo, home, out)  # last: what was measured is not lost where it can't be written
    sampled = f"{made.thresholds.tokens:,} tokens of {made.texts:,} texts sampled"
    note(f"{sampled}, tried on {checked:,} of {made.checked_texts:,} others")
    if far:
        which = ", ".join(f"{ratio:g}" for ratio in far)
        remedy = "more --tokens help, or texts more like them"
        note(f"of {COMMON[0]} to {COMMON[1]}, off by more than {FAR:.0%} on them: ratio {which}; {remedy}")
    note(f"written to {out}; next: dodo generate --model {out} --ratio {ratios[0] if ratios else 10:g} ...")


def _checked_out(home: Path | None, model: str, out: Path | None, *, force: bool) -> Path:
    """The folder of the result: that of the adapters, which may not have thresholds yet without --force, or a new one."""
    from dodo.thresholds import THRESHOLDS_FILE

    if out is None:
        if home is None or home != Path(model).expanduser():
            raise click.UsageError(f"--out: is needed, since --model {model} is no folder of adapters; add --out FOLDER")
        out = home
    if home is not None and out.resolve() == home.resolve():
        if (out / THRESHOLDS_FILE).exists() and not force:
            raise click.UsageError(f"--model {model}: has thresholds already; pass --force to replace them")
    elif out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise click.UsageError(f"--out {out}: exists already; choose another name, or calibrate what is there with --model {out}")
    elif not out.absolute().parent.is_dir():
        raise click.UsageError(f"--out {out}: there is no folder {out.parent}; make it first")
    return out


def _store(dodo: "Dodo", home: Path | None, out: Path) -> None:
    """Thresholds beside the adapters, or a new folder with both; whole or not at all."""
    from dodo.thresholds import THRESHOLDS_FILE

    assert dodo.thresholds is not None
    table = dodo.thresholds.to_json().encode()
    if home is not None and out.resolve() == home.resolve():
        write_whole(out / THRESHOLDS_FILE, table)
        return
    try:
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as scratch:
            made = Path(scratch) / "adapters"
            if home is None:
                dodo.save_pretrained(made)
            else:  # as they are, with their card
                shutil.copytree(home, made)
                (made / THRESHOLDS_FILE).write_bytes(table)
            made.replace(out)
    except OSError as error:
        raise DodoError(f"could not write {out}: {error.strerror or error}") from None


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
