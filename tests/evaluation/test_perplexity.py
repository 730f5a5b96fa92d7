"""Laws of perplexity with a bounded number of states, and of the methods that hold them."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dodo.architecture import backbone
from dodo.autoregressive import Autoregressive
from dodo.compressive import Compressive
from dodo.errors import InputError
from dodo.evaluation.language_models import LANGUAGE_MODELS, Scored, Selected, make_language_model
from dodo.evaluation.paired import differences
from dodo.evaluation.perplexity import Perplexity, articles
from dodo.evaluation.run import evaluate
from dodo.evaluation.scoring import perplexity
from dodo.model import Dodo
from dodo.thresholds import Pace, Thresholds
from tests.cli.tiny import TEXT, save_model
from tests.conftest import stir

STATES, SEGMENT, RATIO = 8, 4, 3
HISTORY = (RATIO + 1) * STATES // 2


@pytest.fixture(scope="module")
def dodo(tmp_path_factory: pytest.TempPathFactory) -> Dodo:
    made = Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("perplexity") / "base"))
    stir(made.compressor)
    scores = made.compressor.score(torch.tensor([made.document_ids(TEXT)])).detach().flatten()
    middle = float(scores.quantile(1 - 1 / RATIO))
    made.thresholds = Thresholds(ratios=(2, RATIO, 10), values=(middle - 1, middle, middle + 1), tokens=99, feature_window=512)
    return made


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": TEXT[i:][:n]}) for i, n in enumerate((200, 150, 9))), encoding="utf-8")
    return path


class Made:
    """A language model whose nats are made of the targets alone, and which notes them."""

    name = "made"

    def __init__(self) -> None:
        self.targets: list[int] = []

    def history(self, states: int) -> int:
        return states

    def score(self, rows: Tensor, targets: Tensor, states: int) -> Scored:
        self.targets += targets.flatten().tolist()
        return Scored(1 + targets.float() / 100, torch.full((len(rows),), states))


@contextmanager
def stopped(monkeypatch: pytest.MonkeyPatch, *, behind: int) -> Iterator[None]:
    """A measurement within it is interrupted when so many segments have been read."""
    score, read = Selected.score, []

    def until(self: Selected, *args: Any) -> Scored:
        read.append(len(args[0]))
        if sum(read) > behind:
            raise KeyboardInterrupt
        return score(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Selected, "score", until)
        yield


def task(dodo: Dodo, **settings: Any) -> Perplexity:
    return Perplexity(dodo, **({"states": (STATES,), "segment": SEGMENT, "ratio": RATIO} | settings))


def measured(dodo: Dodo, method: Any, source: Path, *, batch: int = 7, **settings: Any) -> Any:
    measuring = task(dodo, **settings)
    items = measuring.items([str(source)], None, 0)
    made = {}
    for begin in range(0, len(items), batch):
        some = items[begin : begin + batch]
        made |= {item.key: result for item, result in zip(some, measuring.run(method, some), strict=True)}
    return measuring, items, made, measuring.measure(items, made)


# -- the definition, against a loop


def alone(dodo: Dodo, name: str, row: list[int], start: int, tau: int) -> Tensor:
    """Log-probabilities behind a row's last token, in a pass of their own; the segment starts at `start`."""
    ids = torch.tensor([row])
    compressor = dodo.compressor
    if name in ("full", "theta"):
        with compressor.adapters.use("theta" if name == "theta" else None):
            return compressor.base(ids).logits[0, -1].log_softmax(-1)
    if name == "compressive":
        odd = max(0, start - 1 - tau) % RATIO
        ids, start = torch.tensor([row[:1] + row[1 + odd :]]), start - odd
        pooled = Compressive(compressor, ratio=RATIO, window=tau, segment=SEGMENT, max_groups=STATES - tau)
        return pooled.forward(ids, origin=start)[0, -1].log_softmax(-1)
    assert dodo.thresholds is not None
    threshold = Pace(dodo.thresholds, RATIO) if name == "dodo" else dodo.thresholds.at(RATIO)
    lm = Autoregressive(compressor, threshold=threshold, window=tau, segment=SEGMENT, max_states=STATES + SEGMENT + 1)
    kept = None
    past = max(0, start - 1 - tau)  # tokens that compete
    if name == "stride":
        kept = torch.tensor([[(i - 1) % RATIO == RATIO - 1 for i in range(len(row))]])
    if name == "top-k":
        scores = lm.score(ids)[0].tolist()
        least = sorted(scores[1 : 1 + past], reverse=True)[: math.ceil(past / RATIO)] or [math.inf]
        kept = torch.tensor([[score >= least[-1] for score in scores]])
    return lm.forward(ids, kept=kept, origin=start)[0, -1].log_softmax(-1)


@pytest.mark.parametrize("share", [0.5, 0.75, 0.25])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
@torch.no_grad()
def test_each_token_is_scored_as_by_a_pass_of_its_own(dodo: Dodo, texts: Path, name: str, share: float) -> None:
    texts.write_text(json.dumps({"text": TEXT[:110]}), encoding="utf-8")
    _, items, made, found = measured(dodo, make_language_model(name, dodo, RATIO, share), texts, share=share)
    ids = dodo.document_ids(TEXT[:110])
    tau = int(STATES * share)
    made_of = tau + RATIO * (STATES - tau)
    reach = STATES if name in ("full", "theta") else made_of
    nats = {}
    for i in range(1, len(ids)):
        start = (i - 1) // SEGMENT * SEGMENT
        before = ids[max(1, start - reach) : start]
        row = [*ids[: min(1, start)], *before, *ids[start:i]]
        nats[i] = -float(alone(dodo, name, row, len(row) - (i - start), tau)[ids[i]])
    for item in items:
        expected = [nats[i] for i in range(item.start + 1, min(item.start + 1 + SEGMENT, len(ids)))]
        assert made[item.key]["nats"] == pytest.approx(expected, abs=2e-3)
    whole = [n for i, n in nats.items() if (i - 1) // SEGMENT * SEGMENT >= max(HISTORY, made_of) + 1]
    assert found["8 states"]["subword perplexity"] == pytest.approx(math.exp(sum(whole) / len(whole)), rel=1e-3)
    assert found["8 states"]["subword perplexity, all"] == pytest.approx(math.exp(sum(nats.values()) / len(nats)), rel=1e-3)


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_method_sees_as_many_states_as_it_says(dodo: Dodo, texts: Path, name: str, share: float) -> None:
    seen: list[list[int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if module is not backbone(dodo.compressor.base):  # the scorer's view of it, which has its hooks
            return
        mask, T = kwargs.get("attention_mask"), kwargs["input_ids"].shape[1]
        if mask is None:
            seen.append([T - SEGMENT] * len(kwargs["input_ids"]))
        else:
            first = mask[:, 0, T - SEGMENT] > torch.finfo(mask.dtype).min / 2
            seen.append((first.sum(-1) - 1).expand(len(kwargs["input_ids"])).tolist())

    handle = backbone(dodo.compressor.base).register_forward_pre_hook(note, with_kwargs=True)
    try:
        measuring, items, made, found = measured(dodo, make_language_model(name, dodo, RATIO, share), texts, batch=1, share=share)
    finally:
        handle.remove()
    assert [made[item.key]["states"] for item in items] == [row[0] for row in seen]
    whole = [made[item.key]["states"] for item in items if item.start >= HISTORY + 1]
    assert max(row[0] for row in seen) <= STATES + 1
    assert found["8 states"]["states each"] == pytest.approx(sum(whole) / len(whole))
    if name not in ("dodo", "threshold"):  # whose thresholds give more or less
        assert set(whole) == {STATES + 1}
    assert measuring._whole(STATES) == HISTORY + 1


def test_the_whole_text_in_view_is_the_bases_own_perplexity(dodo: Dodo, texts: Path) -> None:
    _, _, _, found = measured(dodo, make_language_model("full", dodo, RATIO), texts, states=(200,))
    nats, count = 0.0, 0
    for line in texts.read_text().splitlines():
        ids = torch.tensor([dodo.document_ids(json.loads(line)["text"])])
        with torch.no_grad(), dodo.compressor.adapters.use(None):
            logits = dodo.compressor.base(ids).logits[0, :-1]
        nats += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    assert found["200 states"]["subwords, all"] == count
    assert found["200 states"]["subword perplexity, all"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found["200 states"]["subword perplexity"] is None  # no text is long enough to be compressed into 200 states


# -- counting


def test_each_token_is_scored_once(dodo: Dodo, texts: Path) -> None:
    method = Made()
    _, items, made, found = measured(dodo, method, texts)
    rows = [dodo.document_ids(json.loads(line)["text"]) for line in texts.read_text().splitlines()]
    wanted = [token for row in rows for token in row[1:]]
    assert not Counter(wanted) - Counter(method.targets)  # beyond them, only what segments are filled up with
    assert sum(len(made[item.key]["nats"]) for item in items) == found["8 states"]["subwords, all"] == len(wanted)
    mean = sum(1 + token / 100 for token in wanted) / len(wanted)
    assert found["8 states"]["subword perplexity, all"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert found["8 states"]["texts, all"] == 3
    assert found["8 states"]["subwords"] < len(wanted)


def test_a_word_is_the_product_of_its_subwords_and_unknown_words_are_left_out(dodo: Dodo, tmp_path: Path) -> None:
    text = " \n = The Dodo = \n \n The <unk> weighed 17 @.@ 5 kilograms . \n \n = Next = \n \n A <unk> <unk> bird . \n"
    path = tmp_path / "wiki.tokens"
    path.write_text(text, encoding="utf-8")
    _, _, _, found = measured(dodo, Made(), path)
    nats, words, left_out = 0.0, 0, 0.0
    subwords = 0
    for article in articles(text):
        made = dodo.tokenizer(article, add_special_tokens=False, return_offsets_mapping=True)
        end = 0
        for word in [*article.split(), ""]:  # the last is the white space at the end
            begin, end = end, article.index(word, end) + len(word) if word else len(article)
            spans = [(i, span) for i, span in zip(made["input_ids"], made["offset_mapping"], strict=True)]
            mine = [1 + i / 100 for i, (_, e) in spans if begin < e <= end]
            if word == "<unk>":
                left_out += sum(mine)
                continue
            subwords += len(mine)
            nats += sum(mine) if word else 0
            words += bool(word)
    assert left_out > 0
    assert found["8 states"]["words, all"] == words == 17
    assert found["8 states"]["word perplexity, all"] == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert found["8 states"]["subwords, all"] == subwords
    assert found["8 states"]["texts, all"] == 2


def test_articles_begin_at_their_titles_and_nothing_is_lost() -> None:
    first, second = " = A = \n \n One . \n = 3 = \n \n = = B = = \n \n Two . \n \n", " = C = \n \n Three . \n"
    assert articles(" \n" + first + second) == [first, second]
    assert articles("no title") == ["no title"]
    assert articles("before it \n \n = A = \n \n One .") == ["before it \n \n", " = A = \n \n One ."]


def test_a_limit_draws_segments_from_all_over_the_texts_in_a_fixed_order(dodo: Dodo, texts: Path) -> None:
    few, again, more, other = (task(dodo).items([str(texts)], *drawn) for drawn in ((30, 0), (30, 0), (60, 0), (30, 1)))
    assert len(few) in (8, 9)  # a text's last segment may be short
    assert few == again != other
    assert {item.key for item in few} < {item.key for item in more}
    every = task(dodo).items([str(texts)], None, 0)
    assert (
        {item.key for item in more}
        < {item.key for item in every}
        == {item.key for item in task(dodo).items([str(texts)], 10_000, 0)}
    )
    assert len({item.text for item in few}) > 1


def test_perplexity_and_its_error_by_hand() -> None:
    value, error = perplexity([2.0, 6.0], [2, 2])
    assert value == pytest.approx(math.exp(2))
    assert error == pytest.approx((math.exp(3) - math.exp(1)) / 2)  # half the difference of the two that leave one out
    assert perplexity([2.0, 0.0], [2, 0]) == (pytest.approx(math.e), None)
    assert perplexity([], []) == (None, None)
    assert perplexity([800.0, 1.0], [1, 1]) == (None, None)  # "words" of a language without spaces


# -- what can't be


def test_what_can_not_be_is_refused(dodo: Dodo, tmp_path: Path) -> None:
    for states, message in (((7,), "of 7 states, a share of 0.5"), ((0,), "of 0 states"), ((300,), "room for 512")):
        with pytest.raises(InputError, match=message):
            task(dodo, states=states)
    for share in (0.9, 1.0, 0.01):
        with pytest.raises(InputError, match=f"of 8 states, a share of {share:g}"):
            task(dodo, share=share)
    with pytest.raises(InputError, match="at least 1"):
        task(dodo, segment=0)
    with pytest.raises(InputError, match="methods are dodo, threshold"):
        make_language_model("random", dodo, 10)
    with pytest.raises(InputError, match="whole number"):
        make_language_model("dodo", dodo, 2.5)
    known, dodo.thresholds = dodo.thresholds, None
    try:
        with pytest.raises(InputError, match="dodo calibrate"):
            make_language_model("dodo", dodo, 10)
        make_language_model("top-k", dodo, 10)
    finally:
        dodo.thresholds = known
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(InputError, match="no text of two tokens"):
        task(dodo).items([str(tmp_path / "none.jsonl")], None, 0)


def test_without_a_kept_first_token_states_are_s_exactly(dodo: Dodo, texts: Path) -> None:
    config = dodo.compressor.config
    dodo.compressor.config = dataclasses.replace(config, keep_first=False)
    try:
        for name in ("top-k", "compressive", "full"):
            _, _, _, found = measured(dodo, make_language_model(name, dodo, RATIO), texts)
            assert found["8 states"]["states each"] == STATES
    finally:
        dodo.compressor.config = config


def test_words_that_segments_cut_count_by_their_scored_share(dodo: Dodo, texts: Path) -> None:
    """So that the segments' words add up to those of the texts; if cut ones were left out, long words would be missing."""
    task = Perplexity(dodo, states=[STATES], segment=SEGMENT, ratio=RATIO)
    items = task.items([str(texts)], None, 0)
    made = dict(zip([item.key for item in items], task.run(Made(), items), strict=True))
    whole, *parts = (task.measure(some, made)["8 states"] for some in (items, *([item] for item in items)))
    assert sum(part["words, all"] for part in parts) == pytest.approx(whole["words, all"])
    assert any(part["words, all"] % 1 for part in parts)
    nats = [math.log(part["word perplexity, all"]) * part["words, all"] for part in parts if part["words, all"]]
    assert sum(nats) == pytest.approx(math.log(whole["word perplexity, all"]) * whole["words, all"])


def test_segments_by_themselves_are_those_with_a_whole_history_in_the_texts_order(dodo: Dodo, tmp_path: Path) -> None:
    """Whatever the share of whole tokens, so that methods can be compared segment by segment; unknown words do not count."""
    path = tmp_path / "wiki.tokens"
    first, second = " One <unk> dodo ran ." * 12, " Two <unk> ran ." * 20
    path.write_text(f" \n = A = \n \n{first} \n \n = B = \n \n{second}", encoding="utf-8")
    found = {}
    for share in (0.5, 0.75):
        measuring, items, made, numbers = measured(dodo, Made(), path, share=share)
        each = measuring.each(items, made)["8 states"]
        wanted = []
        for text in measuring._texts:
            for start in range(0, len(text.ids) - 1, SEGMENT):
                here = range(start + 1, min(start + 1 + SEGMENT, len(text.ids)))
                nats = [1 + int(text.ids[i]) / 100 for i in here if text.words[i] < 0 or text.counted[text.words[i]]]
                if start >= HISTORY + int(dodo.config.keep_first) and nats:
                    wanted.append(sum(nats) / len(nats))
        assert len(wanted) > 5
        assert each == pytest.approx(wanted, abs=1e-4)
        assert numbers["8 states"]["subwords"] < SEGMENT * len(wanted)  # something was not counted
        found[share] = each
    assert found[0.5] == found[0.75]


def test_segments_are_compared_only_where_the_same_have_a_whole_history(dodo: Dodo, texts: Path, tmp_path: Path) -> None:
    """With less than half of the states whole, fewer segments have one."""
    made = {}
    for name, method, share in (("full", "full", 0.5), ("half", "dodo", 0.5), ("quarter", "dodo", 0.25)):
        made[name] = evaluate(
            dodo,
            "perplexity",
            method=method,
            ratio=RATIO,
            sources=[str(texts)],
            states=[STATES],
            segment=SEGMENT,
            share=share,
            out=tmp_path / f"{name}.json",
        )
    assert len(made["quarter"]["each"]["8 states"]) < len(made["half"]["each"]["8 states"])
    found = list(differences(list(made.values())))
    assert [difference.dodo["name"] for difference in found] == ["half"]


def test_ratio_1_keeps_all_whichever_way_the_threshold_is_chosen(dodo: Dodo, texts: Path) -> None:
    for name in ("dodo", "threshold"):
        _, _, _, found = measured(dodo, make_language_model(name, dodo, 1), texts, ratio=1)
        assert found["8 states"]["states each"] == STATES + int(dodo.config.keep_first)


def test_a_stopped_measurement_does_not_go_on_with_other_thresholds(
    dodo: Dodo, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"ratio": RATIO, "sources": [str(texts)], "states": [STATES], "segment": SEGMENT, "batch": 5}
    with stopped(monkeypatch, behind=30):
        evaluate(dodo, "perplexity", method="dodo", out=tmp_path / "record.json", **settings)
    assert (tmp_path / "record.part.jsonl").is_file()
    before = dodo.thresholds
    assert before is not None
    monkeypatch.setattr(dodo, "thresholds", dataclasses.replace(before, values=tuple(v + 1 for v in before.values)))
    with pytest.raises(InputError, match="other settings"):
        evaluate(dodo, "perplexity", method="dodo", out=tmp_path / "record.json", **settings)


def test_empty_texts_are_passed_over_and_wikitext_has_words_out_of_its_vocabulary(dodo: Dodo, tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"text": text}) for text in ("", "One <unk> ran .", " "))
    counts = {}
    for name in ("wikitext-103.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(rows, encoding="utf-8")
        _, _, _, found = measured(dodo, Made(), tmp_path / name)
        counts[name] = found["8 states"]["words, all"]
    assert counts == {"wikitext-103.jsonl": 3, "other.jsonl": 4}


def test_a_stopped_measurement_does_not_go_on_with_other_texts_of_the_same_name(
    dodo: Dodo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "ratio": RATIO,
        "states": [STATES],
        "segment": SEGMENT,
        "batch": 5,
        "out": tmp_path / "record.json",
    }
    for folder, text in (("a", TEXT[:150]), ("b", TEXT[3:153])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "texts.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    with stopped(monkeypatch, behind=10):
        evaluate(dodo, "perplexity", method="top-k", sources=[str(tmp_path / "a" / "texts.jsonl")], **settings)
    with pytest.raises(InputError, match="other settings"):
        evaluate(dodo, "perplexity", method="top-k", sources=[str(tmp_path / "b" / "texts.jsonl")], **settings)
    one = evaluate(dodo, "perplexity", method="top-k", sources=[str(tmp_path / "a" / "texts.jsonl")], **settings)
    with pytest.raises(InputError, match="is of a measurement with other items; give"):
        evaluate(dodo, "perplexity", method="top-k", sources=[str(tmp_path / "b" / "texts.jsonl")], replace=False, **settings)
    other = evaluate(dodo, "perplexity", method="full", sources=[str(tmp_path / "b" / "texts.jsonl")], **settings)
    for record, method in ((one, "dodo"), (other, "full")):
        record["settings"]["method"] = method
    assert not list(differences([one, other]))


def test_a_record_of_longer_histories_is_not_replaced_unasked(dodo: Dodo, texts: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sources": [str(texts)], "states": [STATES], "segment": SEGMENT, "out": tmp_path / "record.json"}
    evaluate(dodo, "perplexity", method="full", ratio=3, **settings)
    with pytest.raises(InputError, match="whole history at ratio 3, not 6"):
        evaluate(dodo, "perplexity", method="full", ratio=6, replace=False, **settings)


def test_segments_of_one_text_are_one_voice_in_the_standard_error(dodo: Dodo, texts: Path, tmp_path: Path) -> None:
    """By hand: sums of deviations by text, squared, added up; over n, times G / (G - 1)."""
    settings: dict[str, Any] = {"ratio": RATIO, "sources": [str(texts)], "segment": SEGMENT}
    made = [
        evaluate(dodo, "perplexity", method=name, states=states, out=tmp_path / f"{name}.json", **settings)
        for name, states in (("dodo", [STATES]), ("full", [STATES, 2 * STATES]))
    ]
    (found,) = differences(made)  # the group that both have
    group = f"{STATES} states"
    less = [a - b for a, b in zip(*(record["each"][group] for record in made), strict=True)]
    of = made[0]["each of"][group]
    assert of == made[1]["each of"][group] and set(of) == {0, 1}
    mean = sum(less) / len(less)
    sums = [sum(x - mean for x, text in zip(less, of, strict=True) if text == wanted) for wanted in (0, 1)]
    assert found.error == pytest.approx((sum(s * s for s in sums) * 2 / 1) ** 0.5 / len(less))


def test_fresh_adapters_are_not_dodo_beside_trained_ones() -> None:
    def record(method: str, adapters: str, values: list[float]) -> dict[str, Any]:
        settings = {"method": method, "adapters": adapters, "ratio": 5.0, "data": ["a"], "seed": 0, "base fingerprint": "f"}
        return {"settings": settings, "each": {"all": values}}

    stride, fresh, trained = (
        record(*given)
        for given in (("stride", "trained", [1.0, 2.0]), ("dodo", "fresh", [0.0, 0.0]), ("dodo", "trained", [3.0, 4.0]))
    )
    assert [found.mean for found in differences([stride, fresh, trained])] == [2.0]
    assert [found.mean for found in differences([stride, fresh])] == [-1.5]
