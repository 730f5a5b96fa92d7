"""Files that take the place of others, whole, as others may read them; and how a nuggets file is told from a text."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["for_all_to_read", "is_nuggets", "is_safetensors", "replacing", "write_whole"]

_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit. Eight bytes of text, read as a number, are far above it."""


def is_safetensors(data: bytes) -> bool:
    """Whether a file with these contents, or this beginning, is a safetensors file, as nuggets files are: it begins with the size
    of its header, a small number, and the header.

    >>> is_safetensors((100).to_bytes(8, "little") + b"{"), is_safetensors(b"A text.\\n{ and more}"), is_safetensors(b"")
    (True, False, False)
    """
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= _LARGEST_HEADER


def is_nuggets(data: bytes, name: str) -> bool:
    """Whether a file is, or says that it is, a nuggets file."""
    return is_safetensors(data) or Path(name).suffix.lower() == ".nuggets"


def for_all_to_read(path: str | Path) -> None:
    """Give a file that was made for its owner alone the mode that ordinary new files have."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write to, in the folder of another, whose place it takes at the end of the block.

    Each writer has one of its own, on whatever machine, so that several at a time do not get into each other's way: the last to
    end has its file there. It is called after the other as far as names may be long.

    Raises:
        OSError: it could not be written, or is a device or the like. What stood there is unchanged, as it
            is when the block fails in any other way.
    """
    if path.exists() and not path.is_file():  # a device would be gone
        raise OSError(errno.EINVAL, "is there already, and no ordinary file", str(path))
    name = path.name if len(os.fsencode(path.name)) <= 200 else path.name[:40]
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{name}.", suffix=".part")
    part = Path(made)
    try:
        os.close(handle)
        yield part
        for_all_to_read(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all.

    Raises:
        OSError: it could not be written; what stood there is unchanged.
    """
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
