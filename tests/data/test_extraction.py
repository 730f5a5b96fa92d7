"""Laws of taking texts from files."""

import io
import sys
import zipfile

import pytest

from dodo.data import extraction
from dodo.data.extraction import extract
from dodo.data.reading import read_texts
from dodo.errors import DodoError, InputError, UnsupportedFileError
from dodo.files import is_nuggets

docx, pypdf = pytest.importorskip("docx", reason="an extra"), pytest.importorskip("pypdf", reason="an extra")
pytest.importorskip("inscriptis", reason="an extra")

TEXT = "The dodo lived on Mauritius.\nIt could not fly — café, 你好."


def pdf(*pages: str, password: str | None = None) -> bytes:
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    font = DictionaryObject({NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1")})
    font[NameObject("/BaseFont")] = NameObject("/Helvetica")
    for text in pages:
        page = writer.add_blank_page(300, 300)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): DictionaryObject({NameObject("/F"): font})})
        content = DecodedStreamObject()
        content.set_data(f"BT /F 12 Tf 20 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = content
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def word() -> bytes:
    document = docx.Document()
    document.add_paragraph("The dodo lived on Mauritius.")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "height", "one metre"
    document.add_paragraph("It could not fly — café.")
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.MARKDOWN", "a.csv", "a.json", "a.ts", "a.unheard-of", "a", ""])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_plain_texts_are_taken_as_they_are(name, encoding):
    assert extract(f"\n{TEXT}\n ".encode(encoding), name) == f"\n{TEXT}\n "


@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_a_text_may_speak_of_a_pdfs_mark(name):
    assert extract(b"A PDF begins with %PDF-1.7.", name) == "A PDF begins with %PDF-1.7."


@pytest.mark.parametrize("name", ["a.html", "a.htm", "a", "a.txt"])
def test_of_html_what_a_reader_sees_is_taken(name):
    page = (
        "<!DOCTYPE html><html><head><title>no</title><style>p {color: red}</style><script>alert(1)</script></head>"
        "<body><h1>Dodo</h1><p>It <b>could</b> not fly &mdash; café.</p><ul><li>one<li>two</ul></body></html>"
    )
    text = extract(page.encode(), name)
    assert "It could not fly — café." in text
    assert text.index("Dodo") < text.index("It could") < text.index("one") < text.index("two")
    assert not any(word in text for word in ("alert", "color", "<"))


def test_a_page_as_xml_is_read_as_one():
    page = '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html><html><body><p>The dodo — 你好.</p></body></html>'
    assert extract(page.encode(), "a.xhtml") == "The dodo — 你好."


def test_pages_of_a_pdf_come_in_order():
    text = extract(pdf("The dodo lived here.", "It could not fly."), "a.pdf")
    assert text.index("The dodo lived here.") < text.index("It could not fly.")


def test_paragraphs_and_tables_of_a_word_file_come_in_order():
    assert extract(word(), "a.docx") == "The dodo lived on Mauritius.\nheight\tone metre\nIt could not fly — café."


def test_contents_count_more_than_the_name():
    assert extract(pdf("The dodo lived here."), "a.txt") == "The dodo lived here."
    assert extract(word(), "").startswith("The dodo")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.png"),
        (b"\xff\xd8\xff\xe0 JFIF", "a.jpg"),
        (b"MZ\x90\0\x03", "a.exe"),
        (b"\0\1\2\3", "a.txt"),
        (b"\0\1\2\3", ""),
        (b"{\\rtf1 text}", "a.rtf"),
        (b"PK\x03\x04 and more", "a.zip"),
        (b"a text", "a.doc"),
    ],
)
def test_other_kinds_are_refused_as_such(data, name):
    with pytest.raises(UnsupportedFileError, match="pdf"):
        extract(data, name)


def test_an_archive_that_is_no_word_file_is_refused_as_such():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(UnsupportedFileError):
        extract(file.getvalue(), "a.docx")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"caf\xe9", "a.txt"),
        (b"\xff\xfea", "a.txt"),
        (b"%PDF-1.7\nnothing", "a.pdf"),
        (pdf("text")[:200], "a.pdf"),
        (b"no pdf", "a.pdf"),
        (word()[:500], "a.docx"),
        (b"no word file", "a.docx"),
        (b"<html>\xff\xfe</html>", "a.html"),
        (pdf("text", password="secret"), "a.pdf"),
    ],
)
def test_damaged_and_locked_files_are_refused_in_one_line(data, name, caplog):
    with pytest.raises(InputError) as caught:
        extract(data, name)
    assert not isinstance(caught.value, UnsupportedFileError)
    assert "\n" not in str(caught.value)
    assert not caplog.records


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        ('<meta charset="ISO-8859-1">', "cp1252"),
        ("<meta http-equiv='Content-Type' content='text/html; charset=windows-1252'>", "cp1252"),
        ("<META NAME=a CHARSET = latin1 >", "latin-1"),
        ("<meta charset=iso-8859-15>", "iso-8859-15"),
        ('<meta charset="utf-8">', "utf-8"),
        ('<meta charset="iso-8859-1">', "utf-8"),
        ("", "utf-16"),
    ],
)
def test_a_page_is_read_in_the_encoding_that_it_declares(declared, encoding):
    text = "The café costs five Euro today." if encoding == "latin-1" else "The café costs five € today."
    page = f"<html><head>{declared}</head><body>{text}</body></html>"
    assert extract(page.encode(encoding), "a.html") == text


def test_an_xml_page_is_read_in_the_encoding_of_its_declaration():
    page = '<?xml version="1.0" encoding="shift_jis"?>\n<html><body>ドードー</body></html>'
    assert extract(page.encode("shift_jis"), "a.xhtml") == "ドードー"


@pytest.mark.parametrize(("declared", "text"), [("gb2312", "镕"), ("shift_jis", "①"), ("euc-kr", "펲")])
def test_an_encoding_is_read_as_browsers_read_it(declared, text):
    """With characters that the encoding of this name has not, and pages that name it have."""
    codec = {"gb2312": "gb18030", "shift_jis": "cp932", "euc-kr": "cp949"}[declared]
    with pytest.raises(UnicodeDecodeError):
        text.encode(codec).decode(declared)
    assert extract(f"<html><meta charset={declared}><p>{text}</html>".encode(codec), "a.html") == text


@pytest.mark.parametrize(
    "page",
    [
        "<html><body><p>first</p>" + "<font>x" * 300 + "<p>the rest</p></body></html>",
        "<html><body>" + "<div>" * 400 + "deep" + "</div>" * 400 + "<p>the rest</p></body></html>",
        "<html><body><p>first</p><pre>" + "a line of text\n" * 800_000 + "</pre><p>the rest</p></body></html>",
    ],
    ids=["unclosed", "deep", "large"],
)
def test_of_a_page_nothing_is_left_out(page):
    assert extract(page.encode(), "a.html").endswith("the rest")


def test_a_page_nested_beyond_reading_is_refused():
    with pytest.raises(InputError, match="can't be read"):
        extract(("<html><body>" + "<div>x" * 20_000 + "<p>the rest").encode(), "a.html")


@pytest.mark.parametrize(
    "before", ['<?xml version="1.0"?>\n', "<!-- saved from url -->\n", "<?xml version='1.0'?><!-- a --> <!-- b -->"]
)
def test_a_page_without_a_name_is_known_by_its_beginning(before):
    assert extract(f"{before}<!DOCTYPE html><html><p>The dodo.</p></html>".encode(), "") == "The dodo."
    assert extract(f"{before}A text of <html>.".encode(), "") == f"{before}A text of <html>."


@pytest.mark.parametrize("encoding", ["utf-32", "utf-16"])
def test_byte_order_marks_are_told_apart(encoding):
    assert extract("a dodo".encode(encoding), "a.txt") == "a dodo"


WRAPPED = """<w:document {w}><w:body>
  <w:sdt><w:sdtPr/><w:sdtContent><w:p><w:r><w:t>Block.</w:t></w:r></w:p></w:sdtContent></w:sdt>
  <w:p><w:r><w:t xml:space="preserve">Kept, </w:t></w:r>
    <w:ins w:id="1" w:author="a"><w:r><w:t xml:space="preserve">inserted, </w:t></w:r></w:ins>
    <w:del w:id="2" w:author="a"><w:r><w:delText>deleted</w:delText><w:t>deleted</w:t></w:r></w:del>
    <w:sdt><w:sdtContent><w:r><w:t xml:space="preserve">controlled, </w:t></w:r></w:sdtContent></w:sdt>
    <w:fldSimple w:instr="PAGE"><w:smartTag><w:r><w:t>marked.</w:t></w:r></w:smartTag></w:fldSimple></w:p>
  <w:tbl><w:tblPr/><w:tblGrid><w:gridCol/><w:gridCol/></w:tblGrid><w:tr><w:tc><w:p><w:r><w:t>A</w:t></w:r></w:p></w:tc>
    <w:sdt><w:sdtContent><w:tc><w:p><w:r><w:t>B</w:t></w:r></w:p></w:tc></w:sdtContent></w:sdt></w:tr></w:tbl>
</w:body></w:document>"""


def test_of_a_word_document_what_is_wrapped_comes_too():
    from docx.oxml import parse_xml
    from docx.oxml.ns import nsdecls

    document = docx.Document()
    body = document.element.body
    for part in list(parse_xml(WRAPPED.format(w=nsdecls("w"))).body)[::-1]:
        body.insert(0, part)
    file = io.BytesIO()
    document.save(file)
    assert extract(file.getvalue(), "a.docx") == "Block.\nKept, inserted, controlled, marked.\nA\tB"


@pytest.mark.parametrize("declared", ["utf-8", "no-such", "shift_jis", "hex", "utf-16", "unicode_escape"])
def test_a_page_that_is_not_what_it_declares_is_refused(declared):
    with pytest.raises(InputError, match=f"{declared}.*convert it to UTF-8"):
        extract(f"<html><meta charset={declared}>".encode() + b"\xff\xe9</html>", "a.html")


@pytest.mark.parametrize(
    ("data", "name"), [(b"", "a.txt"), (b"\xef\xbb\xbf", "a.md"), (b"<html></html>", "a"), (pdf(""), "a.pdf")]
)
def test_a_file_without_text_is_refused(data, name):
    with pytest.raises(InputError, match="there is no text"):
        extract(data, name)


def test_a_word_file_that_unpacks_to_too_much_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(extraction, "_LARGEST_UNPACKED", 1000)
    with pytest.raises(InputError, match="too much"):
        extract(word(), "a.docx")


def test_nuggets_are_known_by_their_first_bytes_or_their_name():
    assert is_nuggets((100).to_bytes(8, "little") + b"{", "a.txt")
    assert is_nuggets(b"anything", "a.NUGGETS")
    assert not is_nuggets(TEXT.encode(), "a.txt")


def test_merged_cells_come_once_and_tables_in_cells_are_read():
    document = docx.Document()
    table = document.add_table(2, 3)
    table.cell(0, 0).merge(table.cell(0, 2)).text = "heading"
    for column, text in enumerate(("one", "two", "three")):
        table.cell(1, column).text = text
    inner = table.cell(1, 1).add_table(1, 2)
    inner.cell(0, 0).text, inner.cell(0, 1).text = "in", "side"
    table = document.add_table(2, 2)
    table.cell(0, 0).merge(table.cell(1, 0)).text = "tall"
    table.cell(0, 1).text, table.cell(1, 1).text = "up", "down"
    file = io.BytesIO()
    document.save(file)
    assert extract(file.getvalue(), "a.docx") == "heading\none\ttwo in\tside\tthree\ntall\tup\ndown"


def test_halves_of_characters_in_a_file_are_joined_or_marked(monkeypatch):
    monkeypatch.setattr(extraction, "_reader", lambda data, name, shown: lambda data, shown: "a \ud83d\ude42 b \ud800 c")
    assert extract(b"", "a.pdf") == "a 🙂 b \ufffd c"


@pytest.mark.parametrize(
    ("data", "name", "package"), [(pdf("a"), "a.pdf", "pypdf"), (word(), "a.docx", "docx"), (b"<html>a", "a.html", "inscriptis")]
)
def test_what_reads_a_kind_is_named_where_it_is_missing(data, name, package, monkeypatch):
    for loaded in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DodoError, match=rf"'{name}': reading it needs {package}.*dodo-lm\[documents\]"):
        extract(data, name)


def test_documents_are_data_too(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf("The dodo lived here."))
    (tmp_path / "b.HTML").write_text("<p>It could not fly.</p>", encoding="utf-8")
    assert list(read_texts([str(tmp_path / "*")])) == ["The dodo lived here.", "It could not fly."]
