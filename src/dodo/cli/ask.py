"""`dodo ask`: a question about a compressed text."""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from dodo.model import Dodo

__all__ = ["command"]

NEW_TOKENS = 64
"""Appendix D.2."""


@click.command(
    epilog="""\b
Examples:
  dodo ask report.nuggets "Who wrote it?"
  dodo ask report.txt "Who wrote it?" --ratio 5        compresses first
  dodo ask report.nuggets "Tell its story." --max-new-tokens 200 --temperature 0.7 --seed 1
"""
)
@click.argument("file")
@click.argument("question")
@generation_options
@selection_options
@model_options
@json_option
def command(
    file: str,
    question: str,
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
    """Answer QUESTION about the text in FILE: a nuggets file, or a text that is compressed first (txt, md, html, pdf,
    docx; '-' is standard input).

    The answer is printed as it comes: 64 tokens at most unless --max-new-tokens says otherwise. --ratio and --nuggets are for
    texts.
    """
    if not question.strip():
        raise click.UsageError(f"QUESTION {question!r}: is empty; ask something")
    check_selection(ratio, nuggets)
    sampling = Sampling(temperature, top_p, seed)
    source = read_source(file)
    refuse_selection(source, ratio, nuggets)

    def prompt(dodo: "Dodo") -> list[int]:
        return dodo.question_ids(question)

    answering.run(
        source,
        name=file,
        key="answer",
        prompt=prompt,
        details={"question": question},
        ratio=ratio,
        nuggets=nuggets,
        use="questions",
        loading=loading,
        asked=max_new_tokens,
        most=lambda dodo, made: NEW_TOKENS,
        sampling=sampling,
        trust=trust_nuggets,
        as_json=as_json,
    )
