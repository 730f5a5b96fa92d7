"""Files that take the place of others, whole, as others may read them."""

import os
import tempfile
from pathlib import Path

__all__ = ["beside", "for_all_to_read"]


def for_all_to_read(path: str | Path) -> None:
    """Give a file that was made for its owner alone the mode that ordinary new files have."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


def beside(path: Path) -> tuple[int, str]:
    """An open new file in the folder of a file whose place it will take; called after it as far as names may be long."""
    name = path.name if len(os.fsencode(path.name)) <= 200 else path.name[:40]
    return tempfile.mkstemp(dir=path.parent, prefix=f".{name}.", suffix=".part")
