"""Laws of `dodo reconstruct`."""

import json

import pytest

from dodo.model import Dodo
from dodo.nuggets import Nuggets


@pytest.fixture
def nuggets(run, document, models):
    run("compress", document, "--ratio", "2", "--positions", "compact", "--model", models.base)
    return document.with_suffix(".nuggets")


def test_the_text_is_the_librarys(run, nuggets, models):
    expected = Dodo.from_pretrained(models.base).reconstruct(Nuggets.load(nuggets), max_new_tokens=40)
    assert run("reconstruct", nuggets, "--max-new-tokens", "40", "--model", models.base).stdout == expected + "\n"
    report = json.loads(run("reconstruct", nuggets, "--max-new-tokens", "40", "--json", "--model", models.base).stdout)
    assert report["text"] == expected
    assert report["adapters"] == "fresh"


def test_doing_it_twice_gives_the_same_text_and_leaves_the_file_alone(run, nuggets, models):
    before = nuggets.read_bytes()
    first, second = (run("reconstruct", nuggets, "--max-new-tokens", "20", "--model", models.base).stdout for _ in range(2))
    assert first == second
    assert nuggets.read_bytes() == before


def test_a_text_is_compressed_first(run, document, models):
    flags = ("--ratio", "2", "--max-new-tokens", "10", "--json", "--model", models.base)
    report = json.loads(run("reconstruct", document, *flags).stdout)
    assert report["k"] == -(-report["n"] // 2)


def test_missing_file_is_named(run, tmp_path, no_model):
    result = run("reconstruct", tmp_path / "none.nuggets")
    assert result.exit_code == 2
    assert "none.nuggets: there is no such file" in result.stderr


def test_binary_file_is_refused_with_its_byte_offset(run, tmp_path, no_model):
    path = tmp_path / "data.bin"
    path.write_bytes(b"\x80\x02pickle")
    result = run("reconstruct", path)
    assert result.exit_code == 1
    assert "byte 0x80 at byte offset 0" in result.stderr


@pytest.mark.parametrize("scheme", ["original", "compact"])
@pytest.mark.parametrize("verb", [["reconstruct"], ["ask", "QUESTION"]])
def test_texts_near_the_windows_end_are_answered_with_as_much_as_there_is_room_for(run, tmp_path, models, scheme, verb):
    """The window has 512 positions."""
    path = tmp_path / "long.txt"
    path.write_text("the dodo was a bird " * 40, encoding="utf-8")
    report = json.loads(run("compress", path, "--ratio", "4", "--positions", scheme, "--model", models.base, "--json").stdout)
    assert 300 < report["n"] < 512
    flags = [path.with_suffix(".nuggets"), *(["Who was it?"] if verb[1:] else []), "--json", "--model", models.base]
    clipped = run(verb[0], *flags)
    report, room = json.loads(clipped.stdout), "the base's window has room for"
    assert (room in clipped.stderr) == (report["max_new_tokens"] < (64 if verb[1:] else report["n"] + 1))
    assert ("put at compact ones" in clipped.stderr) == (scheme != report["positions"])
    assert scheme == report["positions"] or (scheme, report["positions"]) == ("original", "compact")
    assert verb[1:] or report["positions"] == "compact"  # the text stands twice in the window, and has no room for that
    whole = run(verb[0], path, *flags[1:], "--ratio", "1")  # no room for the text beside its own tokens
    assert (f"{room} {json.loads(whole.stdout)['max_new_tokens']:,} of" in whole.stderr) == (not verb[1:])
    result = run(verb[0], *flags, "--max-new-tokens", "500")
    assert result.exit_code == 1
    assert "lower --max-new-tokens" in result.stderr
