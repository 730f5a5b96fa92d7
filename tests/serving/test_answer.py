"""Laws of one answer: how its tokens are chosen, and how its text comes and ends."""

import random
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from dodo.pieces import FEW, Pieces
from dodo.serving.answer import Answer, StopTexts, nucleus
from dodo.serving.request import Piece, Request
from tests.standins.models import byte_tokenizer


def answered(tokens: list[int], **settings: Any) -> list[Piece]:
    """Pieces of an answer of these tokens."""
    answer = Answer(Request(None, [3], **{"max_new_tokens": len(tokens), **settings}), byte_tokenizer(), [1])
    return [answer.take(torch.zeros(259), highest=0.0, likeliest=token)[1] for token in tokens]


@pytest.mark.parametrize("end", [[], [1]], ids=["length", "end token"])
def test_an_answer_that_ends_within_a_character_is_what_the_tokenizer_and_the_library_show(end: list[int]) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("ok 🦤", add_special_tokens=False)["input_ids"][:-2]
    pieces = Pieces(tokenizer, skip_prompt=False)
    pieces.put(torch.tensor(ids))
    pieces.end()
    text = "".join(piece.text for piece in answered([*ids, *end]))
    assert text == "".join(pieces) == tokenizer.decode(ids) == "ok \ufffd"


def test_a_stop_text_is_found_also_in_what_is_held_back_to_the_end() -> None:
    ids = byte_tokenizer()("ok 🦤", add_special_tokens=False)["input_ids"][:-2]
    pieces = answered(ids, stop=[" \ufffd"])
    assert ("".join(piece.text for piece in pieces), pieces[-1].finish) == ("ok", "stop")


def test_bytes_that_are_no_text_are_given_while_they_come() -> None:
    first = byte_tokenizer()("🦤", add_special_tokens=False)["input_ids"][0]
    given = [len(piece.text) for piece in answered([first] * 200)]
    assert sum(given) == 200 and max(given[:-1]) <= FEW + 1


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
