"""`dodo report`: the page of results."""

from pathlib import Path

import click

from dodo.cli.options import json_option, load_model, model_options, note_fresh
from dodo.cli.sources import read_text
from dodo.cli.terminal import echo_json, note

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo report
  dodo report --results my-results --out my-results/page.md --no-figures
  dodo report --passage examples/harbour-clock.txt
"""
)
@click.option(
    "--results",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default="results",
    show_default=True,
    help="Folder of records.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default="docs/results.md", show_default=True, help="The page."
)
@click.option("--figures/--no-figures", default=True, help="Draw figures beside the page. [default: do]")
@click.option(
    "--passage", metavar="FILE", help="A text to draw with its nuggets at r = 10 (Figure 7). [default: as drawn before]"
)
@model_options
@json_option
def command(
    results: Path, out: Path, figures: bool, passage: str | None, model: str, device: str | None, dtype: str, as_json: bool
) -> None:
    """Write the page of all results: tables with the paper's numbers beside ours, and figures in a folder beside it.

    --model is loaded for --passage only; its scorer is shown.
    """
    if passage is not None and not figures:
        raise click.UsageError(f"--passage {passage}: has no effect with --no-figures; leave one of them out")
    from dodo.evaluation.report import PASSAGE, draw_passage, read_results, write_figures, write_report

    records = read_results(results)
    folder = out.parent / "figures"
    drawn = write_figures(records, folder) if figures else []
    if passage is not None:
        text = read_text(passage)
        dodo, _ = load_model(model, device, dtype)
        note_fresh(dodo)
        drawn.append(draw_passage(dodo, text, folder, title=Path(passage).name))
    elif figures and (folder / PASSAGE).exists():
        drawn.append(folder / PASSAGE)
    write_report(records, out, drawn)
    if as_json:
        counts = {task: len(some) for task, some in records.items()}
        echo_json({"page": str(out), "figures": [str(path) for path in drawn], "records": counts})
        return
    click.echo(out)
    note(f"{sum(map(len, records.values()))} records of {len(records)} tasks, {len(drawn)} figures")
