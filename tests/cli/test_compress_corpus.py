"""Laws of `dodo compress-corpus`."""

import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dodo import Dodo
from dodo.corpus.documents import DOCUMENTS, Failure, documents, files_of
from dodo.corpus.work import PADDING, TOKENS
from dodo.errors import InputError
from dodo.nuggets import Nuggets
from dodo.nuggets_file import save
from tests.cli.conftest import COMMAND
from tests.cli.tiny import TEXT

NAMES = ["a.txt", "b/c.md", "d.jsonl.xz#1", "d.jsonl.xz#2", "e.parquet#1"]


@pytest.fixture
def corpus(tmp_path):
    """Five documents, of all kinds."""
    pa, pq = pytest.importorskip("pyarrow", reason="an extra"), pytest.importorskip("pyarrow.parquet", reason="an extra")
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "b/c.md").write_text("# Pigeons\n\nThere are many.", encoding="utf-8")
    with lzma.open(folder / "d.jsonl.xz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": "One line."}) + "\n" + json.dumps({"text": "Another line."}) + "\n")
    beyond = pa.array([1_460_000_000], pa.int32()).cast(pa.date32())  # no date of Python's
    pq.write_table(pa.table({"text": ["A row."], "day": beyond}), folder / "e.parquet")
    (folder / "picture.png").write_bytes(b"not read")
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "nuggets"


@pytest.fixture
def compress(run, out, models):
    """Calls the verb; returns its report."""

    def call(source, *arguments, into=out):
        result = run("compress-corpus", source, into, "--model", models.base, "--json", *arguments)
        return json.loads(result.stdout) | {"exit_code": result.exit_code, "stderr": result.stderr}

    return call


@pytest.fixture
def cluster():
    """Two workers on Ray, here or where RAY_ADDRESS says."""
    pytest.importorskip("ray", reason="an extra")
    joining = ["--ray-address", os.environ["RAY_ADDRESS"]] if "RAY_ADDRESS" in os.environ else []
    return ["--ray", "--workers", "2", *joining]


def index(out):
    return [json.loads(line) for line in (out / "index.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_equal_nuggets(one, other):
    """Of two files, however many texts were compressed with theirs."""
    a, b = Nuggets.load(one), Nuggets.load(other)
    told = ("ratio", "use", "scheme", "fingerprint")
    assert [getattr(a, name) for name in told] == [getattr(b, name) for name in told]
    for name in ("indices", "positions", "token_ids", "mask", "lengths", "next_positions", "sinks"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    for name in ("keys", "values", "scores"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4)


@pytest.fixture
def passes(monkeypatch):
    """Lengths of the texts of each pass."""
    lengths, whole = [], Dodo.compress_ids

    def noted(self, rows, **how):
        lengths.append([len(row) for row in rows])
        return whole(self, rows, **how)

    monkeypatch.setattr(Dodo, "compress_ids", noted)
    return lengths


def written(out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*.nuggets")}


def test_each_document_has_a_row_and_the_file_that_compress_would_write(compress, corpus, out, run, models):
    report = compress(corpus, "--ratio", "4", "--storage", "int8")
    assert (report["exit_code"], report["documents"], report["skipped"], report["failed"]) == (0, 5, 0, [])
    rows = index(out)
    assert [row["document"] for row in rows] == NAMES
    run("compress", corpus / "a.txt", "-o", out.parent / "one", "--ratio", "4", "--storage", "int8", "--model", models.base)
    assert (out / rows[0]["file"]).read_bytes() == (out.parent / "one").read_bytes()  # by itself in its batch
    for row in rows:
        nuggets = Nuggets.load(out / row["file"])
        assert (row["n"], row["k"], row["states"]) == (int(nuggets.lengths), int(nuggets.k), int(nuggets.states))
        assert row["bytes"] == (out / row["file"]).stat().st_size
        assert row["base"] == nuggets.fingerprint.base


def test_the_same_text_again_in_one_run_was_not_there_before(compress, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for i in range(60):
        (many / f"{i:02d}.txt").write_text(f"The dodo number {i if i % 3 else 0} lived on an island.", encoding="utf-8")
    for before in (0, 60):
        report = compress(many)
        assert (report["documents"], report["skipped"]) == (60, before)


def test_what_is_done_is_skipped_and_what_is_new_is_added(compress, corpus, out):
    compress(corpus)
    before, rows = written(out), index(out)
    assert compress(corpus)["skipped"] == 5
    assert (written(out), index(out)) == (before, rows)
    (corpus / "f.txt").write_text("New.", encoding="utf-8")
    assert compress(corpus)["skipped"] == 5
    assert [row["document"] for row in index(out)] == [*NAMES, "f.txt"]
    assert before.items() < written(out).items()


def test_other_settings_and_changed_texts_are_done_again(compress, corpus, out):
    compress(corpus / "a.txt", "--ratio", "4")
    assert compress(corpus / "a.txt", "--ratio", "5")["skipped"] == 0
    (corpus / "a.txt").write_text("Changed.", encoding="utf-8")
    assert compress(corpus / "a.txt", "--ratio", "5")["skipped"] == 0
    assert len({row["file"] for row in index(out)}) == 3


def test_a_file_or_a_row_cut_short_does_not_count(compress, corpus, out):
    compress(corpus)
    whole, rows = {path.name: path.read_bytes() for path in out.glob("*.nuggets")}, index(out)
    short = out / rows[0]["file"]
    short.write_bytes(short.read_bytes()[:-1])
    (out / "index.jsonl").write_bytes((out / "index.jsonl").read_bytes()[:-9])
    (out / f".{rows[1]['file']}.xyz.part").write_bytes(b"left by one that was killed")
    assert compress(corpus)["skipped"] == 3
    assert {path.name: len(path.read_bytes()) for path in out.glob("*.nuggets")} == {
        name: len(data) for name, data in whole.items()
    }
    assert index(out) == rows
    assert not list(out.glob(".*.part"))


def test_equal_texts_share_a_file(compress, corpus, out):
    (corpus / "same.txt").write_text(TEXT, encoding="utf-8")
    report = compress(corpus)
    files = {row["document"]: row["file"] for row in index(out)}
    assert (report["documents"], len(files)) == (6, 6)
    assert files["a.txt"] == files["same.txt"]
    assert len(written(out)) == 5


def test_documents_that_fail_are_named_at_the_end_and_stop_nothing(compress, corpus, out):
    (corpus / "aa.txt").write_bytes(b"\xff\xff")
    (corpus / "ab.txt").write_bytes(b"")
    lines = '{"title": "no text"}\n{"text": "Good."}\n{broken\n\n' + "[" * 200_000 + '\n{"text": "Behind it."}\n'
    (corpus / "ac.jsonl").write_text(lines, encoding="utf-8")
    (corpus / "ad.parquet").write_bytes(b"no parquet")
    packed = bytearray(gzip.compress(b'{"text": "Packed."}\n' * 50))
    packed[20:24] = b"\xff\xff\xff\xff"
    (corpus / "ae.jsonl.gz").write_bytes(packed)
    report = compress(corpus)
    assert (report["exit_code"], report["documents"]) == (1, 7)
    failed = [failure["document"] for failure in report["failed"]]
    assert failed == ["aa.txt", "ab.txt", "ac.jsonl#1", "ac.jsonl#3", "ac.jsonl#4", "ad.parquet", "ae.jsonl.gz"]
    assert "ac.jsonl, line 3: not JSON" in report["failed"][3]["error"]
    assert "ae.jsonl.gz can't be read" in report["failed"][6]["error"]
    assert "error: 7 of 14 documents failed" in report["stderr"]
    assert {row["document"] for row in index(out)} == {*NAMES, "ac.jsonl#2", "ac.jsonl#5"}


def test_pages_are_documents_too_where_what_reads_them_is_installed(compress, corpus, out, monkeypatch):
    pytest.importorskip("inscriptis", reason="an extra")
    (corpus / "f.html").write_text("<html><body><p>A page.</p></body></html>", encoding="utf-8")
    (corpus / "g.pdf").write_bytes(b"%PDF-1.7")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    report = compress(corpus)
    assert {row["document"] for row in index(out)} == {*NAMES, "f.html"}
    assert [failure["document"] for failure in report["failed"]] == ["g.pdf"]
    assert "dodo-lm[documents]" in report["failed"][0]["error"]


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_what_links_lead_to_is_read_and_links_to_nowhere_fail(compress, corpus, out, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/linked.txt").write_text("Linked.", encoding="utf-8")
    (corpus / "l").symlink_to(tmp_path / "elsewhere")
    (corpus / "b/back").symlink_to(corpus)
    (corpus / "lost.txt").symlink_to(tmp_path / "nowhere")
    report = compress(corpus)
    assert [failure["document"] for failure in report["failed"]] == ["lost.txt"]
    assert {row["document"] for row in index(out)} == {*NAMES, "l/linked.txt"}


def test_files_of_other_kinds_are_left_out_with_a_warning(compress, corpus, out):
    assert "files left out: 1, the first of them picture.png" in " ".join(compress(corpus)["stderr"].split())
    (corpus / "b/paper.odt").write_bytes(b"PK")
    (corpus / "list.json").write_text('[{"text": "A."}]', encoding="utf-8")
    (corpus / ".hidden").mkdir()
    for name in (".hidden/picture.png", ".DS_Store", "made.nuggets"):
        (corpus / name).write_bytes(b"")
    report = compress(corpus)
    assert report["skipped"] == len(NAMES)
    assert "files left out: 3, the first of them b/paper.odt; documents are in" in " ".join(report["stderr"].split())
    (corpus / "picture.png").unlink()
    for name in ("b/paper.odt", "list.json"):
        (corpus / name).unlink()
    assert "left out" not in compress(corpus)["stderr"]


def test_a_folder_that_can_not_be_listed_is_handed_on(monkeypatch, tmp_path):
    (tmp_path / "a.txt").write_text("A.", encoding="utf-8")
    (tmp_path / "shut").mkdir()
    walk = os.walk

    def shut(top, onerror, **how):
        onerror(PermissionError(13, "Permission denied", str(tmp_path / "shut")))
        yield from walk(top, onerror=onerror, **how)

    monkeypatch.setattr("dodo.corpus.documents.os.walk", shut)
    files = files_of(tmp_path, besides=tmp_path / "out")
    assert [one.name for one in documents(files, tmp_path) if isinstance(one, Failure)] == ["shut"]


def test_documents_compressed_together_make_the_files_that_they_make_alone(compress, out, tmp_path, run, models, passes):
    (tmp_path / "texts").mkdir()
    for number in range(24):
        (tmp_path / f"texts/{number:02}.txt").write_text(TEXT[number : 40 + 2 * number], encoding="utf-8")
    (tmp_path / "texts/long.txt").write_text(TEXT * 4, encoding="utf-8")
    (tmp_path / "texts/longer.txt").write_text(TEXT[1:] * 4, encoding="utf-8")
    assert compress(tmp_path / "texts", "--model", models.trained)["failed"] == []
    together = list(passes)
    assert sorted(len(lengths) for lengths in together)[:2] == [1, 1] and len(together) < 10
    for lengths in together:
        assert len(lengths) == 1 or max(lengths) <= 512  # the window
        assert max(lengths) * len(lengths) <= TOKENS or len(lengths) == 1
        assert sum(lengths) >= (1 - PADDING) * max(lengths) * len(lengths)
    rows = index(out)
    assert [row["document"] for row in rows] == sorted(path.name for path in (tmp_path / "texts").iterdir())
    for row in rows:
        one = tmp_path / row["document"]
        run("compress", tmp_path / "texts" / row["document"], "-o", one, "--model", models.trained)
        assert_equal_nuggets(out / row["file"], one)
        assert row["warnings"] == [] or row["document"].startswith("long")


def test_a_document_that_fails_takes_none_of_its_batch_with_it(compress, corpus, out, monkeypatch, passes):
    whole = Dodo.compress_ids
    (corpus / "bad.txt").write_text("Bad line.", encoding="utf-8")
    (corpus / "half.jsonl").write_text(json.dumps({"text": "\ud800"}), encoding="utf-8")

    def failing(self, rows, **how):
        made = whole(self, rows, **how)
        if self.document_ids("Bad line.") in rows:
            raise InputError("a token's score is not finite")
        return made

    monkeypatch.setattr(Dodo, "compress_ids", failing)
    report = compress(corpus)
    assert max(map(len, passes)) > 1
    (bad, half) = report["failed"]
    assert bad == {"document": "bad.txt", "error": "a token's score is not finite"}
    assert half["document"] == "half.jsonl#1"
    assert [row["document"] for row in index(out)] == NAMES


def test_a_text_that_does_not_fit_the_memory_stops_nothing(compress, corpus, monkeypatch):
    whole = Dodo.compress_ids

    def little(self, rows, **how):
        if len(rows) > 1 or self.document_ids("# Pigeons\n\nThere are many.") in rows:
            raise RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return whole(self, rows, **how)

    monkeypatch.setattr(Dodo, "compress_ids", little)
    report = compress(corpus)
    assert [failure["document"] for failure in report["failed"]] == ["b/c.md"]
    assert report["documents"] == 4 and "too little memory for its 20 tokens" in report["failed"][0]["error"]


def test_an_interruption_loses_the_documents_under_way_and_no_more(compress, corpus, out, run, models, monkeypatch):
    whole = Dodo.compress_ids
    for number in range(2 * DOCUMENTS):
        (corpus / f"more-{number:02}.txt").write_text(f"Number {number:02}.", encoding="utf-8")

    def interrupted(self, rows, **how):
        if self.document_ids(f"Number {DOCUMENTS:02}.") in rows:
            raise KeyboardInterrupt
        return whole(self, rows, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Dodo, "compress_ids", interrupted)
        assert run("compress-corpus", corpus, out, "--model", models.base).exit_code == 130
    assert len(index(out)) == DOCUMENTS
    assert compress(corpus)["skipped"] == DOCUMENTS


def test_what_an_earlier_run_wrote_inside_the_input_is_not_read(compress, corpus):
    for ratio in ("2", "4"):
        assert compress(corpus, "--ratio", ratio, into=corpus / f"r{ratio}")["failed"] == []


def test_the_same_model_by_another_path_is_the_same(compress, corpus, models, monkeypatch):
    compress(corpus)
    monkeypatch.chdir(Path(models.base).parent)
    assert compress(corpus, "--model", Path(models.base).name)["skipped"] == 5


def test_a_document_of_the_same_name_from_another_corpus_has_a_warning(compress, corpus, out, tmp_path):
    for year in ("2023", "2024"):
        (tmp_path / year).mkdir()
        (tmp_path / year / "summary.txt").write_text(f"Of {year}.", encoding="utf-8")
        report = compress(tmp_path / year)
    assert "a document of this name from" in report["stderr"]
    assert [len(row["warnings"]) for row in index(out)] == [0, 1]


def test_a_file_is_read_as_it_is_by_compress(compress, corpus, out, run, models):
    (corpus / "a.txt").write_bytes(b"\xef\xbb\xbfTwo\r\nlines.")
    (corpus / "f.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "Marked."}\n')
    assert compress(corpus, "--ratio", "4")["failed"] == []
    run("compress", corpus / "a.txt", "-o", out.parent / "one", "--ratio", "4", "--model", models.base)
    assert_equal_nuggets(out / index(out)[0]["file"], out.parent / "one")


@pytest.mark.skipif(sys.platform == "win32", reason="such names can't be")
def test_a_name_that_looks_like_a_hub_id_is_a_file(compress, tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/hf:owner").mkdir()
    (tmp_path / "texts/hf:owner/name.txt").write_text("Local.", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "texts")
    assert compress(Path("."))["failed"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="such names can't be")
def test_a_name_that_is_no_text_stops_nothing(compress, corpus, out):
    (corpus / os.fsdecode(b"caf\xe9.txt")).write_text(TEXT[5:], encoding="utf-8")
    report = compress(corpus)
    assert report["exit_code"] == 0
    assert os.fsdecode(b"caf\xe9.txt") in {row["document"] for row in index(out)}
    assert compress(corpus)["skipped"] == report["documents"]


def test_what_is_written_inside_the_input_is_not_read(compress, corpus):
    for into in (corpus / "out", corpus):
        compress(corpus, into=into)
        assert compress(corpus, into=into)["skipped"] == 5


def test_an_input_without_documents_is_refused_before_a_model_is_loaded(run, tmp_path, out, no_model):
    (tmp_path / "empty").mkdir()
    result = run("compress-corpus", tmp_path / "empty", out)
    assert result.exit_code == 1
    assert "holds no documents" in result.stderr
    assert not out.exists()
    assert run("compress-corpus", tmp_path / "missing", out).exit_code == 2


def test_a_folder_in_use_is_refused(run, corpus, out, no_model):
    from filelock import FileLock

    out.mkdir()
    with FileLock(out / ".lock"):
        result = run("compress-corpus", corpus, out)
    assert result.exit_code == 1
    assert "another run is writing" in result.stderr


@pytest.mark.parametrize(
    "rows",
    [
        '{"other": 1}\n',
        '{"title": "of one line, without an end"}',
        '{"file": "x.nuggets"}\n',
        '{"file": "x.nuggets", "document": ["a"], "bytes": 1}\n',
        '{"file": "x.nuggets", "document": "a"}\n',
        "[" * 200_000 + "\n",
    ],
)
def test_an_index_of_something_else_is_left_alone(run, corpus, out, no_model, rows):
    out.mkdir()
    (out / "index.jsonl").write_text(rows, encoding="utf-8")
    result = run("compress-corpus", corpus, out)
    assert result.exit_code == 1
    assert "is not an index of compressed documents" in result.stderr
    assert (out / "index.jsonl").read_text(encoding="utf-8") == rows


def test_a_full_disk_stops_the_run_and_keeps_what_is_done(run, compress, corpus, out, models, monkeypatch):
    from dodo import nuggets_file
    from dodo.errors import NuggetsFileError

    saved = []

    def failing(nuggets, path, *, storage=None):
        if len(saved) == 2:
            raise NuggetsFileError(f"could not write {path}: No space left on device; nothing was changed")
        saved.append(path)
        save(nuggets, path, storage=storage)

    with monkeypatch.context() as patched:
        patched.setattr(nuggets_file, "save", failing)
        result = run("compress-corpus", corpus, out, "--model", models.base)
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert compress(corpus)["skipped"] == 2


def test_flags_of_ray_without_ray_are_usage_errors(run, corpus, out, no_model):
    for flag in ("--ray-address", "--gpus-per-worker"):
        result = run("compress-corpus", corpus, out, flag, "1")
        assert result.exit_code == 2
        assert "add --ray" in result.stderr


def test_without_ray_the_extra_is_named(run, corpus, out, no_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run("compress-corpus", corpus, out, "--ray")
    assert result.exit_code == 1
    assert "pip install 'dodo-lm[ray]'" in result.stderr


@pytest.mark.slow
def test_several_workers_write_what_one_writes_and_go_on_after_a_kill(compress, corpus, out, models):
    for number in range(40):
        (corpus / f"more-{number:02}.txt").write_text(TEXT[number:], encoding="utf-8")
    more = ["compress-corpus", str(corpus), str(out), "--model", models.base, "--workers", "2"]
    process = subprocess.Popen([*COMMAND[:2], COMMAND[2], *more], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=sys.stderr)
    until = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until and len(list(out.glob("*.nuggets"))) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(index(out)) if (out / "index.jsonl").exists() else 0
    report = compress(corpus, "--workers", "2")
    assert (report["exit_code"], report["documents"]) == (0, 45)
    assert report["skipped"] >= done - 1  # the last row may have been cut short
    alone = compress(corpus, into=out.parent / "alone")
    assert alone["documents"] == 45
    assert set(written(out)) == set(written(out.parent / "alone"))
    for name in written(out):
        assert_equal_nuggets(out / name, out.parent / "alone" / name)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_workers_on_ray_write_what_one_process_writes_and_skip_what_is_done(compress, corpus, out, cluster):
    (corpus / "aa.txt").write_bytes(b"\xff\xff")
    (corpus / "ab.txt").write_bytes(b"")
    (corpus / "same.txt").write_text(TEXT, encoding="utf-8")
    ends = ["\0"] * 7 + ["\ud800"]  # the last is no text, which is an error of its own
    (corpus / "ac.jsonl").write_text("".join(json.dumps({"text": f"{i}. {TEXT}{end}"}) + "\n" for i, end in enumerate(ends)))
    report, alone = compress(corpus, *cluster), compress(corpus, into=out.parent / "alone")
    told = ("exit_code", "documents", "failed", "n", "states", "bytes_files")  # what occurs twice may be made twice
    assert [report[name] for name in told] == [alone[name] for name in told]
    assert index(out) == index(out.parent / "alone")
    assert set(written(out)) == set(written(out.parent / "alone"))
    for name in written(out):
        assert_equal_nuggets(out / name, out.parent / "alone" / name)
    before, rows = written(out), index(out)
    assert compress(corpus, *cluster)["skipped"] == report["documents"]
    assert (written(out), index(out)) == (before, rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_run_on_ray_goes_on_where_it_was_killed(compress, corpus, out, models, cluster):
    for number in range(40):
        (corpus / f"more-{number:02}.txt").write_text(TEXT[number:], encoding="utf-8")
    process = subprocess.Popen([*COMMAND, "compress-corpus", str(corpus), str(out), "--model", models.base, *cluster])
    until = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until and len(list(out.glob("*.nuggets"))) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(index(out)) if (out / "index.jsonl").exists() else 0
    report = compress(corpus, *cluster)
    assert (report["exit_code"], report["documents"]) == (0, 45)
    assert report["skipped"] >= done - 1  # the last row may have been cut short
