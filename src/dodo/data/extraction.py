"""The text in a file of one document: plain text, Markdown, HTML, PDF, Word.

A file is known by its contents where these say what it is, otherwise by its name. Nothing in it is run or fetched. What reads
HTML, PDF and Word is in the extra `documents`.
"""

import codecs
import io
import logging
import mimetypes
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from dodo.errors import DodoError, InputError, UnsupportedFileError

__all__ = ["SUFFIXES", "decode_text", "extract"]

SUFFIXES = (".txt", ".md", ".markdown", ".html", ".htm", ".pdf", ".docx")
"""Of files that hold one document each."""
_KINDS = "txt, md, html, pdf, docx"

_LARGEST_UNPACKED = 256 * 1024**2
"""Bytes of a Word file, unpacked: a few kilobytes can unpack to more than there is memory."""

_DECLARED = re.compile(
    rb"""<meta\b[^>]*?\bcharset\s*=\s*["']?\s*([\w.:-]+)|^\s*<\?xml\b[^>]*?\bencoding\s*=\s*["']([\w.:-]+)""", re.IGNORECASE
)
_BEGINNING = 1024
"""Bytes in which a page says that it is one, and may say its encoding, as browsers look for it."""
_AS_BROWSERS = {
    "iso8859-1": "cp1252",
    "ascii": "cp1252",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
}
"""What browsers take for an encoding: one that has more characters."""
_NO_DECLARATION = ("utf-16", "utf-32", "utf-7", "unicode", "raw-unicode", "idna", "punycode")
"""Beginnings of names: what is read as ASCII can't declare the first two, and no page is in the others."""
_XML_DECLARATION = re.compile(r"^<\?xml [^>]*\?>")
_PAGE = re.compile(
    rb"^(?:\xef\xbb\xbf)?(?>\s|<\?xml\b[^>]*\?>|<!--.*?-->)*+<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL
)

_PAGES = ("text/html", "application/xhtml+xml")
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks; that of UTF-32 begins as that of UTF-16 does."""
_UNREAD = (".doc", ".rtf", ".ps")
"""Suffixes of formats that look like text and are not."""


def extract(data: bytes, name: str, shown: str | None = None) -> str:
    """The text in a file: plain text and Markdown as they stand, of the other kinds without white space around it.

    Args:
        data: its contents; not none.
        name: what it is called where it comes from, "" for nothing; only the suffix counts.
        shown: what errors call it; None: its name.

    Raises:
        UnsupportedFileError: of another kind.
        InputError: empty, damaged, locked, without text, or neither UTF-8 nor marked UTF-16 or -32 (and a page not as it says).
        DodoError: a package that reads its kind is not installed.
    """
    shown = (repr(PurePath(name).name[:80]) if name else "the file") if shown is None else shown
    if (reader := _reader(data, name, shown)) is decode_text:
        return decode_text(data, shown)
    with _installed(shown):
        text = reader(data, shown).replace("\0", "").strip()
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # halves of characters, which some PDFs map to
    if not text:
        raise InputError(f"there is no text in {shown}; pages that are pictures need text recognition first")
    return text


def decode_text(data: bytes, shown: str) -> str:
    """The text of a file's bytes, without a byte order mark.

    Args:
        data: UTF-8, or UTF-16 or UTF-32 with a byte order mark.
        shown: what the file is called.

    Raises:
        UnsupportedFileError: binary.
        InputError: text in another encoding, or empty.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8-sig")
    if encoding == "utf-8-sig" and (offset := data.find(b"\0")) >= 0:
        raise UnsupportedFileError(
            f"{shown} is binary, not text: byte 0x00 at byte offset {offset}; give a text, or a file of one of {_KINDS}"
        )
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown} is not {encoding.removesuffix('-sig').upper()} text: byte 0x{data[error.start]:02x} at byte offset "
            f"{error.start}; convert it (for instance iconv -f LATIN1 -t UTF-8) or give another file"
        ) from None
    if not text:
        raise InputError(f"{shown} is empty{' but for a byte order mark' if data else ''}: there is no text to read")
    return text


def _reader(data: bytes, name: str, shown: str) -> Callable[[bytes, str], str]:
    suffix = PurePath(name).suffix.lower()
    kind = mimetypes.guess_type(f"file{suffix}")[0] or ""
    text = suffix in (".txt", ".md", ".markdown")  # which may speak of the mark
    if data.startswith(b"%PDF-") or (b"%PDF-" in data[:1024] and not text):
        return _pdf
    if data.startswith(b"PK\x03\x04") and suffix in ("", ".docx"):
        return _docx
    if _PAGE.match(data[:_BEGINNING]) or kind in _PAGES:
        return _html
    if suffix in (".pdf", ".docx"):
        raise InputError(f"{shown} is damaged: it does not begin as a {suffix[1:]} file does")
    media = kind.partition("/")[0] in ("image", "audio", "video") and not _is_text(data)  # .ts is a video's, or TypeScript
    if media or data.startswith(b"PK\x03\x04") or suffix in _UNREAD:
        raise UnsupportedFileError(f"{shown} is not of a kind that text is taken from; give one of {_KINDS}")
    return decode_text


def _is_text(data: bytes) -> bool:
    try:
        return bool(decode_text(data, ""))
    except InputError:
        return False


@contextmanager
def _installed(shown: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DodoError(f"{shown}: reading it needs {error.name}: pip install 'dodo-lm[documents]'") from None


def _html(data: bytes, shown: str) -> str:
    from inscriptis.html_engine import Inscriptis
    from lxml import etree, html

    page = _XML_DECLARATION.sub("", _page(data, shown).strip())
    parser = html.HTMLParser(huge_tree=True)  # or what lies deep, and all behind it, would be left out without a word
    try:
        text: str = Inscriptis(html.document_fromstring(page, parser=parser)).get_text()
    except etree.ParserError:  # nothing in it
        return ""
    except (etree.LxmlError, ValueError, RecursionError) as error:
        raise InputError(f"the HTML file {shown} can't be read: {error}") from None
    if any(entry.level_name == "FATAL" for entry in parser.error_log):
        raise InputError(f"the HTML file {shown} can't be read whole: {parser.error_log.last_error.message}")
    return text


def _page(data: bytes, shown: str) -> str:
    """UTF-8, or marked, whatever the page declares; otherwise in the encoding that it declares."""
    try:
        return decode_text(data, shown)
    except UnsupportedFileError:
        raise
    except InputError:
        declared = _DECLARED.search(data[:_BEGINNING])
        if declared is None:
            raise
        name = (declared[1] or declared[2]).decode("ascii", "replace")
        try:
            codec = codecs.lookup(name).name
            if not codec.startswith(_NO_DECLARATION):
                return data.decode(_AS_BROWSERS.get(codec, codec))
        except (LookupError, UnicodeError):
            pass
        raise InputError(f"{shown} says that it is {name}, and can't be read so; convert it to UTF-8") from None


def _pdf(data: bytes, shown: str) -> str:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # of what is wrong with a file errors tell, or it is read all the same
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise InputError(f"the PDF file {shown} is locked; take off its password first")
        return "\n\n".join(page.extract_text() for page in reader.pages)
    except InputError:
        raise
    except (PyPdfError, RecursionError) as error:
        raise InputError(f"the PDF file {shown} is damaged: {error}") from None
    except Exception as error:  # what a damaged file leads pypdf into is of any kind
        raise InputError(f"the PDF file {shown} can't be read: {error!r}") from None


def _docx(data: bytes, shown: str) -> str:
    from docx import Document

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if "word/document.xml" not in archive.namelist():
                raise UnsupportedFileError(f"{shown} is an archive, not a Word document; give one of {_KINDS}")
            if sum(part.file_size for part in archive.infolist()) > _LARGEST_UNPACKED:
                raise InputError(f"the Word file {shown} unpacks to too much; give its text instead")
        document = Document(io.BytesIO(data))
        _unwrap(document.element.body)
        return "\n".join(_lines(document))
    except InputError:
        raise
    except Exception as error:  # zipfile, lxml and python-docx each have their own
        raise InputError(f"the Word file {shown} is damaged: {error!r}") from None


def _unwrap(body: Any) -> None:
    """Leave of a Word document's body what a reader sees with all changes accepted, as plain runs, paragraphs and cells.

    Insertions, content controls, fields and smart tags give way to what is in them.
    """
    from docx.oxml.ns import qn

    for gone in list(body.iter(*map(qn, ("w:del", "w:moveFrom")))):
        gone.getparent().remove(gone)
    for wrapper in list(body.iter(*map(qn, ("w:ins", "w:moveTo", "w:sdt", "w:fldSimple", "w:smartTag", "w:customXml")))):
        content = wrapper.find(qn("w:sdtContent")) if wrapper.tag == qn("w:sdt") else wrapper
        parent = wrapper.getparent()
        for part in [] if content is None else list(content):
            wrapper.addprevious(part)
        parent.remove(wrapper)


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
