"""A measurement from model to file: items in batches, what is done kept beside the result so that a stopped one goes on."""

import dataclasses
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dodo.base import held_in
from dodo.config import TrainedAs
from dodo.data.reading import resolve
from dodo.errors import DodoWarning, InputError, WindowError
from dodo.evaluation.efficiency import Efficiency
from dodo.evaluation.endless import Endless, make_reader
from dodo.evaluation.highlight import Highlight
from dodo.evaluation.language_models import make_language_model
from dodo.evaluation.methods import make_method
from dodo.evaluation.names import METHODS_OF, WITHOUT_RATIO
from dodo.evaluation.optimal import OptimalSelection
from dodo.evaluation.peak import forget_peak, peak
from dodo.evaluation.peers import Peer
from dodo.evaluation.perplexity import STATES, Perplexity
from dodo.evaluation.record import about_machine, commit, today, write_json
from dodo.evaluation.scoring import check_installed
from dodo.evaluation.tasks import OF_LENGTHS, TASKS, Item, Task, hash_of
from dodo.model import Dodo
from dodo.thresholds import Pace

__all__ = ["evaluate"]


def evaluate(
    dodo: Dodo,
    task: str,
    *,
    method: str = "dodo",
    ratio: float | None = None,
    sources: Sequence[str],
    lengths: Sequence[int] = (),
    states: Sequence[int] = STATES,
    segment: int = 16,
    share: float = 0.5,
    limit: int | None = None,
    seed: int = 0,
    batch: int = 8,
    out: Path,
    examples: int = 0,
    model: str = "",
    command: str = "",
    peers_python: Path | None = None,
    replace: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure one method on one task, and write the record.

    Args:
        dodo: base and adapters.
        task, method: see `names.METHODS_OF`.
        ratio: tokens per nugget; None: the configured one, for perplexity and endless the paper's 10.
        sources: files, patterns or `hf:` ids.
        lengths: of the texts of autoencoding, delimiters and efficiency, in tokens; none: the task's own. In squad, of the
            documents that a paragraph stands in; none: the paragraph alone.
        states: held before each segment, in perplexity; in endless the last of them is held at most.
        segment: tokens scored at a time, in perplexity.
        share: of the states that are whole tokens, in perplexity and endless.
        limit: items (of each length or language, if there are several), tokens in perplexity, tokens of each text in endless;
            None: all.
        seed: of which items, and in what order.
        batch: items at a time.
        out: the record, a JSON file. Beside it, until the end, `*.part.jsonl` holds what is done.
        examples: how many documents and what was made of them the record shows; mind the data's licence.
        model: the adapters' name or folder, for the record.
        command: what a person types to do it again.
        peers_python: of the environment that peers run in; see `peers.find_python`.
        replace: a record of another question that stands at `out`; one of the same question is always replaced.
        progress: told the items done and the items in all.

    Raises:
        InputError: no such task or method, data that is not of the task, a record that is not to be replaced, or a package that
            scoring needs is missing.
        WindowError: an item does not fit the base's window; it is named, and what was done before it is kept.
    """
    if task not in METHODS_OF:
        raise InputError(f"there is no task {task!r}; tasks are {', '.join(METHODS_OF)}")
    check_installed()
    measuring: Any
    how: Any
    if task == Perplexity.name:
        ratio = 10.0 if ratio is None else ratio
        how = make_language_model(method, dodo, ratio, share)
        measuring = Perplexity(dodo, states=states, segment=segment, ratio=ratio, share=share)
        items = measuring.items(sources, limit, seed)
    elif task == Endless.name:
        ratio = 10.0 if ratio is None else ratio
        how, measuring = make_reader(method, dodo, ratio, states[-1], share), Endless(dodo)
        items = measuring.items(sources, limit, seed)
    else:
        ratio = dodo.config.ratio if ratio is None else ratio
        measuring = _measuring(task, lengths)
        how = make_method(method, dodo, ratio, use=measuring.use, seed=seed, peers_python=peers_python)
        items = measuring.items(sources, dodo.tokenizer, limit, seed)
    _tell_of_others(dodo, task, method)
    if not items:
        raise InputError(f"there is nothing to measure in {', '.join(sources)}: it has no records")
    if twice := next((key for key, count in Counter(item.key for item in items).items() if count > 1), None):
        raise InputError(f"two records have the id {twice!r}; each needs one of its own, or none")
    settings = {
        "task": task,
        "method": method,
        "model": _name_of(model),
        "base": dodo.config.base,
        "base fingerprint": dodo.fingerprint.base,
        "adapters": "trained" if dodo.is_trained else "fresh",
        "adapter fingerprint": dodo.fingerprint.adapter,
        "ratio": None if method in WITHOUT_RATIO else ratio,
        "selection": dodo.config.selection,
        "dtype": held_in(dodo.compressor.base),
        "data": [Path(source).name for source in resolve(sources)],
        "first items": _first(items),
        "items": hash_of([_told(item) for item in items]),
        "lengths": list(getattr(measuring, "lengths", ())) or None,
        "limit": limit,
        "seed": seed,
    }
    if dodo.config.by_use and task not in (Perplexity.name, Endless.name):
        settings["compressed for"] = measuring.use
    if task == Perplexity.name:
        threshold = getattr(how, "threshold", None)
        settings |= {
            "states": list(measuring.states),
            "segment": segment,
            "share of whole tokens": None if method in ("full", "theta") else share,
            "keep_first": dodo.config.keep_first,
            "whole history at ratio": ratio,
            "whole histories from": measuring.whole_from,
            "threshold": "follows the text" if isinstance(threshold, Pace) else threshold,
        }
    if task == Endless.name:
        settings |= {"states": None if method == "full" else states[-1], "keep_first": dodo.config.keep_first}
        settings |= {"share of whole tokens": share if method == "dodo" else None}
    if task in (Perplexity.name, Endless.name) and method in ("dodo", "threshold") and dodo.thresholds is not None:
        settings["thresholds"] = hash_of(dodo.thresholds.to_json())
    if not replace:
        _refuse_another(out, settings)
    of_code = commit()  # before anything is measured: the repository may go on meanwhile
    part = out.with_suffix(".part.jsonl")
    made, seconds, before = _done_before(part, settings)
    if task in (Efficiency.name, OptimalSelection.name):  # an item takes minutes
        batch = 1
    _forget_peak(how, dodo)
    # so that little of a batch is padding, and what does not fit is found at once
    by_length = sorted(items, key=lambda item: len(item.document), reverse=True)
    for begin in range(0, len(items), batch):
        some = [item for item in by_length[begin : begin + batch] if item.key not in made]
        if some:
            start = time.perf_counter()
            for item, result in zip(some, _run(measuring, how, some), strict=True):
                made[item.key] = result
            seconds += time.perf_counter() - start
            _keep(part, settings, {item.key: made[item.key] for item in some}, seconds, _highest(before, _peak(how, dodo)))
        if progress is not None:
            progress(min(begin + batch, len(items)), len(items))
    record = {
        "name": out.stem,
        "date": today(),
        "commit": of_code,
        "command": command,
        "settings": settings,
        "config": dataclasses.asdict(dodo.config),
        "measured": measuring.measure(items, made),
        "seconds": round(seconds, 1),
        "peak memory, bytes": _highest(before, _peak(how, dodo)),
        **about_machine(getattr(how, "versions", None)),
        "each": measuring.each(items, made),
        **({"each of": measuring.each_of(items, made)} if task == Perplexity.name else {}),
        "examples": [_example(item, made[item.key]) for item in items[:examples]],
    }
    write_json(out, record)
    part.unlink(missing_ok=True)
    return record


def _run(measuring: Any, how: Any, some: Sequence[Item]) -> list[dict[str, Any]]:
    """What the method made of each item.

    Raises:
        WindowError: one does not fit; which, and what to do.
    """
    try:
        return measuring.run(how, some)
    except WindowError as error:
        if len(some) == 1:
            told = "take it out of the data, for all methods alike, or measure on a base with a larger window"
            raise WindowError(f"item {some[0].key!r} can't be measured: {error}; {told}") from None
    return [made for item in some for made in _run(measuring, how, [item])]


def _tell_of_others(dodo: Dodo, task: str, method: str) -> None:
    """Warn where a method measures adapters that learned to be something else."""
    of_texts: dict[str, TrainedAs] = {"stride": "compressor", "random": "compressor", "icae": "icae", "theta": "full"}
    wanted: TrainedAs | None = of_texts.get(method)  # where Dodo itself compresses or writes, it tells by itself
    if task == Perplexity.name:
        wanted = {"full": None, "theta": "full", "compressive": "compressive"}.get(method, "autoregressive")
    if wanted is not None and (told := dodo.trained_otherwise(wanted)):
        warnings.warn(told, DodoWarning, stacklevel=3)


def _refuse_another(out: Path, settings: dict[str, Any]) -> None:
    """A record's usual name does not say everything that was asked; what it leaves out must not differ."""
    if not out.is_file():
        return
    try:
        before = json.loads(out.read_text(encoding="utf-8"))["settings"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise InputError(f"{out} is there and is no record; move it, or choose another --out") from None
    of_model, of_data = ("base", "base fingerprint", "dtype"), ("data", "lengths", "limit", "seed")
    of_states = ("states", "segment", "share of whole tokens", "keep_first", "whole history at ratio")
    for name in (*of_model, *of_data, *of_states, "items"):
        if name in before and before[name] != settings.get(name):
            told = "other items" if name == "items" else f"{name} {before[name]}, not {settings.get(name)}"
            raise InputError(f"{out} is of a measurement with {told}; give this one a name of its own with --out")


def _name_of(model: str) -> str | None:
    """Of a run's folder that of the run, not `last` or `best` in it."""
    path = Path(model)
    return (path.parent if path.name in ("last", "best") else path).name or None


def _first(items: Sequence[Item]) -> dict[str, str]:
    """A short hash of the first item of each group: draws from the same data agree in it, whatever their limits."""
    firsts = {item.group: item for item in reversed(items)}
    return {group: hash_of(_told(item)) for group, item in sorted(firsts.items())}


def _told(item: Item) -> list[Any]:
    return [item.key, item.group, item.source, item.document, item.question, item.answers]


def _forget_peak(how: Any, dodo: Dodo) -> None:
    how.forget_peak() if isinstance(how, Peer) else forget_peak(dodo.device)


def _peak(how: Any, dodo: Dodo) -> int | None:
    """Of the process that measured, model and all; of a peer's its own."""
    return how.peak() if isinstance(how, Peer) else peak(dodo.device)


def _measuring(task: str, lengths: Sequence[int]) -> Task:
    if task in OF_LENGTHS or task == Efficiency.name:
        kind: Any = OF_LENGTHS.get(task, Efficiency)
        return kind(lengths) if lengths else kind()
    alone: dict[str, type[Task]] = {kind.name: kind for kind in (OptimalSelection, Highlight)}
    return {**TASKS, **alone}[task]()


def _highest(*peaks: int | None) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def _done_before(part: Path, settings: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], float, int | None]:
    """What a stopped run made, its seconds, and the most memory that it held."""
    if not part.exists():
        return {}, 0.0, None
    text = part.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:  # cut off while it was written: the whole lines before it count
        part.write_text(whole, encoding="utf-8")
    lines = whole.splitlines()
    if not lines:
        part.unlink()
        return {}, 0.0, None
    try:
        before, *batches = map(json.loads, lines)
    except json.JSONDecodeError:
        raise InputError(f"{part} is damaged; delete it to begin anew") from None
    if before != settings:
        raise InputError(f"{part} is of a measurement with other settings; delete it, or choose another --out")
    made: dict[str, dict[str, Any]] = {}
    for done in batches:
        made |= done["made"]
    last: dict[str, Any] = batches[-1] if batches else {"seconds": 0.0}
    return made, last["seconds"], last.get("peak")


def _keep(part: Path, settings: dict[str, Any], made: dict[str, Any], seconds: float, peak: int | None) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    fresh = not part.exists()
    with open(part, "a", encoding="utf-8") as out:
        if fresh:
            out.write(json.dumps(settings) + "\n")
        out.write(json.dumps({"made": made, "seconds": seconds, "peak": peak}) + "\n")


def _example(item: Item, made: dict[str, Any]) -> dict[str, Any]:
    shown = {"key": item.key, "document": item.document, "question": item.question, "answers": list(item.answers) or None}
    return {name: value for name, value in {**shown, **made}.items() if value is not None}
