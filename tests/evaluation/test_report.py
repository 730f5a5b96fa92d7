"""The page of results."""

import json
from pathlib import Path
from typing import Any

import pytest

from dodo.errors import InputError
from dodo.evaluation.names import METHODS_OF
from dodo.evaluation.report import (
    SECTIONS,
    _boxes,
    _perplexities,
    _states,
    read_harness,
    read_results,
    write_figures,
    write_report,
)

SETTINGS = {"base": "tiny", "adapters": "trained", "adapter fingerprint": "0123456789", "data": ["texts.jsonl"]}


def put(folder: Path, name: str, task: str, method: str, ratio: float | None, measured: dict[str, Any], **more: Any) -> None:
    settings = {**SETTINGS, "task": task, "method": method, "ratio": ratio, **more.pop("settings", {})}
    record = {"name": name, "commit": "abcdef012345", "settings": settings, "measured": measured, **more}
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    for ratio, right in ((10.0, 0.125), (5.0, 0.25)):
        values = {"n": 8, "accuracy": right, "standard error": 0.0625, "states each": 100 / ratio}
        put(folder, f"squad-r{ratio:g}", "squad", "dodo", ratio, {"all": values})
    values = {"n": 2, "bleu": 71.594, "bleu standard error": None, "token accuracy": 0.875, "states each": 14.0}
    values |= {"perplexity": 1.25, "perplexity standard error": 0.5, "numbers rebuilt": None}
    put(folder, "ae", "autoencoding", "dodo", 5.0, {"64 tokens": values}, each={"64 tokens": [70.0, 73.5]})
    shares = {"'|': share of nuggets": 0.5, "'|': share of text": 0.25}
    put(folder, "kinds", "delimiters", "dodo", 10.0, {"64 tokens": {"n": 1, "nuggets": 12, **shares}})
    (folder / "benchmark-x.json").write_text(json.dumps({"settings": {}, "measured": {}}))
    return folder


def test_rows_are_the_records_in_order_and_the_papers_stand_below(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results.md"
    write_report(read_results(results), page)
    text = page.read_text()
    five, ten = (
        "| dodo | 5 | texts.jsonl | all | 8 | 20.0 | 0.250 ± 0.062 |",
        "| dodo | 10 | texts.jsonl | all | 8 | 10.0 | 0.125 ± 0.062 |",
    )
    assert 0 < text.index(five) < text.index(ten) < text.index("| LMSumm | 10 | 30.9 |")
    rebuilt = (
        "| dodo | 5 | texts.jsonl | 64 tokens | 2 | 14.0 | 71.59 | 0.875 | 1.250 ± 0.500 |  |  |  | tiny | trained 01234567 |"
    )
    assert f"{rebuilt} abcdef0 |" in text
    assert "benchmark" not in text


def test_a_commit_with_changes_is_marked(tmp_path: Path) -> None:
    for name, commit in (("clean", "abcdef012345"), ("changed", "fedcba012345+changes")):
        put(tmp_path, name, "squad", name, None, {"all": {"n": 1, "accuracy": 0.5}}, commit=commit)
    write_report(read_results(tmp_path), tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| abcdef0 |" in text
    assert "| fedcba0+ |" in text
    assert "A commit with + had changes" in text


def test_adapters_are_told_of_methods_that_use_them_alone(tmp_path: Path) -> None:
    values = {"64 states": {"n": 8, "subword perplexity": 9.5, "word perplexity": 20.5, "states each": 65.0}}
    for method in ("full", "theta"):
        put(tmp_path, f"ppl-{method}", "perplexity", method, None, values)
    write_report(read_results(tmp_path), tmp_path / "results.md")
    rows = [line for line in (tmp_path / "results.md").read_text().splitlines() if "texts.jsonl" in line]
    assert ["trained 01234567" in row for row in rows] == [False, True]


def test_a_share_of_whole_tokens_other_than_the_papers_is_told(tmp_path: Path) -> None:
    values = {"64 states": {"n": 8, "subword perplexity": 9.5, "states each": 65.0}}
    for name, share in (("old", {}), ("half", {"share of whole tokens": 0.5}), ("more", {"share of whole tokens": 0.9375})):
        put(tmp_path, name, "perplexity", "dodo", 10.0, values, settings=share)
    write_report(read_results(tmp_path), tmp_path / "results.md")
    rows = [line for line in (tmp_path / "results.md").read_text().splitlines() if "texts.jsonl" in line]
    assert sorted(row.split("|")[1].strip() for row in rows) == ["dodo", "dodo", "dodo, 0.9375 whole"]


def test_two_sets_of_texts_of_one_method_have_lines_of_their_own(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    values = {"n": 8, "accuracy": 0.5, "standard error": 0.0625, "states each": 20.0}
    for name in ("first", "second"):
        put(tmp_path, name, "squad", "dodo", 5.0, {"all": values}, settings={"data": [f"{name}.jsonl"]})
    axes = figure.subplots()
    assert _states(axes, read_results(tmp_path)["squad"], "accuracy", "share right")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dodo on first.jsonl", "dodo on second.jsonl"]


def test_two_sets_of_adapters_of_one_method_are_told_apart(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for name in ("first", "second"):
        for ratio in (2.0, 5.0):
            values = {"n": 8, "accuracy": 0.5, "standard error": 0.0625, "states each": 100 / ratio}
            settings = {"model": name, "adapter fingerprint": f"{name:x>8}99"}
            put(tmp_path, f"{name}-{ratio:g}", "squad", "stride", ratio, {"all": values}, settings=settings)
    results = read_results(tmp_path)
    write_report(results, tmp_path / "results.md")
    rows = [line for line in (tmp_path / "results.md").read_text().splitlines() if "texts.jsonl" in line]
    assert [sum(made_with in row for row in rows) for made_with in ("| first xxxfirst |", "| second xxsecond |")] == [2, 2]
    axes = figure.subplots()
    assert _states(axes, results["squad"], "accuracy", "share right")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["stride of first", "stride of second"]


def test_every_task_has_a_section_whose_values_the_task_measures() -> None:
    assert set(SECTIONS) == set(METHODS_OF)
    for section in SECTIONS.values():
        assert all(len(row) == len(section.head) for row in section.paper)


def test_figures_are_drawn_where_there_are_numbers(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = write_figures(read_results(results), tmp_path / "docs" / "figures")
    assert {path.stem for path in made} == {"autoencoding.boxes", "autoencoding.states", "squad.states", "delimiters.bars"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    write_report(read_results(results), tmp_path / "docs" / "results.md", made)
    assert "(figures/squad.states.png)" in (tmp_path / "docs" / "results.md").read_text()


def test_all_methods_with_states_share_a_figure_and_each_has_a_look_of_its_own(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    for i in range(13):
        values = {"n": 8, "accuracy": i / 13, "standard error": 0.0625, "states each": 10.0}
        put(tmp_path, f"squad-{i}", "squad", f"method {i:02}", 5.0, {"all": values})
    axes = figure.subplots()
    assert _states(axes, read_results(tmp_path)["squad"], "accuracy", "share right")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"method {i:02}" for i in range(13)]
    looks = {(line[0].get_color(), line[0].get_marker(), line[0].get_linestyle()) for line in axes.containers}
    assert len(looks) == 13


def test_a_peers_row_names_no_adapters(tmp_path: Path) -> None:
    values = {"n": 8, "accuracy": 0.5, "standard error": 0.0625, "states each": 10.0}
    put(tmp_path, "peer", "squad", "kvpress-knorm", 5.0, {"all": values}, **{"versions of the peer": {"kvpress": "0.5.5"}})
    write_report(read_results(tmp_path), tmp_path / "page.md")
    row = "| kvpress-knorm | 5 | texts.jsonl | all | 8 | 10.0 | 0.500 ± 0.062 | tiny |  | abcdef0 |"
    text = (tmp_path / "page.md").read_text()
    assert row in text
    assert "kvpress and LLMLingua drop states" in text


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no records"):
        read_results(tmp_path)
    (tmp_path / "broken.json").write_text("[")
    with pytest.raises(InputError, match=r"broken.json is no record"):
        read_results(tmp_path)


def test_methods_are_compared_item_by_item_with_dodo_at_their_ratio(tmp_path: Path) -> None:
    values = {"all": {"n": 3, "accuracy": 0.5, "standard error": 0.25, "states each": 10.0}}

    def record(name: str, method: str, ratio: float | None, each: list[int] | None, **settings: Any) -> None:
        more = {} if each is None else {"each": {"all": each}}
        put(tmp_path, name, "squad", method, ratio, values, settings={"seed": 0, **settings}, **more)

    record("a", "dodo", 5.0, [1, 1, 0, 1])
    record("b", "dodo", 10.0, [0, 0, 1])
    record("c", "stride", 5.0, [0, 1, 0])  # 1, 0, 0 on the first three: 1/3, with an error of (1/3)^(1/2) / 3^(1/2)
    record("d", "full", None, [1, 1, 1, 1])  # beside each ratio: 0, 0, -1, 0 and -1, -1, 0
    record("e", "random", 5.0, [1, 1, 1, 1], seed=1)
    record("f", "truncate", 5.0, None)
    record("g", "lmsumm", 5.0, [1, 1, 1, 1], data=["others.jsonl"])
    write_report(read_results(tmp_path), tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text()
    compared = text[text.index("Item by item") : text.index("In the paper")]
    rows = [line.split(" | ")[:6] for line in compared.splitlines() if "jsonl" in line]
    assert rows == [
        ["| full", "5", "texts.jsonl", "all", "4", "-0.250 ± 0.250"],
        ["| full", "10", "texts.jsonl", "all", "3", "-0.667 ± 0.333"],
        ["| stride", "5", "texts.jsonl", "all", "3", "+0.333 ± 0.333"],
    ]
    assert "| stride | 5 | texts.jsonl | all | 3 | +0.333 ± 0.333 | trained 01234567 | trained 01234567 |" in compared


def test_language_models_are_compared_segment_by_segment_with_dodo_of_their_split(tmp_path: Path) -> None:
    """One that has no split stands beside every one; segments drawn at another limit are others."""
    values = {"64 states": {"subwords": 3, "subword perplexity": 20.0, "states each": 64.0}}

    def record(name: str, method: str, each: list[float], share: float | None = None, limit: int = 6400) -> None:
        more = {"seed": 0, "segment": 64, "limit": limit, "share of whole tokens": share}
        put(tmp_path, name, "perplexity", method, 10.0, values, settings=more, each={"64 states": each})

    record("a", "dodo", [3.0, 2.0, 2.0], 0.5)
    record("b", "dodo", [2.5, 2.0, 2.0], 0.875)
    record("c", "compressive", [3.0, 3.0, 2.0], 0.875)  # -0.5, -1, 0
    record("d", "theta", [3.0, 3.0, 3.0])  # 0, -1, -1 and -0.5, -1, -1
    record("e", "full", [9.0, 9.0, 9.0], limit=100)
    write_report(read_results(tmp_path), tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text()
    compared = text[text.index("Item by item") : text.index("In the paper")]
    rows = [line.split(" | ") for line in compared.splitlines() if "jsonl" in line]
    assert [(row[0], row[5], row[7]) for row in rows] == [
        ("| compressive, 0.875 whole", "-0.500 ± 0.289", "trained 01234567, 0.875 whole |"),
        ("| theta", "-0.667 ± 0.333", "trained 01234567 |"),
        ("| theta", "-0.833 ± 0.167", "trained 01234567, 0.875 whole |"),
    ]
    assert "| nats |" in compared


def test_each_data_set_has_a_panel_of_boxes_and_each_ratio_a_colour(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="figures need matplotlib")
    values = {"n": 2, "bleu": 70.0}
    for name, data, ratio, groups in (
        ("a", "one.jsonl", 5.0, ["64 tokens", "128 tokens"]),
        ("b", "one.jsonl", 5.0, ["512 tokens"]),
        ("c", "one.jsonl", 10.0, ["64 tokens"]),
        ("d", "two.jsonl", 10.0, ["64 tokens"]),
    ):
        each = {group: [60.0, 80.0] for group in groups}
        measured = dict.fromkeys(groups, values)
        put(tmp_path, name, "autoencoding", "dodo", ratio, measured, each=each, settings={"data": [data]})
    figure = figures.Figure()
    assert _boxes(figure.subplots(), read_results(tmp_path)["autoencoding"])
    one, two = figure.axes
    assert (one.get_title(), two.get_title()) == ("one.jsonl, trained 01234567", "two.jsonl, trained 01234567")
    assert [label.get_text() for label in one.get_xticklabels()] == ["64 tokens", "128 tokens", "512 tokens"]
    colours = [{line.get_label(): line.get_color() for line in panel.lines if "r =" in line.get_label()} for panel in (one, two)]
    assert colours == [{"r = 5": "C0", "r = 10": "C1"}, {"r = 10": "C1"}]
    assert not _boxes(figures.Figure().subplots(), [])


def test_perplexities_are_one_line_through_all_states_of_the_papers_half(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="figures need matplotlib")
    for method, share in (("dodo", 0.5), ("full", None), ("compressive", 0.875)):
        measured = {f"{n} states": {"subword perplexity": 2000 / n, "states each": n + 1.0} for n in (64, 128)}
        put(tmp_path, method, "perplexity", method, 10.0, measured, settings={"share of whole tokens": share})
    axes = figures.Figure().subplots()
    assert _perplexities(axes, read_results(tmp_path)["perplexity"])
    lines = {text.get_text(): container for text, container in zip(axes.get_legend().get_texts(), axes.containers, strict=True)}
    assert set(lines) == {"dodo", "full"}
    assert lines["dodo"][0].get_xdata().tolist() == [65.0, 129.0]
    assert [tick for tick in axes.get_xticks() if tick in (64, 128)] == [64, 128]


def test_what_the_harness_wrote_has_a_row(tmp_path: Path) -> None:
    assert read_harness(tmp_path) == {}
    (tmp_path / "lm-eval").mkdir()
    record = {
        "results": {"local": {"name": "local", "contains,none": 0.25, "contains_stderr,none": 0.125}},
        "config": {"model": "dodo", "model_args": {"model": "smollm2-135m", "ratio": 5}, "adapter_fingerprint": "abcdef0123"},
        "n-samples": {"local": {"original": 12, "effective": 12}},
    }
    (tmp_path / "lm-eval" / "local.json").write_text(json.dumps(record), encoding="utf-8")
    write_report({}, tmp_path / "results.md", harness=read_harness(tmp_path))
    row = "| local | contains | 0.250 ± 0.125 | 12 | dodo | model=smollm2-135m, ratio=5 | abcdef01 |"
    assert row in (tmp_path / "results.md").read_text()
    (tmp_path / "lm-eval" / "local.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="was not written by lm-evaluation-harness"):
        read_harness(tmp_path)


def test_rows_of_cost_tell_the_machine(tmp_path: Path) -> None:
    values = {"512 tokens": {"n": 1, "encode, s": 1.5, "states each": 53.0}}
    put(tmp_path, "cost", "efficiency", "dodo", 10.0, values, hardware={"cpu": "A processor", "threads": 2, "gpu": None})
    write_report(read_results(tmp_path), tmp_path / "results.md")
    assert "| A processor, 2 threads | abcdef0 |" in (tmp_path / "results.md").read_text()


def test_boxes_are_of_one_set_of_trained_adapters_each(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="figures need matplotlib")
    for name, adapters, fingerprint, value in (
        ("a", "trained", "aaaaaaaa", 90.0),
        ("b", "trained", "bbbbbbbb", 80.0),
        ("z", "fresh", "cccccccc", 1.0),
    ):
        settings = {"adapters": adapters, "adapter fingerprint": fingerprint}
        measured = {"64 tokens": {"n": 2, "bleu": value}}
        put(tmp_path, name, "autoencoding", "dodo", 5.0, measured, each={"64 tokens": [value, value]}, settings=settings)
    figure = figures.Figure()
    assert _boxes(figure.subplots(), read_results(tmp_path)["autoencoding"])
    drawn = {panel.get_title(): {float(y) for line in panel.lines for y in line.get_ydata()} for panel in figure.axes}
    assert {title: values for title, values in drawn.items() if values != set()} == {
        "texts.jsonl, trained aaaaaaaa": {90.0},
        "texts.jsonl, trained bbbbbbbb": {80.0},
    }


def test_what_is_said_of_the_published_base_is_said_wherever_it_was_loaded_from(tmp_path: Path) -> None:
    ours = SECTIONS["squad"].ours
    for base, fingerprint, told in (("runs/base", "f", True), ("other", "g", False)):
        folder = tmp_path / fingerprint
        folder.mkdir()
        values = {"all": {"n": 8, "accuracy": 0.5}}
        put(folder, "a", "squad", "dodo", 5.0, values, settings={"base": "smollm2-135m", "base fingerprint": "f"})
        put(folder, "b", "squad", "full", None, values, settings={"base": base, "base fingerprint": fingerprint})
        write_report(read_results(folder), folder / "page.md")
        assert (ours in (folder / "page.md").read_text()) == told


def test_perplexities_at_several_ratios_are_several_lines(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="figures need matplotlib")
    for ratio in (5.0, 10.0):
        measured = {f"{n} states": {"subword perplexity": 2000 / n, "states each": n + 1.0} for n in (64, 128)}
        put(tmp_path, f"r{ratio:g}", "perplexity", "dodo", ratio, measured, settings={"share of whole tokens": 0.5})
    axes = figures.Figure().subplots()
    assert _perplexities(axes, read_results(tmp_path)["perplexity"])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["dodo, r = 5", "dodo, r = 10"]


@pytest.mark.parametrize("given", [{"model": "a", "ratio": 5}, "model=a,ratio=5"])
def test_the_harness_settings_are_shown_in_either_form(tmp_path: Path, given: Any) -> None:
    record = {"results": {"task": {"acc,none": 0.5, "acc_stderr,none": 0.1}}, "config": {"model": "dodo", "model_args": given}}
    put(tmp_path, "a", "squad", "dodo", 5.0, {"all": {"n": 8, "accuracy": 0.5}})
    write_report(read_results(tmp_path), tmp_path / "page.md", harness={"x": record})
    assert "model=a," in (tmp_path / "page.md").read_text()


def test_a_record_without_a_method_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"settings": {"task": "squad"}, "measured": {}}))
    with pytest.raises(InputError, match=r"a\.json is no record"):
        read_results(tmp_path)
