"""Laws of `dodo compress`."""

import errno
import json
import os
import resource

import pytest

from dodo.nuggets import Nuggets
from tests.cli.tiny import TEXT


def compressed(run, *arguments, **more):
    return json.loads(run("compress", *arguments, "--json", **more).stdout)


def test_the_file_holds_what_the_report_says(run, document, models):
    report = compressed(run, document, "--ratio", "4", "--model", models.base)
    path = document.with_suffix(".nuggets")
    nuggets = Nuggets.load(path)
    assert report["output"] == str(path)
    assert report["n"] == int(nuggets.lengths)
    assert report["k"] == int(nuggets.k) == -(-report["n"] // 4)
    assert report["states"] == int(nuggets.states) == report["k"] + 1
    assert report["bytes_file"] == path.stat().st_size
    assert report["bytes_held"] * (report["n"] + 1) == report["bytes_full_cache"] * report["states"]
    assert report["ratio_achieved"] == pytest.approx((report["n"] + 1) / report["states"])
    assert set(report["seconds"]) == {"load", "compress", "write"}


def test_the_report_for_people_goes_to_stdout_and_progress_to_stderr(run, document, models):
    result = run("compress", document, "--ratio", "4", "--model", models.base)
    for word in ("n, tokens", "k, nuggets", "states held", "ratio", "memory", "file size", "seconds", "asked: 4"):
        assert word in result.stdout
    assert "loading" in result.stderr
    assert "loading the model took" in result.stdout


def test_nuggets_gives_that_many(run, document, models):
    assert compressed(run, document, "--nuggets", "7", "--model", models.base)["k"] == 7


def test_without_ratio_the_models_own_is_used(run, document, models):
    assert compressed(run, document, "--model", models.trained)["ratio_asked"] == 3.0


def test_fresh_adapters_are_announced_and_trained_ones_are_not(run, document, models):
    fresh = run("compress", document, "--model", models.base)
    trained = run("compress", document, "--model", models.trained, "--force")
    assert "note: adapters are fresh (untrained)" in fresh.stderr
    assert "fresh" not in trained.stderr
    assert compressed(run, document, "--model", models.base, "--force")["adapters"] == "fresh"
    assert compressed(run, document, "--model", models.trained, "--force")["adapters"] == "trained"


def test_ratio_outside_the_trained_range_warns_in_one_line(run, document, models):
    result = run("compress", document, "--ratio", "9", "--model", models.trained)
    assert result.exit_code == 0
    assert "warning: ratio 9 is outside the range that these adapters were trained for (2 to 4)\n" in result.stderr


def test_standard_input_gives_what_the_file_gives(run, document, models, tmp_path):
    run("compress", document, "--model", models.base)
    run("compress", "-", "-o", tmp_path / "piped.nuggets", "--model", models.base, stdin=TEXT)
    assert (tmp_path / "piped.nuggets").read_bytes() == document.with_suffix(".nuggets").read_bytes()


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "int8"])
def test_every_storage_type_can_be_read_back(storage, run, document, models):
    report = compressed(run, document, "--storage", storage, "--model", models.base)
    assert report["storage"] == storage
    assert int(Nuggets.load(report["output"]).k) == report["k"]


@pytest.mark.parametrize("positions", ["original", "compact"])
def test_positions_are_those_asked_for(positions, run, document, models):
    report = compressed(run, document, "--positions", positions, "--model", models.base)
    nuggets = Nuggets.load(report["output"])
    assert report["positions"] == nuggets.scheme == positions
    expected = report["n"] + 1 if positions == "original" else report["states"]
    assert int(nuggets.next_positions) == expected


def test_text_longer_than_the_window_is_compressed_with_a_warning(run, models, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 8)
    result = run("compress", path, "--model", models.base)
    assert result.exit_code == 0
    assert "is longer than the base's window" in result.stderr


def test_byte_order_mark_is_not_part_of_the_text(run, document, models, tmp_path):
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert compressed(run, marked, "--model", models.base)["n"] == compressed(run, document, "--model", models.base)["n"]


# -- bad input


def test_output_that_exists_is_refused_without_force(run, document, no_model):
    path = document.with_suffix(".nuggets")
    path.write_text("mine")
    result = run("compress", document)
    assert result.exit_code == 2
    assert f"--output {path}: exists already" in result.stderr
    assert "--force" in result.stderr
    assert path.read_text() == "mine"


def test_output_that_exists_is_replaced_with_force(run, document, models):
    path = document.with_suffix(".nuggets")
    path.write_text("mine")
    assert run("compress", document, "--force", "--model", models.base).exit_code == 0
    assert int(Nuggets.load(path).k) > 0


def test_output_is_never_the_input(run, tmp_path, no_model):
    path = tmp_path / "text.nuggets"
    path.write_text("a text in spite of its name")
    result = run("compress", path, "--force")
    assert result.exit_code == 2
    assert "is the input itself" in result.stderr


def test_standard_input_needs_an_output(run, no_model):
    result = run("compress", "-", stdin="text")
    assert result.exit_code == 2
    assert "--output" in result.stderr


def test_missing_output_folder_is_named(run, document, tmp_path, no_model):
    result = run("compress", document, "-o", tmp_path / "nowhere" / "a.nuggets")
    assert result.exit_code == 2
    assert f"there is no folder {tmp_path / 'nowhere'}" in result.stderr


def test_output_that_is_a_directory_is_refused(run, document, tmp_path, no_model):
    result = run("compress", document, "-o", tmp_path, "--force")
    assert result.exit_code == 2
    assert "is a directory" in result.stderr


def test_missing_file_is_named(run, tmp_path, no_model):
    result = run("compress", tmp_path / "none.txt")
    assert result.exit_code == 2
    assert f"{tmp_path / 'none.txt'}: there is no such file" in result.stderr


def test_directory_is_refused(run, tmp_path, no_model):
    result = run("compress", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path}: is a directory" in result.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"caf\xe9 au lait", "byte 0xe9 at byte offset 3"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "byte 0x00 at byte offset 8"),
        ("naïve".encode("utf-16")[:-1], "is not UTF-16 text: byte 0x65 at byte offset 10"),
        ("你好".encode()[:-1], "byte offset 3"),
    ],
)
def test_input_that_is_not_utf8_text_is_refused_with_its_byte_offset(data, message, run, tmp_path, no_model):
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    result = run("compress", path)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not path.with_suffix(".nuggets").exists()


def test_binary_standard_input_is_refused_with_its_byte_offset(run, tmp_path, no_model):
    result = run("compress", "-", "-o", tmp_path / "a.nuggets", stdin=b"abc\xff")
    assert result.exit_code == 1
    assert "standard input is not UTF-8 text: byte 0xff at byte offset 3" in result.stderr


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_empty_file_is_refused(data, run, tmp_path, no_model):
    path = tmp_path / "empty.txt"
    path.write_bytes(data)
    result = run("compress", path)
    assert result.exit_code == 1
    assert "is empty" in result.stderr


def test_of_a_page_what_a_reader_sees_is_compressed(run, tmp_path, models):
    pytest.importorskip("inscriptis", reason="an extra")
    page, text = tmp_path / "page.html", tmp_path / "text.txt"
    page.write_text("<!doctype html><title>no</title><p>The <b>dodo</b> was a bird.</p>", encoding="utf-8")
    text.write_text("The dodo was a bird.", encoding="utf-8")
    made = [Nuggets.load(compressed(run, path, "--model", models.base)["output"]) for path in (page, text)]
    assert made[0].token_ids.tolist() == made[1].token_ids.tolist()
    piped = compressed(run, "-", "-o", tmp_path / "piped.nuggets", "--model", models.base, stdin=page.read_bytes())
    assert piped["n"] == int(made[0].lengths)


def test_a_files_text_is_compressed_as_it_stands(run, tmp_path, models):
    """White space at its ends included; whether it is UTF-8 or marked as UTF-16."""
    sizes = []
    for text, encoding in ((TEXT, "utf-8"), (f"{TEXT}\n\n", "utf-8"), (f"{TEXT}\n\n", "utf-16")):
        path = tmp_path / f"{len(sizes)}.txt"
        path.write_text(text, encoding=encoding, newline="\n")
        sizes.append(compressed(run, path, "--model", models.base)["n"])
    assert sizes[0] < sizes[1] == sizes[2]


def test_blank_text_has_a_defined_result(run, tmp_path, models):
    path = tmp_path / "blank.txt"
    path.write_text("   ")
    assert compressed(run, path, "--model", models.base)["k"] >= 1


def test_nuggets_are_not_compressed_again(run, document, models):
    run("compress", document, "--model", models.base)
    result = run("compress", document.with_suffix(".nuggets"), "-o", document.with_suffix(".again"), "--model", models.base)
    assert result.exit_code == 1
    assert "is a nuggets or safetensors file" in result.stderr


@pytest.mark.parametrize("ratio", ["0.5", "0", "-3", "nan", "inf", "ten"])
def test_ratio_out_of_range_is_a_usage_error(ratio, run, document, no_model):
    result = run("compress", document, "--ratio", ratio)
    assert result.exit_code == 2
    assert "--ratio" in result.stderr
    assert ratio in result.stderr
    assert "at least 1" in result.stderr


@pytest.mark.parametrize("count", ["0", "-1", "2.5"])
def test_number_of_nuggets_out_of_range_is_a_usage_error(count, run, document, no_model):
    result = run("compress", document, "--nuggets", count)
    assert result.exit_code == 2
    assert "--nuggets" in result.stderr


def test_ratio_and_nuggets_together_are_refused(run, document, no_model):
    result = run("compress", document, "--ratio", "10", "--nuggets", "5")
    assert result.exit_code == 2
    assert "--ratio 10 and --nuggets 5" in result.stderr


def test_ratio_beyond_the_text_gives_one_nugget(run, document, models):
    assert compressed(run, document, "--ratio", "100000", "--model", models.base)["k"] == 1


def test_model_that_does_not_exist_is_a_usage_error(run, document, tmp_path):
    result = run("compress", document, "--model", tmp_path / "nothing" / "here")
    assert result.exit_code == 2
    assert f"--model {tmp_path / 'nothing' / 'here'}" in result.stderr


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "hpu", "xpu"])
def test_device_that_does_not_exist_is_a_usage_error(device, run, document, models):
    result = run("compress", document, "--model", models.base, "--device", device)
    assert result.exit_code == 2
    assert f"--device {device}" in result.stderr


def test_full_disk_leaves_nothing_half_written(run, document, models):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        result = run("compress", document, "--model", models.base)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    assert "could not write" in result.stderr
    assert list(document.parent.iterdir()) == [document]


def test_full_disk_leaves_the_old_file_as_it_was(run, document, models, monkeypatch):
    path = document.with_suffix(".nuggets")
    path.write_text("mine")

    def full(*arguments, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dodo.nuggets_file.save_file", full)
    result = run("compress", document, "--force", "--model", models.base)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert path.read_text() == "mine"
    assert sorted(document.parent.iterdir()) == [path, document]


@pytest.mark.parametrize(
    ("dtype", "has_it", "noted"), [("bfloat16", False, True), ("bfloat16", True, False), ("auto", False, False)]
)
def test_a_type_that_the_cpu_is_slower_in_gets_a_note_if_it_was_asked_for(
    run, document, models, monkeypatch, dtype, has_it, noted
):
    monkeypatch.setattr("dodo.base.computes_in", lambda *_: has_it)
    done = run("compress", document, "--ratio", "2", "--dtype", dtype, "--model", models.base)
    assert ("--dtype float32" in done.stderr) == noted


@pytest.mark.parametrize("name", [".", "", "/"])
def test_what_is_no_files_name_is_a_wrong_use(run, no_model, name):
    assert run("compress", name).exit_code == 2
