"""Laws of `dodo generate`."""

import json
import math
import os
import signal
import subprocess
import threading

import pytest
import torch
from transformers import TextStreamer

from dodo import adapter_files
from dodo.cli.options import DEFAULT_LANGUAGE_MODEL
from dodo.errors import InputError
from dodo.model import Dodo
from dodo.streaming import StreamingCache, generate_ids
from tests.cli.conftest import COMMAND
from tests.cli.tiny import TEXT

SMALL = ("--window", "9", "--segment", "4", "--max-states", "30")
MEMORY = {"window": 9, "segment": 4, "max_states": 30}


@pytest.fixture
def dodo(models):
    return Dodo.from_pretrained(models.trained)


def test_the_language_model_that_is_taken_by_default_ships_with_its_thresholds():
    folder = adapter_files.find(DEFAULT_LANGUAGE_MODEL)
    assert folder is not None
    thresholds = adapter_files.load_thresholds(folder)
    assert thresholds is not None
    assert thresholds.at(2) < thresholds.at(10) < thresholds.at(20)


@pytest.mark.parametrize("flags", [("--threshold", "0"), ("--ratio", "1"), ("--threshold", "inf"), ("--threshold", "-inf")])
def test_the_text_is_the_librarys(flags, run, document, models, dodo):
    given = {flags[0].removeprefix("--"): float(flags[1])}
    expected = dodo.write(TEXT, dodo.autoregressive(**given, **MEMORY), max_new_tokens=10)
    arguments = ("--model", models.trained, *SMALL, *flags, "--max-new-tokens", "10")
    assert run("generate", document, *arguments).stdout == expected + "\n"
    assert run("generate", "-", *arguments, stdin=TEXT).stdout == expected + "\n"
    shown = json.loads(run("generate", "--prompt", TEXT, *arguments, "--json").stdout)
    assert shown["text"] == expected
    assert shown["tokens_read"] == len(dodo.document_ids(TEXT))


def test_sampling_is_the_librarys(run, document, models, dodo):
    torch.manual_seed(3)
    lm = dodo.autoregressive(threshold=0.0, **MEMORY)
    expected = dodo.write(TEXT, lm, max_new_tokens=9, do_sample=True, temperature=0.7, top_p=0.9, top_k=0)
    flags = ("--temperature", "0.7", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "9", "--threshold", "0", *SMALL)
    assert run("generate", document, *flags, "--model", models.trained).stdout == expected + "\n"


def test_ten_windows_are_read_in_flat_memory(run, models, dodo, tmp_path, monkeypatch):
    held, bytes_held = [], []
    note = StreamingCache.note

    def spy(self, kept):
        note(self, kept)
        held.append(len(self.positions))
        bytes_held.append(self.nbytes)

    monkeypatch.setattr(StreamingCache, "note", spy)
    long = tmp_path / "long.txt"
    long.write_text((TEXT * 60)[:11_000], encoding="utf-8")
    flags = ("--threshold", "0", "--max-states", "200", "--max-new-tokens", "5", "--json", "--model", models.trained)
    shown = json.loads(run("generate", long, *flags).stdout)
    assert shown["tokens_read"] > 10 * 512
    assert shown["tokens"] == shown["tokens_read"] + shown["tokens_new"] - 1
    assert max(held) <= 200
    assert max(bytes_held[len(bytes_held) // 2 :]) <= max(bytes_held[: len(bytes_held) // 2])
    assert shown["states"] == held[-1]
    a_state = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    features = (shown["bytes_held"] - held[-1] * a_state) / (a_state / 3 * 2)  # below layer 2
    assert features == int(features)
    assert 255 <= features < 255 + 64


def test_stats_say_what_was_read_and_what_is_held_on_stderr(run, document, models, dodo):
    result = run("generate", document, "--threshold", "0", *SMALL, "--stats", "--max-new-tokens", "3", "--model", models.trained)
    seen = len(dodo.document_ids(TEXT)) + 2
    assert f"note: {seen} tokens seen, " in result.stderr
    assert "tokens/s" in result.stderr
    assert "tokens seen" not in result.stdout


# -- streaming


def test_pieces_come_before_the_end_and_closing_ends_the_generation(dodo):
    cache = StreamingCache(dodo.autoregressive(threshold=0.0))
    stream = dodo.stream_text(TEXT, cache=cache, max_new_tokens=300, eos_token_id=None)
    next(stream)
    assert cache.tokens < 300
    stream.close()
    assert not any("(run)" in thread.name for thread in threading.enumerate())
    reached = cache.tokens
    assert len(dodo.document_ids(TEXT)) <= reached < 300
    generate_ids(cache.lm, dodo.document_ids("x")[1:], cache=cache, max_new_tokens=2, eos_token_id=None)
    assert cache.tokens == reached + 2  # it is whole, and goes on


def test_a_text_that_follows_in_the_same_stream_is_no_new_text(dodo):
    """No token of a beginning stands between them, and the last token made is read too."""
    lm = dodo.autoregressive(threshold=0.0, **MEMORY)
    cache = StreamingCache(lm)
    settings = {"max_new_tokens": 6, "eos_token_id": None}
    first = "".join(dodo.stream_text("Hello", cache=cache, **settings))
    second = "".join(dodo.stream_text(" more", cache=cache, **settings))
    ids = dodo.document_ids("Hello")
    made = generate_ids(lm, ids, **settings)
    more = [*ids, *made, *dodo.document_ids(" more")[len(dodo.with_bos([])) :]]
    assert first == dodo.tokenizer.decode(made, skip_special_tokens=True)
    assert second == dodo.tokenizer.decode(generate_ids(lm, more, **settings), skip_special_tokens=True)
    assert cache.tokens == len(more) + 5


def test_end_tokens_are_no_text_and_the_streamer_is_the_streams_own(dodo):
    lm = dodo.autoregressive(threshold=0.0, **MEMORY)
    made = generate_ids(lm, dodo.document_ids(TEXT), max_new_tokens=8, eos_token_id=None)
    end = {"eos_token_id": made[4], "max_new_tokens": 8}
    text = dodo.write(TEXT, lm, **end)
    assert "".join(dodo.stream_text(TEXT, lm, **end)) == text
    nuggets = dodo.compress(TEXT, ratio=2)
    new = dodo.generate_ids(nuggets, [dodo.document_ids("Who?")], max_new_tokens=8, eos_token_id=None)[0]
    end = {"eos_token_id": new[4], "max_new_tokens": 8}
    assert "".join(dodo.stream(nuggets, dodo.document_ids("Who?"), **end)) == dodo.tokenizer.decode(new[: new.index(new[4])])
    with pytest.raises(InputError, match="streamer"):
        next(dodo.stream_text(TEXT, lm, streamer=TextStreamer(dodo.tokenizer)))
    with pytest.raises(InputError, match="as far as the base's vocabulary goes"):
        next(dodo.stream_text([1, 100_000], lm))


def test_new_text_keeps_its_first_space_with_tokenizers_that_drop_a_texts_own(run, models, dodo, monkeypatch):
    """Those of Llama 2, Mistral and Phi-3: a text's first space is no part of what they decode."""
    whole = type(dodo.tokenizer).decode
    ids = dodo.document_ids(TEXT)
    settings = {"max_new_tokens": 6, "eos_token_id": None}

    def stripped(self, tokens, **more):
        text = whole(self, tokens, **more)
        return text[1:] if len(text) > 1 else text

    monkeypatch.setattr(type(dodo.tokenizer), "decode", stripped)
    lm = dodo.autoregressive(threshold=0.0, **MEMORY)
    wanted = dodo.write(TEXT, lm, **settings)
    assert "".join(dodo.stream_text(ids, lm, behind=ids[-1], **settings)) == wanted
    given = ("--prompt", TEXT, "--threshold", "0", *SMALL, "--max-new-tokens", "6", "--model", models.trained)
    assert run("generate", *given).stdout == dodo.write(TEXT, lm, max_new_tokens=6) + "\n"


def test_an_interrupt_ends_reading_at_a_segments_end_and_the_rest_can_be_read(dodo):
    lm = dodo.autoregressive(threshold=0.0, **MEMORY)
    ids = dodo.document_ids(TEXT)

    def interrupt(read: int, total: int) -> None:
        assert total == len(ids)
        if read == 40:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            interrupted.wait(5)

    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)

    def handler(number, frame):
        interrupted.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    cache = StreamingCache(lm)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(dodo.stream_text(ids, cache=cache, progress=interrupt))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert 40 <= cache.tokens < len(ids)
    assert cache.tokens % lm.segment == 0
    rest = "".join(dodo.stream_text(ids[cache.tokens :], cache=cache, max_new_tokens=20))
    assert rest == dodo.write(TEXT, lm, max_new_tokens=20)


def test_a_reader_that_hangs_up_ends_it_without_a_traceback(models, document):
    read, write = os.pipe()
    os.close(read)
    flags = ("--ratio", "1", "--max-new-tokens", "100", "--model", models.base)
    try:
        done = subprocess.run(
            [*COMMAND, "generate", document, *flags], stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert done.returncode == 1
    for word in ("Traceback", "Exception", "terminate"):
        assert word not in done.stderr


# -- bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "FILE and --prompt: give one of them"),
        (("dodo.txt", "--prompt", "x"), "not both"),
        (("--prompt", ""), "--prompt: is empty"),
        (("none.txt",), "none.txt: there is no such file"),
        (("--prompt", "x", "--ratio", "3", "--threshold", "1"), "--ratio 3 and --threshold 1: give one of them"),
        (("--prompt", "x", "--threshold", "nan"), "--threshold nan"),
        (("--prompt", "x", "--threshold", "much"), "--threshold"),
        (("--prompt", "x", "--ratio", "0.5"), "--ratio"),
        (("--prompt", "x", "--window", "0"), "--window"),
        (("--prompt", "x", "--segment", "0"), "--segment"),
        (("--prompt", "x", "--max-states", "0"), "--max-states"),
        (("--prompt", "x", "--max-new-tokens", "0"), "--max-new-tokens"),
        (("--prompt", "x", "--seed", "1"), "--seed 1: has no effect"),
        (("--prompt", "x", "--num-beams", "2"), "--num-beams"),
    ],
)
def test_wrong_usage_is_told_before_a_model_is_loaded(arguments, says, run, no_model):
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--ratio", "10"), "--ratio 10: --model {} has no thresholds yet; estimate them with: dodo calibrate CORPUS --model {}"),
        ((), "--ratio 3: --model {} has no thresholds yet"),
        (("--ratio", "1", "--window", "300"), "--window and --segment: "),
        (("--ratio", "1", "--max-states", "100"), "--max-states: "),
    ],
)
def test_what_does_not_fit_the_model_names_flag_and_remedy(flags, says, run, models):
    result = run("generate", "--prompt", "x", *flags, "--model", models.trained)
    assert result.exit_code == 2
    assert says.replace("{}", models.trained) in result.stderr
    assert result.stdout == ""


def test_a_ratio_that_the_table_lacks_is_refused(run, models, dodo, tmp_path):
    dodo.estimate_thresholds([TEXT])
    dodo.save_pretrained(tmp_path / "mine")
    result = run("generate", "--prompt", "x", "--ratio", "41", "--model", tmp_path / "mine")
    assert result.exit_code == 2
    assert "--ratio 41: there are thresholds for ratio 1 and for 1.5 to 40" in result.stderr


def test_infinite_thresholds_are_json(run, models):
    for value in ("inf", "-inf"):
        shown = run("generate", "--prompt", "x", "--threshold", value, "--max-new-tokens", "1", "--json", "--model", models.base)
        assert math.isinf(float(json.loads(shown.stdout)["threshold"]))


def test_an_empty_file_is_refused(run, tmp_path, no_model):
    (tmp_path / "empty.txt").write_text("")
    result = run("generate", tmp_path / "empty.txt")
    assert result.exit_code == 1
    assert "is empty" in result.stderr
