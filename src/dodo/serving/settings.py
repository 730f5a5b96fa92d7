"""What a server is told at its start."""

import math
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from dodo.errors import InputError
from dodo.loading import Loading
from dodo.nuggets_file import StorageType

__all__ = ["Settings", "is_loopback", "read_keys"]


@dataclass(frozen=True)
class Settings:
    """How to serve.

    store: folder of the contexts.
    loading: of the model; its name is that of the model in the API.
    keys: whoever asks must have one of these; none: whoever can connect may ask.
    cors_origins: pages of these origins may ask, such as "https://example.org".
    compress_over: messages of more tokens than this are compressed; None: never.
    compress_ratio: at this ratio; None: the model's.
    max_body: bytes of a request.
    max_document: tokens of a text that is to be compressed.
    max_new_tokens: tokens of an answer, at most.
    max_choices: answers to one request, at most.
    timeout: seconds for one request.
    memory_limit, disk_limit, storage: of the store.
    max_batch, max_queue, max_states: of the engine; max_queue also bounds the texts that wait to be compressed.
    """

    store: Path
    loading: Loading = Loading()
    keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    compress_over: int | None = None
    compress_ratio: float | None = None
    max_body: int = 32 * 1024**2
    max_document: int = 100_000
    max_new_tokens: int = 2048
    max_choices: int = 16
    timeout: float = 300.0
    memory_limit: int = 2 * 1024**3
    disk_limit: int | None = None
    storage: StorageType | None = None
    max_batch: int = 32
    max_queue: int = 64
    max_states: int = 32_768

    def __post_init__(self) -> None:
        counts = ("compress_over", "max_body", "max_document", "max_new_tokens", "max_choices", "memory_limit", "disk_limit")
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name} must be at least 1, not {value}")
        object.__setattr__(self, "cors_origins", tuple(map(_origin, self.cors_origins)))
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise InputError(f"timeout must be a number of seconds above 0, not {self.timeout}")

    @property
    def name(self) -> str:
        """The model's name in the API: as it was asked for; a folder by its last part, a run's `best` or `last` by the run's."""
        model = self.loading.model
        if not Path(model).exists():
            return model
        folder = Path(model).resolve()
        return folder.parent.name if folder.name in ("best", "last") else folder.name


def _origin(value: str) -> str:
    """As browsers send it.

    Raises:
        InputError: it is no origin.
    """
    found = urlsplit(value.strip().lower())
    if value.strip() == "*":
        return "*"
    if not (found.scheme and found.hostname) or found.path not in ("", "/") or found.query or found.fragment or found.username:
        raise InputError(f"cors_origins: an origin is like https://example.org or http://localhost:3000, not {value!r}")
    return f"{found.scheme}://{found.netloc}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # do not count.

    Raises:
        InputError: the file can't be read, or holds no key, or one that is shorter than 16 characters or not ASCII.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read as text: {error}") from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise InputError(f"{path} holds no key; write one a line, for instance the output of: openssl rand -hex 32")
    if not all(key.isascii() for key in keys):
        raise InputError(f"a key in {path} has letters that a request's header can't hold; make one with: openssl rand -hex 32")
    if any(len(key) < 16 for key in keys):
        raise InputError(f"a key in {path} has fewer than 16 characters; make one with: openssl rand -hex 32")
    return keys
