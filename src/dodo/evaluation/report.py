"""The page of results: a table for each task out of the records, the paper's numbers beside them, and the figures.

Paper: Tables 1, 3, 4 and 6, Figures 4, 5 and 7. No number of ours is typed; the paper's are, below, with the model they are of.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dodo.errors import InputError
from dodo.evaluation.paired import differences

if TYPE_CHECKING:
    from dodo.model import Dodo

__all__ = ["PASSAGE", "Section", "draw_passage", "method_of", "read_results", "write_figures", "write_report"]

Record = dict[str, Any]

PASSAGE = "passage.png"
"""Figure 7, among the figures."""


@dataclass(frozen=True)
class Section:
    """What the page says of one task.

    title: heading. columns: values of a group that are shown, by heading; their errors stand behind `error`. error: of a value's
    name, the name of its standard error. paper: rows of the paper, each with the model, or the reason why there are none.
    apart: why ours differ. single: what the values of single items are, by which methods are compared item by item.
    """

    title: str
    columns: dict[str, str]
    paper: tuple[tuple[str, ...], ...] = ()
    head: tuple[str, ...] = ()
    apart: str = ""
    single: str = "BLEU"
    error: Callable[[str], str] = "{} standard error".format


_SMALL = (
    "The paper's base has 7 billion parameters, this one 135 million; the card of its adapters says on how many tokens they were "
    "trained."
)
_OF_THE_BASE = ("full", "nodoc", "lmsumm", "truncate")
"""Methods that use no adapters."""
_PEERS = (
    "kvpress and LLMLingua drop states or words of the base itself, which was never trained to do without; their states are "
    "means over heads and layers."
)

SECTIONS: dict[str, Section] = {
    "autoencoding": Section(
        "Rebuilding texts (Figure 4)",
        {
            "BLEU": "bleu",
            "tokens right": "token accuracy",
            "perplexity": "perplexity",
            "numbers": "numbers rebuilt",
            "names": "names rebuilt",
            "dates": "dates rebuilt",
        },
        apart="Tokens right and perplexity are with the tokens before given. The paper shows a figure, and says 98 at r = 20 for "
        "LLaMA-7B. Standard errors of 2 and more: these are all texts of so many tokens that are held out, and at high "
        "ratios a few come back whole and most do not. ICAE learned from 78 thousand document tokens, what ships from 6.3 "
        f"million. {_SMALL}",
    ),
    "multilingual": Section(
        "Other languages (Table 6)",
        {"BLEU": "bleu", "perplexity": "perplexity"},
        head=("language", "BLEU", "perplexity"),
        paper=(
            ("English", "99.1", "1.004"),
            ("Bulgarian", "97.7", "1.040"),
            ("German", "98.8", "1.017"),
            ("French", "99.0", "1.011"),
            ("Italian", "98.3", "1.014"),
            ("Dutch", "97.9", "1.021"),
            ("Polish", "98.3", "1.032"),
            ("Russian", "98.9", "1.032"),
        ),
        apart="The paper's documents are of RedPajama, at r = 10. Few texts of each language were rebuilt, for the time that it "
        f"takes. {_SMALL}",
    ),
    "perplexity": Section(
        "Perplexity with a number of states (Table 1)",
        {"subword": "subword perplexity", "word": "word perplexity"},
        head=("states", "method", "WikiText subword", "WikiText word", "Pile subword"),
        paper=(
            ("64", "Full", "7.95", "14.08", "5.80"),
            ("64", "Compressive", "7.64", "13.39", "5.65"),
            ("64", "Dodo", "6.91", "11.78", "5.01"),
            ("128", "Full", "6.87", "11.69", "5.35"),
            ("128", "Compressive", "7.09", "12.18", "4.93"),
            ("128", "Dodo", "6.58", "11.06", "4.49"),
            ("256", "Full", "6.39", "10.65", "4.94"),
            ("256", "Compressive", "6.88", "11.62", "4.82"),
            ("256", "Dodo", "6.30", "10.55", "4.01"),
        ),
        apart=f"Standard errors are of texts that are hard or easy for all methods alike: all read the same ones. {_SMALL}",
    ),
    "endless": Section("Endless text", {"perplexity": "perplexity"}, apart="Beyond the paper."),
    "squad": Section(
        "Questions on a document (Table 3)",
        {"right": "accuracy"},
        head=("method", "ratio", "accuracy, %"),
        paper=(
            ("NoDoc", "", "1.4"),
            ("LMSumm", "10", "30.9"),
            ("Full", "1", "64.5"),
            ("Dodo", "5", "59.1"),
            ("Dodo", "10", "49.8"),
        ),
        apart="Shares, not per cent. The paper's LLaMA-2-7B-chat was not fine-tuned on questions, ours was. Of 600 "
        "questions a standard error is at most 2.0 points, of 300 2.9, of 200 3.5; more of them were left out for the time that "
        f"they take. {_SMALL}",
        single="right",
        error=lambda _: "standard error",
    ),
    "summarization": Section(
        "Summaries (Table 4)",
        {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"},
        head=("method", "ratio", "ROUGE-1", "ROUGE-2", "ROUGE-L"),
        paper=(
            ("Full, zero-shot", "1", "32.5", "9.7", "28.2"),
            ("Full, fine-tuned", "1", "37.7", "15.6", "35.3"),
            ("Dodo, fine-tuned", "10", "39.9", "14.6", "37.0"),
        ),
        apart="What ships is not fine-tuned on summaries; smollm2-135m-summaries is, on 200 articles, and over the same, whole, "
        f"smollm2-135m-summaries-full. {_SMALL}",
        single="ROUGE-L",
    ),
    "delimiters": Section(
        "Which tokens become nuggets (Figure 5)",
        {"nuggets": "nuggets", "ten most frequent": "most frequent 10: share of nuggets"},
        apart="In the paper ten kinds of tokens, mostly delimiters of clauses, make up 95% of the nuggets at r = 10.",
    ),
    "efficiency": Section(
        "Cost by length of the document",
        {
            "encode, s": "encode, s",
            "read whole, s": "whole: read, s",
            "first token, s": "first token, s",
            "over the whole text, s": "whole: first token, s",
            "over its cache, s": "whole: first token, cache kept, s",
            "token, s": "each further token, s",
            "token over the whole, s": "whole: each further token, s",
            "bytes": "bytes held",
            "bytes of the whole": "whole: bytes held",
            "peak memory, bytes": "peak memory of the process, bytes",
            "sooner from questions": "questions from which it is sooner",
            "cache kept": "the same, cache kept",
            "sooner from tokens": "sooner from tokens",
        },
        apart="An answer has 64 tokens. Sooner than reading the whole text: from so many questions on, and, of the lengths "
        "measured, from so many tokens on at one question. Memory is that of the whole process, of a peer's its own. The paper "
        "gives no numbers.",
    ),
    "optimal-selection": Section(
        "A search for better selections (Algorithm 1)",
        {
            "moved": "share of nuggets moved",
            "perplexity before": "perplexity before",
            "after": "perplexity after",
            "after / before": "perplexity after / before",
        },
        head=("moved", "perplexity before", "after", "after / before"),
        paper=(("0.247", "7.74", "7.13", "0.921"),),
        apart=f"The paper searches with its autoregressive LM, here it is the compressor. {_SMALL}",
    ),
}


def read_results(folder: Path) -> dict[str, list[Record]]:
    """Records of measurements by task, in the order of `SECTIONS`, then of method, ratio and name.

    Raises:
        InputError: there are none, or a file is no record.
    """
    found: dict[str, list[Record]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            task = record["settings"].get("task")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{path} is no record of a measurement") from None
        if task in SECTIONS:
            found[task].append(record)
    if not found:
        raise InputError(f"there are no records in {folder}; dodo evaluate makes them")
    ordered = {task: found[task] for task in SECTIONS if task in found}
    for records in ordered.values():
        records.sort(key=lambda r: (r["settings"]["method"], r["settings"]["ratio"] or 0, r["name"]))
    return ordered


def write_report(results: dict[str, list[Record]], page: Path, figures: Sequence[Path] = ()) -> None:
    """The page, as Markdown.

    Args:
        results: see `read_results`.
        page: to be written; its folder is made.
        figures: pictures to show, by the task that their name begins with; beside the page or below it.
    """
    lines = ["# Results", "", "Written by `dodo report` out of the records in results/. ± is one standard error.", ""]
    for task, records in results.items():
        section = SECTIONS[task]
        lines += [f"## {section.title}", "", *_table(section, records), ""]
        if rows := _paired(section, records):
            lines += ["Item by item, Dodo less another method at the same ratio, or less one that has none:", "", *rows, ""]
        for figure in figures:
            if figure.name.startswith(f"{task}."):
                lines += [f"![{section.title}]({figure.relative_to(page.parent).as_posix()})", ""]
        if section.paper:
            lines += ["In the paper:", "", *_rows(section.head, section.paper), ""]
        lines += [section.apart, ""] if section.apart else []
        lines += [_PEERS, ""] if any("versions of the peer" in record for record in records) else []
    for passage in (figure for figure in figures if figure.name == PASSAGE):
        lines += ["## A passage and its nuggets (Figure 7)", ""]
        lines += [f"![A passage and its nuggets]({passage.relative_to(page.parent).as_posix()})", ""]
        lines += ["On green: the nuggets. Darker: higher score. In the paper mostly punctuation and the ends of phrases.", ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines), encoding="utf-8")


def _table(section: Section, records: Sequence[Record]) -> list[str]:
    rows = []
    for record in records:
        settings = record["settings"]
        data = _data_of(settings)
        made_with = " ".join(_adapters(record))
        where = (method_of(settings), "" if settings["ratio"] is None else f"{settings['ratio']:g}", data)
        for group, values in record["measured"].items():
            if not any(name in values for name in section.columns.values()):
                continue
            count, states = values.get("n", values.get("subwords", "")), values.get("states each")
            shown = [_shown(values, name, section.error(name)) for name in section.columns.values()]
            held = "" if states is None else f"{states:.1f}"
            base = " ".join(filter(None, (settings["base"], settings.get("dtype"))))
            rows.append((*where, group, str(count), held, *shown, base, made_with, str(record["commit"])[:7]))
    return _rows(("method", "ratio", "data", "group", "n", "states", *section.columns, "base", "adapters", "commit"), rows)


def _paired(section: Section, records: Sequence[Record]) -> list[str]:
    rows = []
    for found in differences(records):
        settings = found.other["settings"]
        shown = _shown({section.single: found.mean, "error": found.error}, section.single, "error")
        signed = shown if shown.startswith("-") else f"+{shown}"
        ratio, where = f"{found.dodo['settings']['ratio']:g}", (_data_of(settings), found.group, str(found.n))
        adapters = [" ".join(_adapters(record)) for record in (found.other, found.dodo)]
        rows.append((method_of(settings), ratio, *where, signed, *adapters))
    return _rows(("method", "ratio", "data", "group", "n", section.single, "adapters", "Dodo's"), rows) if rows else []


def _data_of(settings: dict[str, Any]) -> str:
    names = settings["data"]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} files"


def method_of(settings: dict[str, Any]) -> str:
    """The method, and what share of the states it holds as whole tokens where that is not the paper's half."""
    share = settings.get("share of whole tokens")
    return f"{settings['method']}, {share:g} whole" if share not in (None, 0.5) else str(settings["method"])


def _adapters(record: Record) -> tuple[str, ...]:
    """Name and fingerprint of the adapters that a record is of; nothing where none play a part."""
    settings = record["settings"]
    if settings["method"] in _OF_THE_BASE or "versions of the peer" in record:
        return ()
    return settings.get("model") or settings["adapters"], str(settings["adapter fingerprint"])[:8]


def _shown(values: dict[str, Any], name: str, error: str) -> str:
    value, spread = values.get(name), values.get(error)
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    digits = 3 if abs(value) < 2 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]


# -- figures


def draw_passage(dodo: "Dodo", text: str, folder: Path, *, title: str, ratio: float = 10.0) -> Path:
    """Figure 7: a text, its tokens shaded by score, its nuggets on green.

    Args:
        dodo: whose scorer is shown.
        text: about a page at most.
        folder: of the figures; it is made.
        title: above the text.
        ratio: tokens per nugget.

    Raises:
        InputError: see `inspect_text` and `to_png`.
    """
    from dodo.inspection import inspect_text
    from dodo.inspection_png import to_png

    picture = to_png(inspect_text(dodo, text, ratio=ratio, use="text"), title=title)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / PASSAGE
    path.write_bytes(picture)
    return path


def write_figures(results: dict[str, list[Record]], folder: Path) -> list[Path]:
    """Figure 4's boxes, Figure 5's bars, and quality beside states held; those that the records have numbers for.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("figures need matplotlib: pip install 'dodo-lm[plot]'") from None
    drawers: dict[str, tuple[str, Callable[[Any, Sequence[Record]], bool]]] = {
        "autoencoding.boxes": ("autoencoding", _boxes),
        "autoencoding.states": ("autoencoding", lambda axes, records: _states(axes, records, "bleu", "BLEU")),
        "squad.states": ("squad", lambda axes, records: _states(axes, records, "accuracy", "share right")),
        "summarization.states": ("summarization", lambda axes, records: _states(axes, records, "rougeL", "ROUGE-L")),
        "delimiters.bars": ("delimiters", _bars),
    }
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, (task, draw) in drawers.items():
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        if draw(figure.subplots(), results.get(task, [])):
            made.append(folder / f"{name}.png")
            figure.savefig(made[-1], dpi=110, metadata={"Software": None})
    return made


def _boxes(axes: Any, records: Sequence[Record]) -> bool:
    """BLEU of single texts by length, for each ratio of Dodo. Figure 4."""
    found = [(r["settings"]["ratio"], r["each"]) for r in records if r["settings"]["method"] == "dodo" and r.get("each")]
    groups = list(dict.fromkeys(group for _, each in found for group in each))
    for i, (ratio, each) in enumerate(found):
        here = [each.get(group, []) for group in groups]
        places = [g + (i + 0.5) / len(found) * 0.8 - 0.4 for g in range(len(groups))]
        color = f"C{i}"
        axes.boxplot(
            here, positions=places, widths=0.6 / len(found), patch_artist=True, boxprops={"facecolor": color, "alpha": 0.5},
            medianprops={"color": "black"}, flierprops={"markersize": 3},
        )  # fmt: skip
        axes.plot([], [], color=color, linewidth=6, alpha=0.5, label=f"r = {ratio:g}")
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("BLEU of each text")
    if found:
        axes.legend()
    return bool(found)


def _states(axes: Any, records: Sequence[Record], value: str, title: str) -> bool:
    """Quality against states held, a line for each method and group; and for each set of adapters and data that it has."""
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    sets: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    data: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for record in records:
        sets[record["settings"]["method"]].add(_adapters(record)[1:])
        data[record["settings"]["method"]].add(tuple(record["settings"]["data"]))
    for record in records:
        method = record["settings"]["method"]
        name = method if len(sets[method]) == 1 else f"{method} of {_adapters(record)[0]}"
        if len(data[method]) > 1:
            name += f" on {', '.join(record['settings']['data'])}"
        for group, values in record["measured"].items():
            if value in values and values.get("states each") is not None:
                error = values.get(SECTIONS[record["settings"]["task"]].error(value)) or 0.0
                lines[name, group].append((values["states each"], values[value], error))
    for i, ((method, group), points) in enumerate(lines.items()):
        x, y, error = zip(*sorted(points), strict=True)
        label = method if group == "all" else f"{method}, {group}"
        look = {"color": f"C{i % 10}", "marker": "osD^v"[i // 10 % 5], "linestyle": ("-", "--", ":")[i // 10 % 3]}
        axes.errorbar(x, y, yerr=error, markersize=4, capsize=2, label=label, **look)
    axes.set_xlabel("states held of a document, on average")
    axes.set_ylabel(title)
    if lines:  # beside the lines, with room for a dozen methods and more
        axes.set_xscale("symlog", linthresh=10)  # no states at all, and hundreds
        axes.xaxis.set_major_formatter("{x:g}")
        legend = axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
        labels = [text.get_text() for text in legend.get_texts()]
        axes.figure.set_size_inches(5.6 + 0.075 * max(map(len, labels)), max(3.6, 0.6 + 0.2 * len(labels)))
    return bool(lines)


def _bars(axes: Any, records: Sequence[Record]) -> bool:
    """Shares of kinds of tokens among nuggets and in the texts. Figure 5."""
    mark = ": share of nuggets"
    for record in records:
        if record["settings"]["method"] != "dodo":
            continue
        values = list(record["measured"].values())[-1]
        kinds = [name.removesuffix(mark) for name in values if name.endswith(mark) and name.startswith(("'", '"'))]
        for i, what in enumerate(("nuggets", "text")):
            shares = [values[f"{kind}: share of {what}"] for kind in kinds]
            axes.bar([k + 0.4 * i for k in range(len(kinds))], shares, 0.4, label=what)
        axes.set_xticks([k + 0.2 for k in range(len(kinds))], [kind.replace("$", r"\$") for kind in kinds])
        axes.set_ylabel("share of tokens")
        axes.legend()
        return True
    return False
