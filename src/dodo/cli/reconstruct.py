"""`dodo reconstruct`: a text out of its nuggets."""

import click

from dodo.cli import answering
from dodo.cli.options import (
    Sampling,
    check_selection,
    generation_options,
    json_option,
    model_options,
    refuse_selection,
    selection_options,
)
from dodo.cli.sources import read_source
from dodo.loading import Loading

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo reconstruct report.nuggets
  dodo reconstruct report.nuggets --max-new-tokens 100 --json
  dodo reconstruct report.txt --ratio 2              compresses first
"""
)
@click.argument("file")
@generation_options
@selection_options
@model_options
@json_option
def command(
    file: str,
    max_new_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    trust_nuggets: bool,
    ratio: float | None,
    nuggets: int | None,
    loading: Loading,
    as_json: bool,
) -> None:
    """Rebuild the text whose nuggets are in FILE: a nuggets file, or a text that is compressed first.

    The text is printed as it comes: as many tokens at most as it had, unless --max-new-tokens says otherwise. --ratio and
    --nuggets are for texts.
    """
    check_selection(ratio, nuggets)
    sampling = Sampling(temperature, top_p, seed)
    source = read_source(file)
    refuse_selection(source, ratio, nuggets)
    answering.run(
        source,
        name=file,
        key="text",
        prompt=lambda dodo: None,
        details={},
        ratio=ratio,
        nuggets=nuggets,
        use="text",
        loading=loading,
        asked=max_new_tokens,
        most=lambda dodo, made: dodo.rebuilt_tokens(made)[0],
        sampling=sampling,
        trust=trust_nuggets,
        as_json=as_json,
    )
