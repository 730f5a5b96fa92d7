"""The command `dodo`: one short word and verbs.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 the command line can't be carried out as it
stands, 130 interrupted. Each verb is a module of this package and is imported when it is called, so that help stays quick:
nothing here imports torch or transformers.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from dodo import __version__
from dodo.cli.terminal import own_warnings
from dodo.errors import DodoError, is_out_of_memory

__all__ = ["VERBS", "Verbs", "dodo", "main"]

VERBS = {
    "pull": "Fetch a base model into the cache.",
    "compress": "Compress a text into a nuggets file.",
    "compress-corpus": "Compress many documents into a folder of nuggets files.",
    "ask": "Answer a question about a compressed text.",
    "reconstruct": "Rebuild a text from its nuggets.",
    "inspect": "Show which tokens of a text become nuggets, and their scores.",
    "info": "Show the configuration and the number of parameters.",
    "train": "Train adapters and scorer.",
    "prepare-data": "Turn texts into training data.",
    "evaluate": "Measure a method on a task.",
    "report": "Write the page of all results.",
    "calibrate": "Estimate which scores keep one token in so many.",
    "generate": "Go on with a text of any length in bounded memory.",
    "chat": "Talk without end in bounded memory.",
    "serve": "Keep documents compressed, and answer over them for OpenAI's clients.",
}
"""What each verb does, in a line; the module `dodo.cli.<verb>` holds its `command`."""

FAILED, USAGE, INTERRUPTED = 1, 2, 130

EPILOG = """\b
Examples:
  dodo compress report.txt --ratio 10
  dodo ask report.nuggets "Who wrote it?"
  dodo inspect report.txt --html report.html

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""


class Verbs(click.Group):
    """A group whose commands are modules, imported when called; and the errors of all of them, in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            raise click.UsageError(f"there is no verb {args[0]!r}; verbs are {', '.join(VERBS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Like click's, with errors of one line and the exit codes of the module's docstring."""
        with own_warnings():
            if not standalone_mode:
                return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            try:
                result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            except click.exceptions.NoArgsIsHelpError as error:
                error.show()
                sys.exit(USAGE)
            except click.UsageError as error:
                place = error.ctx.command_path if error.ctx else "dodo"
                _leave(USAGE, f"{_line(error.format_message())} (see: {place} --help)")
            except click.ClickException as error:
                _leave(error.exit_code, _line(error.format_message()))
            except click.Abort:
                _leave(INTERRUPTED, "interrupted")
            except (DodoError, OSError, MemoryError) as error:
                _leave(FAILED, _line(str(error) or type(error).__name__))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                _leave(FAILED, f"{_line(str(error).splitlines()[0])}; try a shorter text, or --device cpu")
        sys.exit(result if isinstance(result, int) else 0)


@click.group(
    cls=Verbs,
    epilog=EPILOG,
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="dodo", message="%(prog)s %(version)s")
def dodo() -> None:
    """Compress texts into nuggets: the keys and values of a few tokens, from which a language model goes on."""


def main() -> NoReturn:
    """Entry point of the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if os.name == "nt" and not sys.stdout.isatty() and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # files and pipes would get the machine's own, which has few letters
    dodo.main(prog_name="dodo")
    raise AssertionError("unreachable")


def _line(message: str) -> str:
    return " ".join(message.split())


def _leave(code: int, message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(code)
