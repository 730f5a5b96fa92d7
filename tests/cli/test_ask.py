"""Laws of `dodo ask`."""

import json
import shutil
import subprocess
import threading

import pytest

from dodo.model import Dodo
from dodo.nuggets import Nuggets
from tests.cli.conftest import COMMAND
from tests.cli.tiny import TEXT

QUESTION = "Where did it live?"


@pytest.fixture
def nuggets(run, document, models):
    run("compress", document, "--ratio", "2", "--model", models.base)
    return document.with_suffix(".nuggets")


def answered(run, *arguments, **more):
    return json.loads(run("ask", *arguments, "--json", **more).stdout)


def test_compressing_in_one_process_and_asking_twice_in_two_others_gives_the_same_answer(document, models, tmp_path):
    path = tmp_path / "a.nuggets"

    def call(*arguments):
        return subprocess.run([*COMMAND, *arguments, "--model", models.base], capture_output=True, check=True).stdout

    call("compress", document, "-o", path, "--ratio", "2")
    stored = path.read_bytes()
    first, second = (call("ask", path, QUESTION) for _ in range(2))
    assert first == second
    assert len(first) > 1
    assert path.read_bytes() == stored


def test_the_answer_is_the_librarys(run, nuggets, models):
    expected = Dodo.from_pretrained(models.base).answer(Nuggets.load(nuggets), QUESTION)
    assert run("ask", nuggets, QUESTION, "--model", models.base).stdout == expected + "\n"
    assert answered(run, nuggets, QUESTION, "--model", models.base)["answer"] == expected


def test_a_text_is_compressed_first_and_gives_the_same_answer(run, document, nuggets, models):
    from_text = answered(run, document, QUESTION, "--ratio", "2", "--model", models.base)
    from_file = answered(run, nuggets, QUESTION, "--model", models.base)
    assert from_text["answer"] == from_file["answer"]
    assert from_text["k"] == from_file["k"]
    assert "compress" in from_text["seconds"]
    assert "read" in from_file["seconds"]


def test_standard_input_is_a_text(run, document, models):
    piped = answered(run, "-", QUESTION, "--ratio", "2", "--model", models.base, stdin=TEXT)
    assert piped["answer"] == answered(run, document, QUESTION, "--ratio", "2", "--model", models.base)["answer"]


def test_nuggets_on_standard_input_are_asked_for_by_their_name(run, nuggets, models):
    result = run("ask", "-", QUESTION, "--model", models.base, stdin=nuggets.read_bytes())
    assert result.exit_code == 1
    assert result.stderr == "error: standard input is a nuggets file; give its name instead of '-'\n"


def test_nuggets_are_known_by_their_content_and_not_by_their_suffix(run, nuggets, models, tmp_path):
    renamed = tmp_path / "report.txt"
    shutil.copy(nuggets, renamed)
    text = tmp_path / "text.nuggets"
    text.write_text(TEXT)
    expected = answered(run, nuggets, QUESTION, "--model", models.base)["answer"]
    assert answered(run, renamed, QUESTION, "--model", models.base)["answer"] == expected
    assert answered(run, text, QUESTION, "--ratio", "2", "--model", models.base)["answer"] == expected


def test_fresh_adapters_are_announced(run, nuggets, models):
    result = run("ask", nuggets, QUESTION, "--model", models.base)
    assert "note: adapters are fresh (untrained)" in result.stderr
    assert "adapters" not in result.stdout


def test_max_new_tokens_bounds_the_answer(run, nuggets, models):
    longer = answered(run, nuggets, QUESTION, "--max-new-tokens", "9", "--model", models.base)["answer"]
    shorter = answered(run, nuggets, QUESTION, "--max-new-tokens", "2", "--model", models.base)["answer"]
    assert len(shorter) < len(longer)
    assert longer.startswith(shorter.rstrip("\ufffd"))


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(run, nuggets, models):
    def sampled(seed):
        flags = ("--temperature", "3", "--seed", seed, "--model", models.base)
        return answered(run, nuggets, QUESTION, *flags)["answer"]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_a_tiny_top_p_gives_the_likeliest_tokens(run, nuggets, models):
    greedy = answered(run, nuggets, QUESTION, "--model", models.base)["answer"]
    assert answered(run, nuggets, QUESTION, "--top-p", "1e-9", "--model", models.base)["answer"] == greedy
    assert answered(run, nuggets, QUESTION, "--temperature", "0", "--model", models.base)["answer"] == greedy


# -- bad input


@pytest.mark.parametrize("question", ["", "  \n"])
def test_empty_question_is_a_usage_error(question, run, document, no_model):
    result = run("ask", document, question)
    assert result.exit_code == 2
    assert "QUESTION" in result.stderr
    assert "is empty" in result.stderr


def test_missing_question_is_a_usage_error(run, document, no_model):
    assert run("ask", document).exit_code == 2


def test_missing_file_is_named(run, tmp_path, no_model):
    result = run("ask", tmp_path / "none.nuggets", QUESTION)
    assert result.exit_code == 2
    assert "none.nuggets: there is no such file" in result.stderr


def test_directory_is_refused(run, tmp_path, no_model):
    assert run("ask", tmp_path, QUESTION).exit_code == 2


@pytest.mark.parametrize(("flag", "value"), [("--ratio", "5"), ("--nuggets", "5")])
def test_selection_flags_are_refused_for_nuggets(flag, value, run, nuggets, models, no_model):
    result = run("ask", nuggets, QUESTION, flag, value)
    assert result.exit_code == 2
    assert f"{flag} {value}: has no effect" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-new-tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--top-p", "nan"),
        ("--seed", "-1", "--temperature", "1"),
        ("--seed", "1"),
        ("--seed", "1", "--temperature", "0"),
        ("--temperature", "0", "--top-p", "0.5"),
    ],
)
def test_generation_flags_out_of_range_are_usage_errors_that_name_the_flag(flags, run, document, no_model):
    result = run("ask", document, QUESTION, *flags)
    assert result.exit_code == 2
    assert flags[0] in result.stderr


def test_nuggets_of_another_model_are_refused_and_the_override_is_named(run, nuggets, models):
    result = run("ask", nuggets, QUESTION, "--model", models.other)
    assert result.exit_code == 1
    assert "was made with another base" in result.stderr
    assert "--trust-nuggets" in result.stderr
    assert result.stdout == ""


def test_trusted_nuggets_of_another_model_are_used(run, nuggets, models):
    assert run("ask", nuggets, QUESTION, "--model", models.other, "--trust-nuggets").exit_code == 0


def test_trusted_nuggets_of_another_shape_are_still_refused(run, nuggets, models):
    result = run("ask", nuggets, QUESTION, "--model", models.wider, "--trust-nuggets")
    assert result.exit_code == 1
    assert "width" in result.stderr


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_truncated_nuggets_are_refused(keep, run, nuggets, models):
    nuggets.write_bytes(nuggets.read_bytes()[:keep])
    result = run("ask", nuggets, QUESTION, "--model", models.base)
    assert result.exit_code == 1
    assert str(nuggets) in result.stderr


def test_damaged_nuggets_are_refused(run, nuggets, models):
    data = bytearray(nuggets.read_bytes())
    data[-7] ^= 1
    nuggets.write_bytes(data)
    result = run("ask", nuggets, QUESTION, "--model", models.base)
    assert result.exit_code == 1
    assert "is damaged" in result.stderr


def test_nuggets_of_several_texts_are_refused(run, models, tmp_path):
    path = tmp_path / "batch.nuggets"
    Dodo.from_pretrained(models.base).compress(["one text", "another one"], ratio=2).save(path)
    result = run("ask", path, QUESTION, "--model", models.base)
    assert result.exit_code == 1
    assert "the nuggets of 2 texts" in result.stderr


def test_answer_that_does_not_fit_the_window_says_what_to_do(run, nuggets, models):
    result = run("ask", nuggets, QUESTION, "--max-new-tokens", "1000", "--model", models.base)
    assert result.exit_code == 1
    assert "--max-new-tokens" in result.stderr
    assert "or compress the text more" in result.stderr


def test_closing_the_stream_ends_the_generation(models):
    dodo = Dodo.from_pretrained(models.base)
    stream = dodo.stream(dodo.compress(TEXT, nuggets=5), "a question of no end", max_new_tokens=300, eos_token_id=None)
    next(stream)
    before = set(threading.enumerate())
    stream.close()
    assert not any("run" in thread.name for thread in before & set(threading.enumerate()))
