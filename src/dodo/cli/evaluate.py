"""`dodo evaluate`: a method measured on a task."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from dodo.cli.options import json_option, load_model, model_options, note_fresh, ratio_value
from dodo.cli.terminal import counter, echo_json, table

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo evaluate autoencoding --data heldout.jsonl.xz --ratio 5 --limit 50
  dodo evaluate squad --data squad-dev.jsonl.xz --ratio 5 --limit 400
  dodo evaluate squad --data squad-dev.jsonl.xz --method full --limit 400
"""
)
@click.argument("task", type=click.Choice(["autoencoding", "squad"]))
@click.option(
    "--method",
    type=click.Choice(["dodo", "stride", "random", "full", "nodoc", "truncate"]),
    default="dodo",
    show_default=True,
    help="dodo; the same adapters with a stride or random selection; the base with the whole text, no text, or its end.",
)
@click.option("--data", "data", multiple=True, required=True, metavar="PATH", help="Files, patterns or hf: ids; repeatable.")
@click.option("--ratio", "-r", type=ratio_value, metavar="R", help="Tokens per nugget. [default: the model's]")
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Tokens of the texts to rebuild; repeatable. [default: 64, 128, 256, 512]",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Items (of each length in autoencoding). [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Which items are drawn.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Items at a time.")
@click.option("--examples", type=click.IntRange(min=0), default=0, show_default=True, help="Documents shown in the record.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The record. [default: results/TASK-METHOD-rR.json]")
@model_options
@json_option
def command(
    task: str,
    method: str,
    data: tuple[str, ...],
    ratio: float | None,
    lengths: tuple[int, ...],
    limit: int | None,
    seed: int,
    batch: int,
    examples: int,
    out: Path | None,
    model: str,
    device: str | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Measure a method on TASK: autoencoding (rebuild texts) or squad (answer questions).

    The record, a JSON file, has what is needed to judge and to repeat the measurement. A stopped one goes on where it was.
    """
    try:
        from dodo.evaluation.run import evaluate
    except ImportError as error:
        raise click.ClickException(f"evaluating needs {error.name}: pip install 'dodo-lm[evaluate]'") from None
    dodo, _ = load_model(model, device, dtype)
    if method in ("dodo", "stride", "random"):
        note_fresh(dodo)
    used = dodo.config.ratio if ratio is None else ratio
    out = out or Path("results") / f"{task}-{method}-r{used:g}.json"
    with counter("item") as progress:
        record = evaluate(
            dodo,
            task,
            method=method,
            ratio=used,
            sources=data,
            **({"lengths": lengths} if lengths else {}),
            limit=limit,
            seed=seed,
            batch=batch,
            out=out,
            examples=examples,
            command=shlex.join(["dodo", *sys.argv[1:]]),
            progress=progress,
        )
    if as_json:
        echo_json({"file": str(out), **{name: record[name] for name in ("settings", "measured", "seconds")}})
        return
    for group, values in record["measured"].items():
        click.echo(f"{task}, {method}, ratio {used:g}: {group}")
        click.echo(table([(f"  {name}", _shown(value)) for name, value in values.items()]))
    click.echo(f"written to {out}", err=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
