"""Laws of text that comes token by token."""

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dodo.pieces import FEW, IncrementalText, Pieces
from tests.standins.models import byte_tokenizer

TEXT = "Dodos lived on Mauritius; 你好, 渡渡鳥在模里西斯島. 🙂🙂 Ça va? " * 4


def _falling_back() -> PreTrainedTokenizerFast:
    """As SentencePiece's: a space in front of words, which is left out at the beginning, and bytes where there is no token."""
    words = ["</s>", "▁Dodos", "▁lived", "ing", "▁on", "▁", ";", "▁你", "好"]
    vocabulary = {token: i for i, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def _streamed(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    """Pieces of a text behind a prompt of two tokens, while no more than a few tokens are held."""
    pieces = Pieces(tokenizer, skip_prompt=True)
    pieces.put(torch.tensor([[0, 0]]))
    for i in ids:
        pieces.put(torch.tensor([i]))
        assert len(pieces._text._ids) <= 5 * FEW
    pieces.end()
    return list(pieces)


def _decoded(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def test_pieces_are_the_text_and_no_character_comes_in_halves() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    pieces = _streamed(tokenizer, [0, *ids[:9], 1, *ids[9:]])
    assert "".join(pieces) == TEXT
    assert len(pieces) == len(ids) + 2 + 1


def test_what_is_given_is_the_text_so_far_in_complete_characters() -> None:
    tokenizer = byte_tokenizer()
    growing, given, ids = IncrementalText(tokenizer), "", tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for end, token in enumerate(ids, start=1):
        given += growing.push(token)
        assert given == _decoded(tokenizer, ids[:end]).rstrip("\ufffd")
        assert TEXT.startswith(given)
    assert growing.rest() == ""


def test_bytes_that_are_no_text_come_as_in_the_whole() -> None:
    ids = random.Random(0).choices(range(2, 258), k=600)
    ids += [byte_tokenizer()("你", add_special_tokens=False)["input_ids"][0]] * 200
    assert "".join(_streamed(byte_tokenizer(), ids)) == _decoded(byte_tokenizer(), ids)


def test_spaces_in_front_of_words_and_bytes_in_place_of_tokens_come_as_in_the_whole() -> None:
    tokenizer, chooser = _falling_back(), random.Random(0)
    ids: list[int] = []
    for _ in range(200):
        character = chooser.choice(["鳥", "é", "🙂", ""])
        ids += [chooser.randrange(9), *(9 + byte for byte in character.encode())]
    ids += [9 + byte for byte in ("渡" * 30 + "é" * 30).encode()]
    assert "".join(_streamed(tokenizer, ids)) == _decoded(tokenizer, ids)


@pytest.mark.parametrize("before", ["é", "🙂"])
@pytest.mark.parametrize("odd", [b"\x80", b"\xf0\x9f", b"\xff" * 20])
def test_what_is_behind_bytes_that_are_no_character_comes(before: str, odd: bytes) -> None:
    """This decoder takes a whole run of bytes for unknown ones, also the characters in it that were whole and have been given."""
    tokenizer = _falling_back()
    ids = [1, *(9 + byte for byte in before.encode() + odd), *([1, 2] * 40)]
    text = "".join(_streamed(tokenizer, ids))
    assert text.startswith("Dodos" + before)
    assert text.endswith(" Dodos lived" * 40)
    assert _decoded(tokenizer, ids).endswith(text.removeprefix("Dodos" + before))


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), _falling_back()], ids=["bytes", "falling back"])
def test_what_is_half_at_the_end_comes_last(tokenizer: PreTrainedTokenizerFast) -> None:
    first = tokenizer.convert_tokens_to_ids("<0xE4>") or tokenizer("你", add_special_tokens=False)["input_ids"][0]
    assert _streamed(tokenizer, [first]) == ["", "\ufffd"]
