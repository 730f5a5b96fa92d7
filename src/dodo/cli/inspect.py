"""`dodo inspect`: Figure 7 of a text."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import click

from dodo.cli.options import (
    adapters_state,
    check_selection,
    json_option,
    load_model,
    model_options,
    note_fresh,
    selection_options,
    use_option,
)
from dodo.cli.sources import check_output, read_text, write_whole
from dodo.cli.terminal import echo_json, note, reporter
from dodo.loading import Loading

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo inspect report.txt --ratio 10
  dodo inspect report.txt --html report.html --png report.png
  dodo inspect report.txt --json | jq '.tokens[] | select(.selected) | .text'
"""
)
@click.argument("file")
@selection_options
@use_option
@click.option("--html", type=click.Path(path_type=Path), metavar="F", help="Write a standalone page.")
@click.option("--png", type=click.Path(path_type=Path), metavar="F", help="Write a picture.")
@click.option("--force", "-f", is_flag=True, help="Replace output files that exist.")
@model_options
@json_option
def command(
    file: str,
    ratio: float | None,
    nuggets: int | None,
    use: Any,
    html: Path | None,
    png: Path | None,
    force: bool,
    loading: Loading,
    as_json: bool,
) -> None:
    """Show the text in FILE ('-' is standard input) with each token shaded by its score, and the nuggets on green.

    Without colours (no terminal, or NO_COLOR set) nuggets stand in [brackets]. With --html or --png the text goes there, and
    the names of the files are printed.
    """
    check_selection(ratio, nuggets)
    text = read_text(file)
    outputs = {flag: path for flag, path in (("--html", html), ("--png", png)) if path is not None}
    if html is not None and png is not None and html.resolve() == png.resolve():
        raise click.UsageError(f"--png {png}: is where the page goes already; choose another name")
    for flag, path in outputs.items():
        check_output(path, flag=flag, force=force)
        if path.exists() and file != "-" and path.samefile(file):
            raise click.UsageError(f"{flag} {path}: is the input itself; choose another name")
    from dodo.inspection_png import check_plotting, to_png

    if png is not None:
        check_plotting()
    dodo, _ = load_model(loading)
    note_fresh(dodo)
    from dodo.inspection import inspect_text, to_marked_text, to_terminal
    from dodo.inspection_html import to_html

    title = "standard input" if file == "-" else os.fsencode(Path(file).name).decode("utf-8", "replace")
    with reporter() as report:
        report("scoring", 0, 0)
        seen = inspect_text(dodo, text, ratio=ratio, nuggets=nuggets, use=use)
        made = [(png, to_png(seen, title=title))] if png is not None else []
        if html is not None:
            made.append((html, to_html(seen, title=title).encode()))
        for path, data in made:  # both are there before either is written
            write_whole(path, data)
    if as_json:
        echo_json(
            {
                "input": file,
                "model": loading.model,
                "adapters": adapters_state(dodo),
                "n": seen.n,
                "k": seen.k,
                "states": seen.states,
                "ratio_achieved": len(seen.tokens) / seen.states,
                **{flag.removeprefix("--"): str(path) for flag, path in outputs.items()},
                "tokens": [{**dataclasses.asdict(token), "text": text[token.start : token.end]} for token in seen.tokens],
            }
        )
        return
    if outputs:
        for path in outputs.values():
            click.echo(str(path))
    else:
        from rich.console import Console

        console = Console(file=sys.stdout, highlight=False)
        if console.color_system is None or console.no_color:
            click.echo(to_marked_text(seen))
        else:
            few = console.color_system not in ("256", "truecolor")
            console.print(to_terminal(seen, few_colours=few), soft_wrap=True)
    note(f"{seen.n:,} tokens, {seen.k:,} nuggets, {seen.states:,} states held, ratio {len(seen.tokens) / seen.states:.2f}")
