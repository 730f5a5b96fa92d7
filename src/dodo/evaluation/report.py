"""The page of results: a table for each task out of the records, the paper's numbers beside them, and the figures.

Paper: Tables 1, 3, 4 and 6, Figures 4, 5 and 7. No measurement of ours is typed. The paper's numbers are, below, with the model
that they are of.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dodo.errors import InputError
from dodo.evaluation.paired import differences, of_dodo
from dodo.evaluation.record import short_commit

__all__ = ["Section", "method_of", "read_harness", "read_results", "write_figures", "write_report"]

Record = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """What the page says of one task.

    title: heading. columns: values of a group that are shown, by heading; their errors stand behind `error`. error: of a value's
    name, the name of its standard error. paper: rows of the paper, each with the model, or the reason why there are none.
    apart: why results differ from them. ours: what is to be said of the project's own records besides. single: what the values of
    single items are, by which methods are compared item by item. machine: whether rows tell what they were measured on.
    """

    title: str
    columns: dict[str, str]
    paper: tuple[tuple[str, ...], ...] = ()
    head: tuple[str, ...] = ()
    apart: str = ""
    ours: str = ""
    single: str = "BLEU"
    machine: bool = False
    error: Callable[[str], str] = "{} standard error".format


PUBLISHED = "smollm2-135m"
"""The base of the project's own records, about which alone a section's `ours` speaks."""
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
        "LLaMA-7B.",
        ours="Standard errors of 2 and more: these are all texts of so many tokens that are held out, and at high "
        "ratios a few come back whole and most do not. ICAE learned from 78 thousand document tokens, what ships from 6.7 "
        f"million. {_SMALL}",
    ),
    "multilingual": Section(
        "Other languages (Table 6)",
        {
            "BLEU": "bleu",
            "tokens right": "token accuracy",
            "perplexity": "perplexity",
            "numbers": "numbers rebuilt",
            "names": "names rebuilt",
        },
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
        ours="The paper's documents are of RedPajama, at r = 10; ours are at r = 5, where English texts of this length come "
        "back by half. SmolLM2 knows mostly English. Few texts of each language were rebuilt, for the time that it takes, so "
        f"standard errors are above 2 where much comes back. {_SMALL}",
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
        apart="Standard errors are of texts that are hard or easy for all methods alike: all read the same ones. Item by item, "
        "nats per subword of segments, of which less is better; the segments of a text count together in their errors.",
        ours=f"Segments of 64 tokens, whose own earlier tokens every method sees beside its states. {_SMALL}",
        single="nats",
    ),
    "endless": Section(
        "Endless text",
        {"perplexity": "perplexity"},
        apart="Beyond the paper. Standard errors take the pieces of one text for independent. Past its "
        "window of 8,192 tokens the base is lost, and its errors are large with it. Item by item, nats per token of pieces, of "
        "which less is better.",
        single="nats",
    ),
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
        apart="Shares, not per cent.",
        ours="The paper's LLaMA-2-7B-chat was not fine-tuned on questions; our adapters were, the base "
        "that peers and Full have was not. Of 600 questions a standard error is about 2.0 points at most, of 300 2.9, of 200 "
        f"3.5; more of them were left out for the time that they take. {_SMALL}",
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
        ours="What ships is not fine-tuned on summaries; smollm2-135m-summaries is, in 200 steps of an article each, and over "
        f"the same, whole, smollm2-135m-summaries-full; so few and short articles teach little. {_SMALL}",
        single="ROUGE-L",
    ),
    "delimiters": Section(
        "Which tokens become nuggets (Figure 5)",
        {"nuggets": "nuggets", "ten most frequent": "most frequent 10: share of nuggets"},
        apart="In the paper ten kinds of tokens, mostly delimiters of clauses, make up 95% of the nuggets at r = 10. Our "
        "scorer was taught what it costs to lose a token, and nuggets are spread so that none is far from one.",
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
            "peak memory, bytes": "peak memory, bytes",
            "of the whole": "whole: peak memory, bytes",
            "sooner from questions": "questions from which it is sooner",
            "cache kept": "the same, cache kept",
            "sooner from tokens": "sooner from tokens",
        },
        apart="Seconds are without loading the model. Dodo and the base begin with token ids; a peer is another process, is "
        "given the text, and splits it into tokens itself. An answer has 64 tokens. Sooner than reading the whole text: "
        "from so many questions on, and, of the lengths measured, from so many tokens on at one question. Memory is the "
        "most that the process held while it compressed and answered, model and all; of a peer its own process, of the "
        "whole text ours without its cache kept. The whole text has transformers' own cache, which is copied for every token, "
        "Dodo's has room for those to come. The paper gives no numbers.",
        machine=True,
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
        apart="The paper searches with its autoregressive LM, here it is the compressor. A document takes minutes, so there are "
        "few, and standard errors are large.",
        ours=f"What ships never learned to go on with a text, so perplexity is high before and after. {_SMALL}",
    ),
    "highlight": Section(
        "A text and its nuggets (Figure 7)",
        {
            "nuggets": "nuggets",
            "punctuation among nuggets": "punctuation: share of nuggets",
            "in the text": "punctuation: share of text",
        },
        apart="On green: the nuggets. Darker: higher score. In the paper mostly punctuation and the ends of phrases. Our scorer "
        "was taught what it costs to lose a token, and nuggets are spread so that none is far from one.",
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
            if task in SECTIONS:
                record["settings"]["method"], record["settings"]["ratio"], record["measured"]
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


def read_harness(folder: Path) -> dict[str, Record]:
    """What lm-evaluation-harness wrote into `folder/lm-eval`, by file name.

    Raises:
        InputError: a file is not of the harness.
    """
    found = {}
    for path in sorted((folder / "lm-eval").glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            found[path.stem]["results"], found[path.stem]["config"]["model_args"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path} was not written by lm-evaluation-harness") from None
    return found


def write_report(
    results: dict[str, list[Record]], page: Path, figures: Sequence[Path] = (), harness: dict[str, Record] | None = None
) -> None:
    """The page, as Markdown.

    Args:
        results: see `read_results`.
        page: to be written; its folder is made.
        figures: pictures to show, by the task that their name begins with; beside the page or below it.
        harness: see `read_harness`.
    """
    lines = ["# Results", "", "Written by `dodo report` out of the records of `dodo evaluate`. ± is one standard error.", ""]
    if any(short_commit(record["commit"]).endswith("+") for records in results.values() for record in records):
        lines[2] += " A commit with + had changes that were not committed."
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
        own = section.ours if all(_of_published(record, records) for record in records) else ""
        lines += [" ".join(filter(None, (section.apart, own))), ""] if section.apart or own else []
        lines += [_PEERS, ""] if any("versions of the peer" in record for record in records) else []
    lines += _of_harness(harness)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines), encoding="utf-8")


def _of_published(record: Record, records: Sequence[Record]) -> bool:
    """Whether a record is of the published base, from wherever it was loaded."""
    known = {r["settings"].get("base fingerprint") for r in records if r["settings"]["base"] == PUBLISHED}
    return record["settings"]["base"] == PUBLISHED or record["settings"].get("base fingerprint") in known - {None}


def _of_harness(found: dict[str, Record] | None) -> list[str]:
    rows = []
    for record in (found or {}).values():
        config, counts = record["config"], record.get("n-samples", {})
        given = config["model_args"]
        how = given if isinstance(given, str) else ", ".join(f"{name}={value}" for name, value in dict(given).items())
        made_with = str(config.get("adapter_fingerprint") or "")[:8]
        for task, values in record["results"].items():
            for name, value in values.items():
                metric, _, kind = name.partition(",")
                if not isinstance(value, float) or not kind or metric.endswith("_stderr"):
                    continue
                shown = _shown({metric: value, "error": values.get(f"{metric}_stderr,{kind}")}, metric, "error")
                count = str(counts.get(task, {}).get("effective", ""))
                rows.append((task, metric, shown, count, config.get("model", ""), how, made_with))
    if not rows:
        return []
    head = ("task", "metric", "value", "n", "model", "settings", "adapters")
    return ["## lm-evaluation-harness", "", *_rows(head, rows), "", "Dodo as its model; beyond the paper.", ""]


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
            machine = [_machine_of(record)] if section.machine else []
            rows.append((*where, group, str(count), held, *shown, base, made_with, *machine, short_commit(record["commit"])))
    last = (*(["machine"] if section.machine else []), "commit")
    return _rows(("method", "ratio", "data", "group", "n", "states", *section.columns, "base", "adapters", *last), rows)


def _machine_of(record: Record) -> str:
    hardware = record.get("hardware") or {}
    return f"{hardware.get('gpu') or hardware.get('cpu')}, {hardware.get('threads')} threads" if hardware else ""


def _paired(section: Section, records: Sequence[Record]) -> list[str]:
    rows = []
    for found in differences(records):
        settings = found.other["settings"]
        shown = _shown({section.single: found.mean, "error": found.error}, section.single, "error")
        signed = shown if shown.startswith("-") else f"+{shown}"
        ratio, where = f"{found.dodo['settings']['ratio']:g}", (_data_of(settings), found.group, str(found.n))
        adapters = [" ".join(_adapters(record)) for record in (found.other, found.dodo)]
        adapters[1] += _split_of(found.dodo["settings"])
        rows.append((method_of(settings), ratio, *where, signed, *adapters))
    return _rows(("method", "ratio", "data", "group", "n", section.single, "adapters", "Dodo's"), rows) if rows else []


def _data_of(settings: dict[str, Any]) -> str:
    names = settings["data"]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} files"


def method_of(settings: dict[str, Any]) -> str:
    """The method, and what share of the states it holds as whole tokens where that is not the paper's half."""
    return f"{settings['method']}{_split_of(settings)}"


def _split_of(settings: dict[str, Any]) -> str:
    share = settings.get("share of whole tokens")
    return f", {share:g} whole" if share not in (None, 0.5) else ""


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


def write_figures(results: dict[str, list[Record]], folder: Path) -> list[Path]:
    """Figure 4's boxes, Figure 5's bars, Figure 7's text, and quality beside states held; those that there are records for.

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
        "perplexity.states": ("perplexity", _perplexities),
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
    shown = [example for record in results.get("highlight", []) for example in record.get("examples", [])]
    if shown:
        from dodo.evaluation.highlight import inspection_in
        from dodo.inspection_png import to_png

        made.append(folder / "highlight.text.png")
        made[-1].write_bytes(to_png(inspection_in(shown[0]), title=shown[0]["key"]))
    return made


def _boxes(axes: Any, records: Sequence[Record]) -> bool:
    """BLEU of single texts by length, for each ratio of Dodo, a panel for each data set and set of trained adapters. Figure 4."""
    found: dict[str, dict[float, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(dict))
    for record in of_dodo([record for record in records if record.get("each")]):
        title = ", ".join([_data_of(record["settings"]), " ".join(_adapters(record))])
        found[title][record["settings"]["ratio"]] |= record["each"]
    if not found:
        return False
    ratios = sorted({ratio for by_ratio in found.values() for ratio in by_ratio})
    figure = axes.figure
    axes.remove()
    figure.set_size_inches(7, 3.2 * len(found))
    for panel, (data, by_ratio) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found.items(), strict=True):
        groups = sorted({group for each in by_ratio.values() for group in each}, key=lambda group: (len(group), group))
        for i, (ratio, each) in enumerate(sorted(by_ratio.items())):
            color, width = f"C{ratios.index(ratio)}", 0.8 / len(by_ratio)
            places = [g + (i + 0.5) * width - 0.4 for g in range(len(groups))]
            panel.boxplot(
                [each.get(group, []) for group in groups], positions=places, widths=0.75 * width, patch_artist=True,
                boxprops={"facecolor": color, "alpha": 0.5}, medianprops={"color": "black"}, flierprops={"markersize": 3},
            )  # fmt: skip
            panel.plot([], [], color=color, linewidth=6, alpha=0.5, label=f"r = {ratio:g}")
        panel.set_xticks(range(len(groups)), groups)
        panel.set_ylabel("BLEU of each text")
        panel.set_title(data, fontsize="medium")
        panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return True


def _perplexities(axes: Any, records: Sequence[Record]) -> bool:
    """Of all methods with half of the states whole, as in Table 1."""
    mine = [r for r in records if r["settings"].get("share of whole tokens") in (None, 0.5)]
    drawn = _states(axes, mine, "subword perplexity", "subword perplexity", joined=True)
    if drawn:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({int(group.split()[0]) for record in mine for group in record["measured"]}))
        axes.xaxis.set_major_formatter("{x:g}")
    return drawn


def _states(axes: Any, records: Sequence[Record], value: str, title: str, *, joined: bool = False) -> bool:
    """Quality against states held, a line for each method and group, or one through all groups (`joined`); and for each set of
    adapters and data that it has."""
    lines: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    sets: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    data: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for record in records:
        sets[record["settings"]["method"]].add(_adapters(record))
        data[record["settings"]["method"]].add(tuple(record["settings"]["data"]))
    ratios: dict[str, set[float]] = defaultdict(set)
    for record in records:
        ratios[record["settings"]["method"]].add(record["settings"]["ratio"])
    for record in records:
        method = record["settings"]["method"]
        name = method
        if joined and len(ratios[method]) > 1:
            name += f", r = {record['settings']['ratio']:g}"
        if len(sets[method]) > 1:  # told apart by their fingerprints, where names do not
            names = {name for name, *_ in sets[method]}
            name += f" of {' '.join(_adapters(record)[: 1 if len(names) == len(sets[method]) else 2])}"
        if len(data[method]) > 1:
            name += f" on {', '.join(record['settings']['data'])}"
        for group, values in record["measured"].items():
            if value in values and values.get("states each") is not None:
                error = values.get(SECTIONS[record["settings"]["task"]].error(value)) or 0.0
                lines[name, "all" if joined else group].append((values["states each"], values[value], error))
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
