"""Files as others may read them."""

import os
from pathlib import Path

__all__ = ["for_all_to_read"]


def for_all_to_read(path: str | Path) -> None:
    """Give a file that was made for its owner alone the mode that ordinary new files have."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)
