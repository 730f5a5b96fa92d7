"""Reading what a verb is given and writing what it makes: every check that can be made before a model is loaded.

A nuggets file is told from a text by its content.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from dodo.data.extraction import extract
from dodo.errors import DodoError, InputError
from dodo.files import is_safetensors, replacing

__all__ = ["Source", "check_output", "read_source", "read_text", "write_whole"]

Source = str | Path
"""A text, or the path of a nuggets file."""


def read_text(name: str) -> str:
    """The text in a file, or on standard input for '-'.

    Raises:
        click.UsageError: no such file, or a directory.
        InputError: without text, or a nuggets file; see `extract`.
    """
    data = _read(name)
    if is_safetensors(data):
        raise InputError(f"{name} is a nuggets or safetensors file, not a text; ask it questions with: dodo ask {name} ...")
    return _text(data, name)


def read_source(name: str) -> Source:
    """The text in a file (or on standard input for '-'), or the path of a nuggets file.

    Raises:
        click.UsageError: no such file, or a directory.
        InputError: neither nuggets nor a file that text is taken from; see `extract`.
    """
    data = _read(name)
    if name == "-" and is_safetensors(data):
        raise InputError("standard input is a nuggets file; give its name instead of '-'")
    if name != "-":
        if is_safetensors(data):
            return Path(name)
        if Path(name).suffix == ".nuggets":
            with suppress(InputError):
                return _text(data, name)
            return Path(name)  # empty, or damaged from its first bytes: loading it says so
    return _text(data, name)


def check_output(path: Path, *, flag: str, force: bool) -> None:
    """Refuse an output path that can't be written, or that exists without --force.

    Raises:
        click.UsageError: names the flag and the path.
    """
    if path.is_dir():
        raise click.UsageError(f"{flag} {path}: is a directory; give the name of a file")
    if not path.parent.is_dir():
        raise click.UsageError(f"{flag} {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise click.UsageError(f"{flag} {path}: the folder {path.parent} is not writable")
    if path.exists() and not force:
        raise click.UsageError(f"{flag} {path}: exists already; choose another name, or pass --force to replace it")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        DodoError: it could not be written; what stood there is unchanged.
    """
    try:
        with replacing(path) as part:
            part.write_bytes(data)
    except OSError as error:
        raise DodoError(f"could not write {path}: {error.strerror or error}; nothing was changed") from None


def _read(name: str) -> bytes:
    if name == "-":
        if sys.stdin is None:
            raise click.UsageError("FILE -: there is no standard input; give the name of a file")
        if sys.stdin.isatty():
            click.echo("reading the text from the terminal; end it with Ctrl-D", err=True)
        return sys.stdin.buffer.read()
    path = Path(name)
    if path.is_dir():
        raise click.UsageError(f"FILE {name}: is a directory; give the name of a text file")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise click.UsageError(f"FILE {name}: there is no such file") from None
    except OSError as error:
        raise InputError(f"FILE {name}: could not be read: {error.strerror or error}") from None


def _text(data: bytes, name: str) -> str:
    return extract(data, "" if name == "-" else name, "standard input" if name == "-" else name)
