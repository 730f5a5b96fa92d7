"""Reading, shards, and the order of batches."""

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from dodo.data.batches import Draw, QuestionSource, TextSource, draw_skewed
from dodo.data.reading import permits_commercial_use, read_each, read_records, read_texts, resolve
from dodo.data.shards import Ragged, Shard, prepare, read_shard
from dodo.errors import InputError
from tests.standins.models import byte_tokenizer

ROWS = [{"text": "first " * 20, "license": "CC0"}, {"text": "second " * 20, "license": "CC BY-NC-SA 4.0"}]


def ragged(*rows: list[int]) -> Ragged:
    return Ragged(np.concatenate([np.array(row) for row in rows]), np.cumsum([0, *map(len, rows)]))


@pytest.mark.parametrize(("suffix", "opener"), [("jsonl", open), ("jsonl.xz", lzma.open), ("jsonl.gz", gzip.open)])
def test_json_lines_are_read_plain_and_packed(tmp_path, suffix, opener):
    path = tmp_path / f"data.{suffix}"
    with opener(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in ROWS)
    assert list(read_records(str(path))) == ROWS


def test_parquet_and_text_are_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "data.parquet")
    (tmp_path / "one.txt").write_text("a text", encoding="utf-8")
    assert list(read_records(str(tmp_path / "data.parquet"))) == ROWS
    assert next(read_records(str(tmp_path / "one.txt")))["text"] == "a text"


def test_strings_that_are_no_text_are_one_clear_error(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, *map(pyarrow.py_buffer, (b"\0\0\0\0\2\0\0\0", b"\xff\xfe"))])
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "data.parquet")
    with pytest.raises(InputError, match=r"data\.parquet .*damaged"):
        list(read_texts([str(tmp_path / "data.parquet")]))
    (tmp_path / "half.jsonl").write_text('{"text": "whole"}\n{"text": "half \\ud800"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"half\.jsonl, record 2: .*half a character"):
        list(read_texts([str(tmp_path / "half.jsonl")]))


def test_a_hub_that_says_nothing_is_one_clear_error(monkeypatch):
    def silent(*args, **kwargs):
        raise TimeoutError

    monkeypatch.setattr("datasets.load_dataset", silent)
    with pytest.raises(InputError, match=r"hf:a/b can't be read: TimeoutError"):
        list(read_records("hf:a/b"))


def test_a_dataset_is_streamed_by_its_name_and_split(tmp_path):
    (tmp_path / "corpus").mkdir()
    for split in ("train", "validation"):
        rows = [{"text": f"{split} {i}"} for i in range(3)]
        (tmp_path / "corpus" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = f"hf:{tmp_path / 'corpus'}"
    assert [r["text"] for r in read_records(name)] == ["train 0", "train 1", "train 2"]
    assert [r["text"] for r in read_records(f"{name}@validation")][:1] == ["validation 0"]
    with pytest.raises(InputError, match=r"hf:.*@nothing"):
        list(read_records(f"{name}@nothing"))
    with pytest.raises(InputError, match=r"hf:.*nowhere"):
        list(read_records(f"hf:{tmp_path / 'nowhere'}"))


def test_a_name_with_brackets_is_a_name_if_there_is_such_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    (tmp_path / "a1.txt").write_text("y")
    assert resolve([f"{tmp_path}/a[1].txt"]) == [f"{tmp_path}/a[1].txt"]
    (tmp_path / "a[1].txt").unlink()
    assert resolve([f"{tmp_path}/a[1].txt"]) == [f"{tmp_path}/a1.txt"]


def test_squads_own_files_and_lists_are_read_from_json(tmp_path):
    asked = [
        {
            "id": "1",
            "question": "Who?",
            "answers": [{"text": "a dodo", "answer_start": 3}, {"text": "the dodo", "answer_start": 9}],
        },
        {"question": "When?", "answers": [], "is_impossible": True},
    ]
    squad = {"version": "2.0", "data": [{"title": "Dodo", "paragraphs": [{"context": "A dodo.", "qas": asked}]}]}
    (tmp_path / "dev.json").write_text("\ufeff" + json.dumps(squad), encoding="utf-8")
    assert list(read_records(str(tmp_path / "dev.json"))) == [
        {"id": "1", "title": "Dodo", "context": "A dodo.", "question": "Who?", "answers": ["a dodo", "the dodo"]},
        {"title": "Dodo", "context": "A dodo.", "question": "When?", "answers": []},
    ]
    for content, expected in (
        ('[{"text": "a"}, {"text": "b"}]', [{"text": "a"}, {"text": "b"}]),
        ('[{"text": "a"}, 3]', "bad.json, entry 2: a JSON object is wanted, not int"),
        ('{"text": "a"}', "bad.json: a list of JSON objects is wanted, or SQuAD's own form, not dict"),
        ('{"text": "a"}\n{"text": "b"}', "bad.json is not JSON: .*; a file of one JSON object a line ends in .jsonl"),
        ('{"data": [{"text": "a"}]}', "bad.json has `data`, but not as SQuAD has it: KeyError\\('paragraphs'\\)"),
    ):
        (tmp_path / "bad.json").write_text(content, encoding="utf-8")
        if isinstance(expected, list):
            assert list(read_records(str(tmp_path / "bad.json"))) == expected
        else:
            with pytest.raises(InputError, match=expected):
                list(read_records(str(tmp_path / "bad.json")))


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "caf\xe9"}\n{"text": "b"}\n')
    good, bad, next_one = read_each(tmp_path / "latin.jsonl")
    assert (good, next_one) == ({"text": "a"}, {"text": "b"})
    assert "latin.jsonl, line 2: not UTF-8: byte 0xe9 at byte 13 of the line" in str(bad)
    (tmp_path / "other.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"other\.jsonl, record 2: a record has no text field 'text'; its fields are txt"):
        prepare([str(tmp_path / "other.jsonl")], tmp_path / "shard.safetensors", byte_tokenizer(), minimum=1)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot json\n', encoding="utf-8")
    with pytest.raises(InputError, match="bad.jsonl, line 2"):
        list(read_records(str(tmp_path / "bad.jsonl")))
    with pytest.raises(InputError, match="no data file matches"):
        resolve([str(tmp_path / "none*.jsonl")])
    with pytest.raises(InputError, match=r"data files end in"):
        list(read_records("table.xls"))


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [("CC0", True), ("CC BY-SA 4.0", True), ("CC BY-NC 4.0 (Oyez)", False), ("distributed with NLTK, non-commercial", False),
     ("distributed with NLTK for research", False), (None, True)],
)  # fmt: skip
def test_licences_that_forbid_commercial_use_are_left_out(licence, allowed):
    assert permits_commercial_use({"license": licence}) is allowed


@pytest.mark.parametrize("licence", ["CC BY NC 4.0", "cc_by_nc_sa", "non commercial use only", "Research only", "CC-BY-NC"])
def test_licences_are_read_however_they_are_written(licence):
    assert not permits_commercial_use({"license": licence})
    assert not permits_commercial_use({"licence": licence})
    assert permits_commercial_use({"license": licence.lower().replace("nc", "").replace("non", "").replace("research", "")})


def test_files_that_are_not_what_their_names_say_are_refused(tmp_path):
    pytest.importorskip("pyarrow", reason="parquet needs pyarrow")
    for name, said in (
        ("a.txt", "is not UTF-8 text: byte 0xff at byte offset 3"),
        ("a.parquet", "is no parquet file, or is damaged"),
    ):
        (tmp_path / name).write_bytes(b"abc\xff\xfe and more that is not of its kind")
        with pytest.raises(InputError, match=said):
            list(read_records(str(tmp_path / name)))


def test_an_article_without_highlights_is_no_pair(tmp_path):
    rows = [{"article": "one " * 20, "highlights": " "}, {"article": "two " * 20, "highlights": "Two."}]
    (tmp_path / "news.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shard = prepare([str(tmp_path / "news.jsonl")], tmp_path / "s.safetensors", byte_tokenizer(), kind="summary")
    assert len(shard.documents) == 1


def test_a_shard_comes_back_as_it_was_written_and_only_with_its_tokenizer(tmp_path):
    source, out = tmp_path / "data.jsonl", tmp_path / "shard.safetensors"
    source.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    tokenizer = byte_tokenizer()
    made = prepare([str(source)], out, tokenizer)
    read = read_shard(out, tokenizer)
    assert len(read.documents) == 1  # the other one is CC BY-NC
    assert read.documents[0].tolist() == made.documents[0].tolist()
    assert tokenizer.decode(read.documents[0].tolist()) == ROWS[0]["text"]
    with pytest.raises(InputError, match="not a tokenised shard"):
        read_shard(source)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc to look into")
def test_a_shard_is_mapped_not_read(tmp_path):
    source, out = tmp_path / "data.jsonl", tmp_path / "shard.safetensors"
    source.write_text(json.dumps(ROWS[0]), encoding="utf-8")
    shard = prepare([str(source)], out, byte_tokenizer())
    assert str(out) in Path("/proc/self/maps").read_text()
    assert shard.documents.flat.dtype == np.uint16


def test_processes_that_prepare_a_shard_at_the_same_time_each_get_it_whole(tmp_path, monkeypatch):
    source, out, made = tmp_path / "data.jsonl", tmp_path / "made" / "shard.safetensors", []
    source.write_text(json.dumps(ROWS[0]), encoding="utf-8")

    def prepared():
        made.append(prepare([str(source)], out, byte_tokenizer()).documents[0].tolist())

    def save_while_another_does(*arguments, **more):
        monkeypatch.setattr("dodo.data.shards.save_file", save_file)
        save_file(*arguments, **more)
        prepared()

    monkeypatch.setattr("dodo.data.shards.save_file", save_while_another_does)
    prepared()
    assert made == [read_shard(out).documents[0].tolist()] * 2
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(("tokens", "documents"), [(1, 1), (20, 1), (21, 2), (60, 3), (61, 4), (None, 10)])
def test_so_many_tokens_are_taken_and_no_more_is_read(tmp_path, monkeypatch, tokens, documents):
    read = []

    def records(source):
        for i in range(10_000 if tokens else 10):
            read.append(i)
            yield {"text": f"{i:020}", "context": f"{i:020}", "question": "Who?", "answers": ["I"]}

    monkeypatch.setattr("dodo.data.reading.read_records", records)
    tokenizer = byte_tokenizer()
    assert len(tokenizer(f"{1:020}")["input_ids"]) == 20
    shard = prepare(["hf:some/texts"], tmp_path / "t.safetensors", tokenizer, tokens=tokens)
    assert (len(shard.documents), shard.tokens) == (documents, 20 * documents)
    assert len(read) <= 256  # a batch of the tokenizer
    questions = prepare(["hf:some/texts"], tmp_path / "q.safetensors", tokenizer, kind="question", tokens=tokens)
    assert questions.prompts is not None
    assert len(questions.documents) == len(questions.prompts) == documents


def test_summaries_are_asked_for_in_the_papers_words(tmp_path):
    rows = [
        {"article": "A bird was seen on the island, and then no more.", "highlights": "A bird was seen.\nOnce."},
        {"article": "Ships came to the island for water and for birds.", "highlights": "Ships came."},
    ]
    source, tokenizer = tmp_path / "news.jsonl", byte_tokenizer()
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shard = read_shard(prepare_summaries(source, tmp_path), tokenizer)
    assert shard.prompts is not None
    assert shard.answers is not None
    for i, row in enumerate(rows):
        assert tokenizer.decode(shard.documents[i].tolist()) == row["article"]
        assert tokenizer.decode(shard.prompts[i].tolist()) == "\nPlease summarize the above document in one sentence.\n"
        assert tokenizer.decode(shard.answers[i].tolist()) == row["highlights"]
    source.write_text(json.dumps({"article": "A bird."}), encoding="utf-8")
    with pytest.raises(InputError, match="highlights"):
        prepare_summaries(source, tmp_path)


def prepare_summaries(source, folder):
    prepare([str(source)], folder / "out.safetensors", byte_tokenizer(), kind="summary", minimum=4)
    return folder / "out.safetensors"


def test_data_with_nothing_left_is_refused(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps(ROWS[1]), encoding="utf-8")
    with pytest.raises(InputError, match="no data left"):
        prepare([str(tmp_path / "data.jsonl")], tmp_path / "out.safetensors", byte_tokenizer())
    assert not (tmp_path / "out.safetensors").exists()


def test_a_window_is_a_piece_of_one_document_and_repeats_with_its_seed():
    documents = ragged(list(range(50)), list(range(100, 120)), list(range(200, 205)))
    source = TextSource([Shard("text", documents)], bos=1, eos=2)
    first = source.windows(20, 10, np.random.default_rng(3))
    assert (np.diff(first, axis=1) == 1).all()
    assert (first == source.windows(20, 10, np.random.default_rng(3))).all()
    with pytest.raises(InputError, match="no document has 60 tokens"):
        source.windows(1, 60, np.random.default_rng(0))


def test_an_autoencoding_batch_asks_for_the_text_and_then_the_end():
    source = TextSource([Shard("text", ragged(list(range(10, 40))))], bos=1, eos=2)
    batch = source.autoencoding(2, 5, 3.0, np.random.default_rng(0))
    assert batch.documents[:, 0].tolist() == [1, 1]
    assert torch.equal(batch.targets[:, :-1], batch.decoder)
    assert torch.equal(batch.targets[:, :-1], batch.documents[:, 1:])
    assert batch.targets[:, -1].tolist() == [2, 2]


def test_recall_asks_for_what_follows_a_cue_that_lies_anywhere_in_the_document():
    source = TextSource([Shard("text", ragged(list(range(10, 200))))], bos=1, eos=2)
    batch = source.recall(40, 50, 3.0, np.random.default_rng(0), cue=4, following=10)
    assert batch.objective == "recall" and batch.documents.shape == (40, 51) and batch.decoder.shape == (40, 13)
    assert (batch.targets[:, :3] == -100).all()
    assert torch.equal(batch.targets[:, 3:], batch.decoder[:, 3:] + 1)
    cue_at = batch.decoder[:, 0] - batch.documents[:, 1]
    assert cue_at.min() == 0 and cue_at.max() == 50 - 14
    short = source.recall(1, 6, 3.0, np.random.default_rng(0))  # cue and stretch shrink with the text
    assert torch.equal(short.targets[:, 2:], short.documents[:, 4:])


def test_a_continuation_starts_where_the_document_ends():
    source = TextSource([Shard("text", ragged(list(range(10, 40))))], bos=None, eos=2)
    batch = source.continuation(3, 6, 4, 3.0, np.random.default_rng(0))
    assert torch.equal(batch.decoder[:, 0], batch.documents[:, -1] + 1)
    assert torch.equal(batch.targets, batch.decoder + 1)


@pytest.mark.parametrize("bos", [1, None])
def test_an_autoregressive_batch_predicts_every_token(bos):
    source = TextSource([Shard("text", ragged(list(range(10, 90))))], bos=bos, eos=2)
    batch = source.autoregressive(3, 12, 3.0, np.random.default_rng(0), window=4, segment=2)
    assert batch.documents.shape == batch.targets.shape == (3, 12) and batch.decoder.shape == (3, 0)
    assert torch.equal(batch.targets[:, :-1], batch.documents[:, 1:])
    assert torch.equal(batch.targets[:, 1:], batch.targets[:, :-1] + 1)
    assert (batch.window, batch.segment, batch.document_tokens) == (4, 2, 36)


def test_the_token_after_a_text_of_usual_length_is_not_looked_for_in_the_longest_document():
    source = TextSource([Shard("text", ragged(*([[i] * 20 for i in range(50)] + [[99] * 60])))], bos=None, eos=2)
    assert (source.usual, source.longest) == (20, 60)
    batch = source.autoregressive(30, source.usual, 3.0, np.random.default_rng(0), window=4, segment=2)
    assert batch.documents.shape == (30, 19) and len(batch.documents[:, 0].unique()) > 10
    assert source.autoregressive(2, 59, 3.0, np.random.default_rng(0), window=4, segment=2).documents.shape[1] >= 58


def test_only_answers_of_questions_are_targets():
    shard = Shard(
        "question", ragged([5] * 8, [6] * 9), ragged([11, 12], [13], [14]), ragged([21], [22, 23], [24]), np.array([0, 0, 1])
    )
    batch = QuestionSource(shard, bos=None, eos=2).batch(20, 2, 3.0, np.random.default_rng(0), at=0)
    assert batch.rows is not None
    for row, target, decoder in zip(batch.rows.tolist(), batch.targets.tolist(), batch.decoder.tolist(), strict=True):
        answer = [t for t in target if t != -100]
        assert answer in ([21, 2], [22, 23, 2], [24, 2])
        assert row == (1 if answer[0] == 24 else 0)
        first = target.index(answer[0])
        assert decoder[first] in (12, 13, 14)


def test_a_paragraph_stands_among_others_and_is_asked_about():
    paragraphs = [[10 + i] * (4 + i % 3) for i in range(20)]
    shard = Shard(
        "question",
        ragged(*paragraphs),
        ragged(*[[40 + i] for i in range(20)]),
        ragged(*[[70 + i] for i in range(20)]),
        np.arange(20),
    )
    source = QuestionSource(shard, bos=1, eos=2, between=[3, 4])
    places, asked = set(), set()
    for seed in range(40):
        batch = source.batch(70, 2, 3.0, np.random.default_rng(seed), at=7, among=30)
        assert batch.documents.shape[0] == 2 and batch.documents.shape[1] <= 31 and batch.rows is not None
        for row, ids, mask in zip(range(2), batch.documents, batch.document_mask, strict=True):
            bos, *rest = ids[mask].tolist()
            assert bos == 1
            parts, part = [], []
            for token in rest:
                if token == 3:
                    parts.append(part)
                    part = []
                elif token != 4:
                    part.append(token)
            parts.append(part)
            assert all(part == paragraphs[part[0] - 10] for part in parts) and len({part[0] for part in parts}) == len(parts) > 1
            mine = batch.decoder[batch.rows == row][:, 0].tolist()
            assert len(mine) == 2 and {one - 40 for one in mine} <= {part[0] - 10 for part in parts}
            asked |= set(mine)
        document = batch.documents[0].tolist()
        places.add(document.index(source._order[7] + 10) if source._order[7] + 10 in document else None)
    assert len(places) > 5 and None not in places and len(asked) > 10
    alone = source.batch(5, 2, 3.0, np.random.default_rng(0), at=7, among=3)  # fewer tokens than the paragraph has
    assert alone.documents.tolist() == [[1, *paragraphs[source._order[7]]]]


def test_draws_stay_within_their_bounds():
    rng = np.random.default_rng(0)
    drawn = [draw_skewed(Draw(1.0, 20.0, 5.0), rng) for _ in range(200)]
    assert 1 <= min(drawn) < 3 < 10 < max(drawn) <= 20
    with pytest.raises(InputError, match="low <= mode"):
        Draw(5.0, 20.0, 1.0)


def test_what_is_left_out_is_counted_and_named(tmp_path):
    text = "the quick brown dodo and the other birds of Mauritius"

    def prepared(rows, **how):
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return prepare([str(tmp_path / "data.jsonl")], tmp_path / "s.safetensors", byte_tokenizer(), **how)

    rows = [{"text": text, "license": "cc-by-nc-4.0"}] * 3 + [{"text": "short"}] * 2
    with pytest.raises(
        InputError, match=r"no data left of .*: 3 not for commercial use .*any-licence.*; 2 shorter than 16 tokens"
    ):
        prepared(rows)
    assert prepared(rows, commercial_only=False).left_out == {"shorter than 16 tokens": 2}
    asked = [{"context": text, "question": "Who?", "answers": []}, {"context": text, "question": "What?", "answers": ["a dodo"]}]
    assert prepared(asked, kind="question").left_out == {"without an answer": 1}
    with pytest.raises(InputError, match="no text field 'context'"):
        prepared(rows, kind="question")
    with pytest.raises(InputError, match="no field 'answers' or 'answer'; its fields are context, question"):
        prepared([{"context": text, "question": "Who?"}], kind="question")
    with pytest.raises(InputError, match="'text' is null, not text"):
        prepared([{"text": None}])
