"""The text in a file that somebody uploads: plain text, Markdown, HTML, PDF, Word.

A file is known by its contents where these say what it is, otherwise by its name. Nothing in it is run or fetched.
"""

import io
import mimetypes
import zipfile
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from dodo.errors import InputError, UnsupportedFileError
from dodo.files import is_safetensors

__all__ = ["KINDS", "extract", "is_nuggets"]

KINDS = "txt, md, html, pdf, docx, nuggets"

_LARGEST_UNPACKED = 256 * 1024**2
"""Bytes of a Word file, unpacked: a few kilobytes can unpack to more than there is memory."""


def is_nuggets(data: bytes, name: str) -> bool:
    """Whether a file is, or says that it is, a nuggets file."""
    return is_safetensors(data) or PurePath(name).suffix.lower() == ".nuggets"


def extract(data: bytes, name: str) -> str:
    """The text in a file, without white space around it.

    Args:
        data: its contents.
        name: what it is called where it comes from; only the suffix counts.

    Raises:
        UnsupportedFileError: of another kind.
        InputError: damaged, locked, not UTF-8, or without any text.
    """
    text = _reader(data, name)(data).replace("\0", "").strip()
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of characters, which some PDFs map to
    if not text:
        raise InputError(f"there is no text in {_shown(name)}; pages that are pictures need text recognition first")
    return text


def _reader(data: bytes, name: str) -> Callable[[bytes], str]:
    suffix = PurePath(name).suffix.lower()
    kind = mimetypes.guess_type(f"file{suffix}")[0] or ""
    text = suffix in (".txt", ".md", ".markdown")  # which may speak of the mark
    if data.startswith(b"%PDF-") or (b"%PDF-" in data[:1024] and not text):
        return _pdf
    if data.startswith(b"PK\x03\x04") and suffix in ("", ".docx"):
        return _docx
    if data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")) or kind == "text/html":
        return _html
    if suffix in ("", ".md", ".markdown") or kind.startswith("text/"):
        return _plain
    if suffix in (".pdf", ".docx"):
        raise InputError(f"{_shown(name)} is damaged: it does not begin as a {suffix[1:]} file does")
    raise UnsupportedFileError(f"{_shown(name)} is not of a kind that text is taken from; send one of {KINDS}")


def _plain(data: bytes) -> str:
    utf16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not utf16 and b"\0" in data:
        raise UnsupportedFileError(f"the file is binary, not text; send one of {KINDS}")
    try:
        return data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"the file is not UTF-8 text: byte offset {error.start}; convert it first") from None


def _html(data: bytes) -> str:
    from inscriptis import get_text
    from lxml.etree import LxmlError

    try:
        return get_text(_plain(data))
    except (LxmlError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the HTML file can't be read: {error}") from None


def _pdf(data: bytes) -> str:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InputError("the PDF file is locked; take off its password first")
        return "\n\n".join(page.extract_text() for page in reader.pages)
    except InputError:
        raise
    except (PyPdfError, RecursionError) as error:
        raise InputError(f"the PDF file is damaged: {error}") from None
    except Exception as error:  # what a damaged file leads pypdf into is of any kind
        raise InputError(f"the PDF file can't be read: {error!r}") from None


def _docx(data: bytes) -> str:
    from docx import Document

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if "word/document.xml" not in archive.namelist():
                raise UnsupportedFileError(f"the file is an archive, not a Word document; send one of {KINDS}")
            if sum(part.file_size for part in archive.infolist()) > _LARGEST_UNPACKED:
                raise InputError("the Word file unpacks to too much; send its text instead")
        return "\n".join(_lines(Document(io.BytesIO(data))))
    except InputError:
        raise
    except Exception as error:  # zipfile, lxml and python-docx each have their own
        raise InputError(f"the Word file is damaged: {error!r}") from None


def _lines(within: Any) -> Iterator[str]:
    """Of a Word document, or of a table's cell: paragraphs, and rows of tables."""
    from docx.table import Table

    for block in within.iter_inner_content():
        if not isinstance(block, Table):
            yield block.text
            continue
        seen: set[Any] = set()  # cells that are merged come once for each place that they take
        for row in block.rows:
            cells = [cell for cell in row.cells if cell._tc not in seen and not seen.add(cell._tc)]  # type: ignore[func-returns-value]
            if cells:
                yield "\t".join(" ".join(filter(None, _lines(cell))) for cell in cells)


def _shown(name: str) -> str:
    return repr(PurePath(name).name[:80]) if name else "the file"
