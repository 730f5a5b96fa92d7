"""`dodo prepare-data`: texts, tokenised ahead of training."""

from pathlib import Path
from typing import Literal

import click

from dodo.cli.options import DEFAULT_MODEL, json_option
from dodo.cli.sources import check_output
from dodo.cli.terminal import echo_json, note, silence_libraries, table

__all__ = ["command"]

KINDS: dict[str, Literal["text", "question", "summary"]] = {"text": "text", "questions": "question", "summaries": "summary"}
"""What `prepare` calls the kinds of records."""


@click.command(
    epilog="""\b
Examples:
  dodo prepare-data 'corpus/*.jsonl.xz' -o text.safetensors
  dodo prepare-data squad.jsonl --kind questions -o questions.safetensors
  dodo prepare-data news.jsonl --kind summaries -o summaries.safetensors
  dodo prepare-data hf:owner/dataset -o text.safetensors --tokens 50000000 --any-licence
"""
)
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The shard, a .safetensors file."
)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Base whose tokenizer is used.")
@click.option(
    "--kind",
    type=click.Choice([*KINDS]),
    default="text",
    show_default=True,
    help="What the records are: text; context, question, answer(s); or article, highlights.",
)
@click.option("--any-licence", is_flag=True, help="Keep records whose licence field forbids commercial use.")
@click.option(
    "--minimum", type=click.IntRange(min=1), default=16, show_default=True, help="Leave out shorter documents, in tokens."
)
@click.option("--tokens", type=click.IntRange(min=1), help="Stop with the document that completes so many tokens. Default: all.")
@click.option("--force", "-f", is_flag=True, help="Replace the shard if it exists.")
@json_option
def command(
    sources: tuple[str, ...],
    out: Path,
    model: str,
    kind: str,
    any_licence: bool,
    minimum: int,
    tokens: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Read SOURCES (JSONL, JSONL.xz, text, parquet, 'hf:' ids), tokenise them, and write one shard."""
    if out.suffix != ".safetensors":
        raise click.UsageError(f"--out {out}: a shard's name must end in .safetensors")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"--out {out}: could not make its folder: {error.strerror or error}") from None
    check_output(out, flag="--out", force=force)
    from dodo.base import load_tokenizer
    from dodo.data.shards import prepare

    silence_libraries()
    tokenizer = load_tokenizer(model)
    shard = prepare(sources, out, tokenizer, kind=KINDS[kind], commercial_only=not any_licence, minimum=minimum, tokens=tokens)
    result = {"file": str(out), "documents": len(shard.documents), "tokens": shard.tokens, "bytes": out.stat().st_size}
    if as_json:
        echo_json({**result, "left_out": shard.left_out})
    else:
        for reason, count in shard.left_out.items():
            note(f"left out: {count:,} {reason}")
        click.echo(table([(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in result.items()]))
