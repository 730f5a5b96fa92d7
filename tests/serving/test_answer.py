"""Laws of text that comes token by token."""

import random

import pytest

from dodo.serving.answer import IncrementalText, StopTexts
from tests.standins.models import byte_tokenizer


@pytest.mark.parametrize("text", ["plain", "dodo 🦤🦤 é ⓐ", "cut: 🦤", "the the"])
def test_text_comes_in_complete_characters(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for end in range(len(ids) + 1):
        growing = IncrementalText(tokenizer)
        pieces = [growing.push(token) for token in ids[:end]]
        assert "".join(pieces) == tokenizer.decode(ids[:end]).rstrip("\ufffd")
        assert text.startswith("".join(pieces))


def test_bytes_that_are_no_text_come_as_the_tokenizer_shows_them() -> None:
    tokenizer, chance = byte_tokenizer(), random.Random(0)
    for _ in range(20):
        ids = [chance.randrange(259) for _ in range(30)]
        growing = IncrementalText(tokenizer)
        expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).rstrip("\ufffd")
        assert "".join(growing.push(token) for token in ids) == expected


def test_text_ends_before_the_first_stop_text_however_it_is_cut() -> None:
    chance = random.Random(0)
    for _ in range(300):
        whole = "".join(chance.choice("ab") for _ in range(20))
        stops = ["".join(chance.choice("ab") for _ in range(chance.randint(3, 6)))] * chance.randint(0, 1) + ["bbbbb"]
        filtered, given, at, stopped = StopTexts(stops), "", 0, False
        while at < len(whole) and not stopped:
            step = chance.randint(0, 3)
            new, stopped = filtered.push(whole[at : at + step])
            given, at = given + new, at + step
        ends = [whole.index(stop) for stop in stops if stop in whole[:at]]
        assert stopped == bool(ends)
        assert given + ("" if stopped else filtered.rest()) == whole[: min(ends, default=len(whole))]
