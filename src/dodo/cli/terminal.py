"""What the verbs say besides their result: progress, notes and warnings, all on stderr; and results as JSON on stdout."""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Any, TextIO

import click

from dodo.errors import DodoWarning

__all__ = ["Reporter", "counter", "echo_json", "note", "own_warnings", "reporter", "silence_libraries", "table", "warn"]

_EVERY = 30
"""Seconds between lines of progress where there is no terminal: a log is read later."""


def note(message: str) -> None:
    """Say something worth knowing."""
    click.echo(f"note: {message}", err=True)


def warn(message: str) -> None:
    """Say that something is probably not what was meant."""
    click.echo(f"warning: {' '.join(message.split())}", err=True)


def echo_json(result: Any, *, indent: int | None = 2) -> None:
    """Print a result for machines; on one line without an indent."""
    whole = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") == "utf8"
    click.echo(json.dumps(result, indent=indent, ensure_ascii=not whole, allow_nan=False))


def table(rows: list[tuple[str, str]]) -> str:
    """Names and values, one pair a line, values aligned."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@contextmanager
def own_warnings() -> Iterator[None]:
    """Show Dodo's warnings in one line each, and those of libraries only to who asks Python for them (`-W`)."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        warn(str(message))

    getLogger("bitsandbytes").setLevel(ERROR)  # talks while it is imported, by PEFT
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", DodoWarning)
        warnings.showwarning = show
        yield


def silence_libraries() -> None:
    """Keep libraries' own progress bars and chatter off the terminal."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    getLogger("huggingface_hub").setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


@contextmanager
def counter(unit: str, *, brief: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, or a line every half minute where that is no terminal; told how much is done, and how much there is.

    Args:
        unit: what is counted.
        brief: show no bar in the first second, and leave none behind.
    """
    from tqdm import tqdm

    if not sys.stderr.isatty():
        began = told = time.monotonic()

        def line(done: int, total: int) -> None:
            nonlocal told
            if (now := time.monotonic()) - told >= _EVERY:
                told = now
                click.echo(tqdm.format_meter(done, total or None, now - began, unit=unit, ncols=0), err=True)

        yield line
        return
    with tqdm(unit=unit, file=sys.stderr, leave=not brief, delay=float(brief), mininterval=0.5) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


class Reporter:
    """Progress on stderr: bars where it is a terminal, otherwise one line for each new thing that is done.

    Called with what is being done, how much of it is done, and how much there is (0 if unknown).
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr)
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._bars.start()
        self._tasks: dict[str, TaskID] = {}
        self._told: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bars is None:
            if what not in self._told:
                self._told.add(what)
                click.echo(f"{what} ...", err=True)
            return
        amount = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else ""
        if what not in self._tasks:
            for known in self._tasks.values():
                self._bars.update(known, visible=False)
            self._tasks[what] = self._bars.add_task(what, total=total or None, amount=amount)
        self._bars.update(self._tasks[what], completed=done, total=total or None, amount=amount)

    def stop(self) -> None:
        """Take the bars off the terminal."""
        if self._bars is not None:
            self._bars.stop()


@contextmanager
def reporter() -> Iterator[Reporter]:
    """A `Reporter` that is stopped at the end."""
    made = Reporter()
    try:
        yield made
    finally:
        made.stop()
