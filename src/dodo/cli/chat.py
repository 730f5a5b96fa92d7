"""`dodo chat`: a conversation without end, in a memory that does not grow."""

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import click

from dodo.cli.options import Sampling, json_option, language_model_options, load_model, note_fresh, sampling_options
from dodo.cli.terminal import echo_json, note
from dodo.cli.writing import check_threshold, held, held_line, language_model, memory_options
from dodo.errors import InputError
from dodo.loading import Loading

if TYPE_CHECKING:
    from dodo.chat import Chat

__all__ = ["command"]

NEW_TOKENS = 256


@click.command(
    epilog="""\b
Examples:
  dodo chat --ratio 10
  dodo chat --ratio 1 --window 256 --max-states 1024 --system "Be brief."
  printf 'Who are you?\\nSay it again.\\n' | dodo chat --threshold 0 --json
"""
)
@click.option("--system", metavar="TEXT", help="What the model is told before the first turn.")
@memory_options
@sampling_options
@language_model_options
@json_option
def command(
    system: str | None,
    ratio: float | None,
    threshold: float | None,
    window: int,
    max_states: int | None,
    segment: int,
    max_new_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    loading: Loading,
    as_json: bool,
) -> None:
    """Talk: a line in, an answer out, without end. Of what left the window only tokens that score above a threshold are held.

    An answer is printed as it comes: 256 tokens at most unless --max-new-tokens says otherwise. Ctrl-C ends an answer; Ctrl-D
    or /quit ends the conversation; /stats says what is held; a message that begins with a slash is given with two. Standard
    input may be a file, one line a turn. With --json, one line of JSON a turn.
    """
    check_threshold(ratio, threshold)
    sampling = Sampling(temperature, top_p, seed)
    dodo, _ = load_model(loading)
    note_fresh(dodo)
    lm = language_model(
        dodo, loading.model, ratio=ratio, threshold=threshold, window=window, segment=segment, max_states=max_states
    )
    from dodo.chat import Chat

    try:
        chat = Chat(dodo, lm, system=system)
    except InputError as error:
        flag = "--system" if "system" in str(error) else f"--model {loading.model}"
        raise click.UsageError(f"{flag}: {error}") from None
    settings, most = sampling.settings(), max_new_tokens or NEW_TOKENS
    while (line := _read_line()) is not None:
        message = line.strip()
        if message == "/quit":
            break
        if message == "/stats":
            note(held_line(chat.cache))
        elif message.startswith("/") and not message.startswith("//"):
            note(f"there is no command {message.split()[0]}; commands are /stats and /quit; // begins a message with one slash")
        elif message:
            _turn(chat, message.removeprefix("/"), most, settings, as_json=as_json)


def _turn(chat: "Chat", message: str, most: int, settings: dict[str, Any], *, as_json: bool) -> None:
    """One answer, and what is held behind it."""
    pieces: list[str] = []
    stopped = False
    try:
        with closing(chat.reply(message, max_new_tokens=most, **settings)) as reply:
            for piece in filter(None, reply):
                pieces.append(piece)
                if not as_json:
                    click.echo(piece, nl=False)
    except KeyboardInterrupt:
        stopped = True
    except InputError as error:
        if not sys.stdin.isatty():
            raise
        note(f"{error}; the conversation goes on without it")
        return
    ended = "stopped" if stopped else "whole" if chat.complete else "cut"
    if as_json:
        echo_json({"user": message, "answer": "".join(pieces), "ended": ended, **held(chat.cache)}, indent=None)
        return
    click.echo()
    cut = {"stopped": "; stopped", "cut": f"; cut at {most:,} tokens (--max-new-tokens)", "whole": ""}[ended]
    note(f"{held_line(chat.cache)}{cut}")


def _read_line() -> str | None:
    """The next line of standard input; None at its end.

    Raises:
        InputError: not UTF-8 text.
    """
    with suppress(EOFError):
        try:
            if not sys.stdin.isatty():
                line = sys.stdin.buffer.readline()
                return line.decode("utf-8").removeprefix("\ufeff") if line else None
            with suppress(ImportError):
                import readline  # noqa: F401  # input() can edit lines then
            if sys.stdout.isatty():
                return input("> ")
            click.echo("> ", nl=False, err=True)
            return input()
        except UnicodeDecodeError as error:
            raise InputError(f"a line of standard input is not UTF-8 text: byte 0x{error.object[error.start]:02x}") from None
    click.echo(err=True)  # Ctrl-D leaves the cursor behind the prompt
    return None
