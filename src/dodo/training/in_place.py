"""Files and folders that are replaced whole: whenever a run dies, the old or the new one is there."""

import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["put_in_place", "recover"]


def put_in_place(part: Path, target: Path) -> None:
    """Rename what was written to where it belongs. A folder can't be renamed over another: that one steps aside first."""
    if not target.is_dir():
        part.replace(target)
        return
    before = _before(target)
    shutil.rmtree(before, ignore_errors=True)
    target.rename(before)
    part.rename(target)
    shutil.rmtree(before)


def recover(target: Path) -> None:
    """Put back what had stepped aside when a run died, or take it away if the new one is there.

    The processes of a run may do so at the same time.
    """
    before = _before(target)
    if not target.exists():
        with suppress(FileNotFoundError):
            before.rename(target)
    shutil.rmtree(before, ignore_errors=True)


def _before(target: Path) -> Path:
    return target.with_name(target.name + ".before")
