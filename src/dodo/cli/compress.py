"""`dodo compress`: a document into a nuggets file."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import click

from dodo.cli.options import (
    FOR,
    adapters_state,
    check_selection,
    json_option,
    load_model,
    model_options,
    note_fresh,
    selection_options,
    size,
    use_option,
)
from dodo.cli.sources import check_output, read_text
from dodo.cli.terminal import echo_json, reporter, table
from dodo.loading import Loading

__all__ = ["command"]

STORAGE = ("float32", "bfloat16", "float16", "int8")


@click.command(
    epilog="""\b
Examples:
  dodo compress report.txt                          writes report.nuggets
  dodo compress report.txt --ratio 20 --storage int8 --force
  dodo compress paper.pdf --nuggets 200             also html and docx
  curl -s https://example.org | dodo compress - -o example.nuggets
"""
)
@click.argument("file")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    metavar="F.nuggets",
    help="Where to write. [default: FILE with the suffix .nuggets]",
)
@selection_options
@use_option
@model_options
@click.option("--storage", type=click.Choice(STORAGE), help="Type of the states in the file. [default: the model's]")
@click.option(
    "--positions",
    type=click.Choice(["original", "compact"]),
    help="Positions of the nuggets: their tokens', or 0, 1, 2, ... [default: the model's]",
)
@click.option("--force", "-f", is_flag=True, help="Replace the output file if it exists.")
@json_option
def command(
    file: str,
    output: Path | None,
    ratio: float | None,
    nuggets: int | None,
    use: Any,
    loading: Loading,
    storage: Any,
    positions: Any,
    force: bool,
    as_json: bool,
) -> None:
    """Compress the text in FILE (txt, md, html, pdf, docx; '-' is standard input) and write its nuggets.

    Prints n (tokens of the text), k (nuggets), the states held (nuggets, and the first token where it is kept), the ratio
    reached, bytes held against those of the full cache, the file's size, and seconds.
    """
    check_selection(ratio, nuggets)
    if output is None and file == "-":
        raise click.UsageError("--output: is needed when the text comes from standard input; add -o F.nuggets")
    if output is None and not Path(file).name:
        raise click.UsageError(f"FILE {file!r}: is no name of a text file")
    output = Path(file).with_suffix(".nuggets") if output is None else output
    if file != "-" and output.exists() and Path(file).exists() and output.samefile(file):
        raise click.UsageError(f"--output {output}: is the input itself; choose another name")
    text = read_text(file)
    check_output(output, flag="--output", force=force)

    dodo, load_seconds = load_model(loading)
    note_fresh(dodo)
    if positions is not None:
        dodo.compressor.config = dataclasses.replace(dodo.config, positions=positions)
    with reporter() as report:
        report("compressing", 0, 0)
        began = time.perf_counter()
        made = dodo.compress(text, ratio=ratio, nuggets=nuggets, use=use)
        compressed = time.perf_counter()
        made.save(output, storage=storage)
        seconds = {"load": load_seconds, "compress": compressed - began, "write": time.perf_counter() - compressed}

    result: dict[str, Any] = {
        "input": file,
        "output": str(output),
        "model": loading.model,
        "adapters": adapters_state(dodo),
        "n": int(made.lengths),
        "k": int(made.k),
        "states": int(made.states),
        "ratio_asked": made.ratio,
        "ratio_achieved": made.achieved_ratio,
        "compressed_for": made.use,
        "positions": made.scheme,
        "storage": storage or str(made.dtype).removeprefix("torch."),
        "bytes_held": made.nbytes,
        "bytes_full_cache": made.full_cache_nbytes,
        "bytes_file": output.stat().st_size,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
    }
    if as_json:
        echo_json(result)
        return
    held = f"{made.nbytes / made.full_cache_nbytes:.1%} of the full cache's {size(made.full_cache_nbytes)}"
    asked = "" if made.ratio is None else f" (asked: {made.ratio:g})"
    outside = f"loading the model took {seconds['load']:.2f}, writing the file {seconds['write']:.2f}"
    rows = [
        ("nuggets file", str(output)),
        *([("compressed for", FOR[made.use])] if made.use else []),
        ("n, tokens", f"{result['n']:,}"),
        ("k, nuggets", f"{result['k']:,}"),
        ("states held", f"{result['states']:,}" + (" (the nuggets and the first token)" if int(made.sinks) else "")),
        ("ratio", f"{made.achieved_ratio:.2f}{asked}"),
        ("memory", f"{size(made.nbytes)}, {held}"),
        ("file size", f"{size(result['bytes_file'])} ({result['storage']})"),
        ("seconds", f"{seconds['compress']:.2f} (tokenizing, scoring, encoding; {outside})"),
    ]
    click.echo(table(rows))
