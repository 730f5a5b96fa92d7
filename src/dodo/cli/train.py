"""`dodo train`: adapters and scorer by a recipe."""

import dataclasses
import sys
from pathlib import Path

import click

from dodo.cli.options import json_option
from dodo.cli.terminal import echo_json, silence_libraries, table

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo train recipes/smollm2-135m.yaml --out runs/smollm2
  dodo train recipes/smollm2-135m.yaml --out runs/smollm2 --resume
  dodo train recipes/smollm2-135m.yaml --out runs/short --set running.steps=50 --set optimizer.period=25
"""
)
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run. [default: runs/NAME]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change one setting of the recipe; repeatable.")
@click.option("--resume", is_flag=True, help="Go on from the folder's last checkpoint, with the same recipe.")
@click.option("--max-minutes", type=click.FloatRange(min=0, min_open=True), help="Stop after this time; --resume goes on.")
@json_option
def command(
    recipe: Path, out: Path | None, settings: tuple[str, ...], resume: bool, max_minutes: float | None, as_json: bool
) -> None:
    """Train by RECIPE. The run's folder holds the best adapters, the last checkpoint, logs and samples."""
    try:
        from lightning.fabric.utilities.rank_zero import rank_zero_only

        from dodo.training.recipe import load_recipe
        from dodo.training.run import train
    except ImportError as error:
        raise click.ClickException(f"training needs {error.name}: pip install 'dodo-lm[train]'") from None

    silence_libraries()
    wanted = load_recipe(recipe, settings)
    result = train(wanted, out or Path("runs") / wanted.name, resume=resume, max_minutes=max_minutes)
    if getattr(rank_zero_only, "rank", 0):  # one of several processes speaks
        return
    if as_json:
        echo_json(dataclasses.asdict(result))
    else:
        loss = "none yet" if result.loss is None else f"{result.loss:.4f} nats per token"
        early = f" early: no better validation for {wanted.running.patience} times" if result.out_of_patience else ""
        state = f"finished{early}" if result.finished else "stopped; --resume goes on"
        rows = [("folder", result.folder), ("steps", f"{result.steps:,}"), ("document tokens", f"{result.tokens:,}")]
        click.echo(table([*rows, ("best validation loss", loss), ("state", state)]))
    if result.interrupted:
        sys.exit(130)
