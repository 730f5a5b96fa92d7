"""`dodo generate`: a text goes on, in bounded memory."""

import itertools
import time
from contextlib import closing

import click

from dodo.cli.options import (
    Sampling,
    adapters_state,
    json_option,
    language_model_options,
    load_model,
    note_fresh,
    sampling_options,
)
from dodo.cli.sources import read_text
from dodo.cli.terminal import counter, echo_json, note
from dodo.cli.writing import check_threshold, held, held_line, language_model, memory_options
from dodo.loading import Loading

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo generate novel.txt --ratio 10
  dodo generate --prompt "Once upon a time" --ratio 1
  cat *.txt | dodo generate - --ratio 20 --window 256 --max-states 1024 --stats
"""
)
@click.argument("file", required=False)
@click.option("--prompt", metavar="TEXT", help="The text to go on with, instead of FILE.")
@memory_options
@sampling_options
@click.option("--stats", is_flag=True, help="Say at the end what was read, what is held, and how fast it went.")
@language_model_options
@json_option
def command(
    file: str | None,
    prompt: str | None,
    ratio: float | None,
    threshold: float | None,
    window: int,
    max_states: int | None,
    segment: int,
    max_new_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stats: bool,
    loading: Loading,
    as_json: bool,
) -> None:
    """Go on with the text in FILE ('-' is standard input), or with --prompt, however long it is.

    Of what left the window only tokens that score above a threshold are held, one in --ratio of them. The new text is printed as
    it comes: 128 tokens at most unless --max-new-tokens says otherwise. `dodo calibrate` makes the thresholds of ratios above 1.
    """
    if (file is None) == (prompt is None):
        raise click.UsageError("FILE and --prompt: give one of them" + ("" if file is None else ", not both"))
    if prompt == "":
        raise click.UsageError("--prompt: is empty; give a text to go on with")
    check_threshold(ratio, threshold)
    sampling = Sampling(temperature, top_p, seed)
    text = prompt if file is None else read_text(file)
    assert text is not None

    dodo, load_seconds = load_model(loading)
    note_fresh(dodo)
    lm = language_model(
        dodo, loading.model, ratio=ratio, threshold=threshold, window=window, segment=segment, max_states=max_states
    )
    from dodo.streaming import StreamingCache

    cache, ids = StreamingCache(lm), dodo.document_ids(text)
    began = time.perf_counter()
    with counter("token", brief=True) as progress:
        stream = dodo.stream_text(
            ids, cache=cache, behind=ids[-1], max_new_tokens=max_new_tokens or 128, progress=progress, **sampling.settings()
        )
        first = next(stream, "")
    read = time.perf_counter() - began
    pieces: list[str] = []  # kept for JSON only
    said = False
    with closing(stream):  # a reader that hangs up, or Ctrl-C, ends the generation too
        for piece in filter(None, itertools.chain([first], stream)):
            said = said or not piece.isspace()
            if as_json:
                pieces.append(piece)
            else:
                click.echo(piece, nl=False)
    written = time.perf_counter() - began - read
    new = cache.tokens + 1 - len(ids)
    speed = {"read": len(ids) / read, "written": (new - 1) / written}
    if as_json:
        echo_json(
            {
                "input": "--prompt" if file is None else file,
                "text": "".join(pieces),
                "model": loading.model,
                "adapters": adapters_state(dodo),
                "threshold": cache.threshold if abs(cache.threshold) != float("inf") else str(cache.threshold),
                "tokens_read": len(ids),
                "tokens_new": new,
                **held(cache),
                "tokens_per_second": {name: round(value, 2) for name, value in speed.items()},
                "seed": sampling.seed,
                "seconds": {name: round(s, 4) for name, s in {"load": load_seconds, "read": read, "write": written}.items()},
            }
        )
        return
    click.echo()
    if not said:
        note("the model ended at once and said nothing")
    if stats:
        note(f"{held_line(cache)}; read {speed['read']:.1f} tokens/s, wrote {speed['written']:.1f}")
