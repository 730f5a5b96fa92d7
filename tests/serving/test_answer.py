"""Laws of text that comes token by token."""

import random

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from dodo.serving.answer import Answer, IncrementalText, StopTexts, nucleus
from dodo.serving.request import Request
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


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_the_nucleus_is_the_one_of_transformers(top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for spread in (0.1, 1.0, 5.0):
        logits = spread * torch.randn(500, generator=generator)
        expected = TopPLogitsWarper(top_p)(None, logits[None])[0].isfinite() if top_p < 1 else torch.ones(500, dtype=torch.bool)
        assert nucleus(logits.softmax(-1), top_p).tolist() == expected.nonzero()[:, 0].tolist()


def sampled(logits: torch.Tensor, count: int, **settings: float) -> list[int]:
    answer = Answer(Request(None, [3], count + 1, seed=0, **settings), byte_tokenizer(), [])  # type: ignore[arg-type]
    return [answer.take(logits, highest=0.0, likeliest=0)[0] for _ in range(count)]


def test_tokens_are_sampled_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([0.0, 1.0, float("-inf"), 2.0, -1.0, 1.5])
    expected = (logits / 0.7).softmax(-1)
    found = torch.tensor(sampled(logits, 4000, temperature=0.7)).bincount(minlength=6) / 4000
    torch.testing.assert_close(found, expected, atol=4 * 0.5 / 4000**0.5, rtol=0)  # four standard errors at most
    assert set(sampled(logits, 500, temperature=0.7, top_p=0.5)) == {3}
    assert set(sampled(logits, 500, temperature=0.7, top_p=0.8)) == {3, 5}


def test_a_seed_gives_the_same_tokens_of_logits_that_differ_by_roundings() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(259, generator=generator)
    other = logits + 1e-6 * torch.randn(259, generator=generator)
    for settings in ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}):
        assert sampled(logits, 300, **settings) == sampled(other, 300, **settings)
