"""The exception tree: everything that Dodo raises on purpose is a `DodoError`.

Each message says what was wrong and what to do about it, in one line where it can.
"""

__all__ = [
    "DodoError",
    "DodoWarning",
    "DownloadError",
    "EngineClosed",
    "FingerprintMismatch",
    "InputError",
    "NuggetsFileError",
    "QueueFull",
    "StoreDamaged",
    "StoreFull",
    "UnknownContext",
    "UnsupportedFileError",
    "UnsupportedModelError",
    "WindowError",
    "first_line",
    "is_out_of_memory",
]


class DodoError(Exception):
    """Base of all errors raised by this package."""


class InputError(DodoError, ValueError):
    """An argument or an input text can't be used as it is."""


class WindowError(InputError):
    """The positions that were asked for do not fit the base model's window."""


class UnsupportedModelError(DodoError):
    """The base model's architecture can't hold nuggets, or has not been tested with them."""


class FingerprintMismatch(DodoError):
    """Nuggets or adapters belong to another base, tokenizer or adapter."""


class NuggetsFileError(DodoError):
    """A nuggets file is corrupt, truncated, of another kind, or from a later version."""


class DownloadError(DodoError):
    """A base model could not be fetched, or what came is not what was expected."""


class QueueFull(DodoError):
    """More requests wait than the engine takes. retry_after: seconds until there may be room."""

    def __init__(self, waiting: int, *, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class EngineClosed(DodoError):
    """The engine is shutting down, or has been shut down: nothing more is answered."""


class StoreDamaged(DodoError):
    """The file of a stored context is not what was stored."""


class StoreFull(DodoError):
    """There is no room for one more context: on the disk, or within the limit that was set."""


class UnknownContext(DodoError):
    """No context of that id is stored: it never was, or it has been deleted."""


class UnsupportedFileError(InputError):
    """A file is of a kind that no text can be taken from."""


class DodoWarning(UserWarning):
    """Something works but is probably not what was meant."""


def first_line(error: Exception) -> str:
    """Of what an error says, or of its name where it says nothing."""
    return (str(error).strip() or repr(error)).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, not of this package, says that memory ran out: Python's own, or PyTorch's on a GPU or a CPU.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(RuntimeError("a bug"))
    (True, False)
    """
    return isinstance(error, MemoryError) or any(words in str(error) for words in ("out of memory", "can't allocate memory"))
