"""Laws of `dodo generate`."""

import json
import math
import os
import signal
import subprocess
import threading

import pytest
import torch

from dodo import adapter_files
from dodo.cli.options import DEFAULT_LANGUAGE_MODEL
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
