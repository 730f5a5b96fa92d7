"""`dodo report`: the page of results."""

from pathlib import Path

import click

from dodo.cli.options import json_option
from dodo.cli.terminal import echo_json, note

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo report
  dodo report --results my-results --out my-results/page.md --no-figures
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
@json_option
def command(results: Path, out: Path, figures: bool, as_json: bool) -> None:
    """Write the page of all results: tables with the paper's numbers beside ours, and figures in a folder beside it."""
    from dodo.evaluation.report import read_harness, read_results, write_figures, write_report

    records = read_results(results)
    drawn = write_figures(records, out.parent / "figures") if figures else []
    write_report(records, out, drawn, read_harness(results))
    if as_json:
        counts = {task: len(some) for task, some in records.items()}
        echo_json({"page": str(out), "figures": [str(path) for path in drawn], "records": counts})
        return
    click.echo(out)
    note(f"{sum(map(len, records.values()))} records of {len(records)} tasks, {len(drawn)} figures")
