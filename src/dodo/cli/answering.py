"""What `ask` and `reconstruct` share: nuggets of a source, and text that comes piece by piece."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from dodo.cli.options import FOR, Sampling, adapters_state, load_model, load_nuggets, note_fresh
from dodo.cli.sources import Source
from dodo.cli.terminal import echo_json, note, reporter
from dodo.errors import WindowError
from dodo.loading import Loading

if TYPE_CHECKING:
    from dodo.config import Use
    from dodo.model import Dodo
    from dodo.nuggets import Nuggets

__all__ = ["run"]


def run(
    source: Source,
    *,
    name: str,
    key: str,
    prompt: Callable[["Dodo"], list[int] | None],
    details: dict[str, Any],
    ratio: float | None,
    nuggets: int | None,
    use: "Use",
    loading: Loading,
    asked: int | None,
    most: Callable[["Dodo", "Nuggets"], int],
    sampling: Sampling,
    trust: bool,
    as_json: bool,
) -> None:
    """Load, generate, print.

    Args:
        name: of the source, as it was given.
        key: of the text in the JSON.
        prompt: what the model is told after the nuggets; None asks for reconstruction.
        details: more of the JSON.
        asked: --max-new-tokens.
        most: new tokens where it is not given; fewer where the base's window has no room for them.
        use: what a text is compressed for; nuggets that were chosen for another give a note.
        trust: use nuggets of another fingerprint.

    Other arguments are the flags.
    """
    dodo, load_seconds = load_model(loading)
    note_fresh(dodo)
    with reporter() as report:
        if isinstance(source, str):
            report("compressing the text first", 0, 0)
        made, before = load_nuggets(dodo, source, ratio=ratio, nuggets=nuggets, use=use, trust=trust)
    if made.use not in (None, use):
        note(f"these nuggets were chosen for {FOR[made.use]}; for {FOR[use]}, compress with --for {use}")
    began = time.perf_counter()
    first: float | None = None
    pieces = []
    ids = prompt(dodo)
    wanted = most(dodo, made)
    held = made
    made, new = fitted(dodo, made, 1 if ids is None else len(ids), asked, wanted)
    if made.scheme != held.scheme:
        note("the base's window has no room at the text's own positions: the nuggets are put at compact ones")
    if asked is None and new < wanted:
        note(f"the base's window has room for {new:,} of {wanted:,} tokens: what would come behind them is cut off")
    ends = {} if ids is None or not dodo.answer_ends else {"eos_token_id": dodo.answer_ends}
    stream = dodo.stream(made, ids, max_new_tokens=new, **ends, **sampling.settings())
    try:
        with closing(stream):  # a reader that hangs up, or Ctrl-C, ends the generation too
            for piece in filter(None, stream):
                first = first or time.perf_counter() - began
                pieces.append(piece)
                if not as_json:
                    click.echo(piece, nl=False)
    except WindowError as error:
        hint = "lower --max-new-tokens, or compress the text more"
        raise WindowError(f"{str(error).rpartition('; ')[0]}; {hint}") from None
    text = "".join(pieces)
    seconds = {"load": load_seconds, **before, "first_piece": first or 0.0, key: time.perf_counter() - began}
    if as_json:
        echo_json(
            {
                "input": name,
                **details,
                key: text,
                "model": loading.model,
                "adapters": adapters_state(dodo),
                "n": int(made.lengths),
                "k": int(made.k),
                "states": int(made.states),
                "ratio_achieved": made.achieved_ratio,
                "compressed_for": made.use,
                "positions": made.scheme,
                "max_new_tokens": new,
                "seed": sampling.seed,
                "seconds": {what: round(value, 4) for what, value in seconds.items()},
            }
        )
        return
    click.echo()
    if not text.strip():
        note("the model ended at once and said nothing")


def fitted(dodo: "Dodo", made: "Nuggets", prompt: int, asked: int | None, most: int) -> tuple["Nuggets", int]:
    """Nuggets and a number of new tokens for which the base's window has room: at compact positions where they need it.

    Args:
        prompt: its tokens.
        asked: new tokens, if they were asked for; otherwise there are `most`, or as many as there is room for.
    """
    window = dodo.compressor.window
    if int(made.next_positions) + prompt + (asked or most) > window:
        made = made.compact()
    room = window - int(made.next_positions) - prompt
    return made, asked or max(1, min(most, room))
