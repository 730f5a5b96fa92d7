"""Put the adapters of finished runs where the package ships them from, with their card and the log of their training.

    python recipes/ship.py runs/smollm2-135m runs/smollm2-135m-answers --results 'results/*-smollm2-135m-*.json'

The last run's `last/` ships; the runs before it are what it started from. Where the first run started from what ships already
(`--after src/dodo/weights/smollm2-135m`), its log and recipes come first. `--adapters` ships another set in its place, such as an
average of what the parts came to (recipes/average.py). Results must belong to the adapters that ship.
"""

import argparse
import csv
import glob
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from dodo import Dodo
from dodo.adapter_files import SHIPPED
from dodo.config import DodoConfig
from dodo.evaluation.record import short_commit
from dodo.evaluation.report import method_of

LIMIT = 25_000_000
"""Bytes of all sets that ship."""
EVERY = 100
AVERAGE = "average.json"
"""What recipes/average.py tells of a set."""
COMPRESSOR = """LoRA adapters phi (encoder) and theta (decoder), scorer and soft token: they compress a text into nuggets,
rebuild it from them, and answer questions about it (Qin et al., Dodo: Dynamic Contextual Compression for Decoder-only LMs)."""
LANGUAGE_MODEL = """LoRA adapters phi (of tokens that are kept) and theta (of all others), scorer and thresholds: an
autoregressive LM that holds its latest tokens whole and of older ones those that score above a threshold (Qin et al., Dodo:
Dynamic Contextual Compression for Decoder-only LMs, Section 2.2). For `dodo generate` and `dodo chat`."""
MEASURED = {
    COMPRESSOR: "Greedy decoding, texts not trained on; the records are in results/.",
    LANGUAGE_MODEL: """Texts not trained on; the records are in results/. Compressive and theta (Full, trained) have adapters of
their own, made on the same texts by recipes/smollm2-135m-compressive*.yaml and recipes/smollm2-135m-full*.yaml; full is the
base as it is.""",
}
LIMITS = {
    COMPRESSOR: """Rebuilt texts lose names, numbers and dates first, at high ratios and in long texts above all.
Answers have a share right that the table tells; where it is near that of nodoc, the document is hardly read.
English prose, some code. Whatever the base gets wrong with the whole text in view, it gets wrong here too.""",
    LANGUAGE_MODEL: """Trained briefly, on plain texts of at most 1,024 tokens: what it says in a conversation is a small base's,
and no better for it.
English prose, some code.""",
}

SELECTING = ("dodo", "threshold", "top-k", "stride", "random")
"""Methods that measure the adapters that ship."""
MEASURES = {
    "autoencoding": ("bleu", "bleu standard error", "n", 1),
    "multilingual": ("bleu", "bleu standard error", "n", 1),
    "squad": ("accuracy", "standard error", "n", 3),
    "summarization": ("rouge1", "rouge1 standard error", "n", 1),
    "perplexity": ("subword perplexity", "subword perplexity standard error", "subwords", 2),
}
"""Of each task: what the card tells of it, its standard error, what is counted, digits."""


@dataclass(frozen=True)
class Part:
    """A run: its name, its recipe as it ran, and its log (step, name, value), validation's names with `validation/` in front."""

    name: str
    recipe: str
    log: list[tuple[int, str, float]]

    @property
    def steps(self) -> int:
        return max(step for step, _, _ in self.log)

    @property
    def tokens(self) -> int:
        return int(max(value for _, name, value in self.log if name == "tokens"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--after", type=Path, help="what ships, where the first run started from it")
    parser.add_argument("--adapters", type=Path, help="the set that ships, if not the last run's")
    parser.add_argument("--alias", help="name that it ships under; as a rule that of --after, or else smollm2-135m")
    parser.add_argument("--results", default="", help="pattern of records made with these adapters")
    parser.add_argument("--hardware", required=True, help="what the runs were on")
    given = parser.parse_args()

    if not given.runs and not given.after:
        raise SystemExit("name the runs, or with --after what ships already, whose card is then written anew")
    adapters = given.adapters or (given.runs[-1] / "last" if given.runs else given.after)
    dodo = Dodo.from_pretrained(adapters)
    records = [json.loads(Path(path).read_text(encoding="utf-8")) for path in sorted(glob.glob(given.results))]
    for record in records:
        made_with = record["settings"]["adapter fingerprint"]
        if made_with != dodo.fingerprint.adapter and record["settings"]["method"] in SELECTING:
            raise SystemExit(f"{record['name']} was measured with adapters {made_with}, not {dodo.fingerprint.adapter}")
    earlier = _shipped(given.after) if given.after else []
    parts = [*(part for part in earlier if part.name not in {run.name for run in given.runs}), *map(_run, given.runs)]
    given.alias = given.alias or (given.after.resolve().name if given.after else "smollm2-135m")
    target = SHIPPED / given.alias
    with tempfile.TemporaryDirectory(dir=SHIPPED.parent) as scratch:
        made = Path(scratch) / given.alias
        shutil.copytree(adapters, made, ignore=shutil.ignore_patterns("recipe.yaml"))
        for part in parts:
            (made / f"recipe-{part.name}.yaml").write_text(part.recipe, encoding="utf-8")
        _write_log(parts, made / "training.csv")
        average = json.loads((made / AVERAGE).read_text(encoding="utf-8")) if (made / AVERAGE).exists() else []
        (made / "README.md").write_text(_card(dodo, parts, records, given.hardware, average), encoding="utf-8")
        others = [folder for folder in SHIPPED.iterdir() if folder.is_dir() and folder.name != given.alias]
        size = sum(path.stat().st_size for folder in (made, *others) for path in folder.rglob("*") if path.is_file())
        if size > LIMIT:
            raise SystemExit(f"{size:,} bytes in all are more than the {LIMIT:,} that may ship")
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        made.rename(target)
    print(f"{target}: {size:,} bytes in all, adapter {dodo.fingerprint.adapter}")


def _run(folder: Path) -> Part:
    """Training's values every so many steps and those of its end, and validation's."""
    train = _rows(folder / "train.csv")
    end = max(step for step, _, _ in train)
    log = [row for row in train if row[0] % EVERY == 0 or (row[0] == end and row[1] == "tokens")]
    if (folder / "validation.csv").exists():  # it may have ended before its first
        log += [(step, f"validation/{name}", value) for step, name, value in _rows(folder / "validation.csv")]
    return Part(folder.name, (folder / "recipe.yaml").read_text(encoding="utf-8"), sorted(log))


def _shipped(folder: Path) -> list[Part]:
    with open(folder / "training.csv", encoding="utf-8") as file:
        rows = [(row["run"], int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
    return [
        Part(
            run,
            (folder / f"recipe-{run}.yaml").read_text(encoding="utf-8"),
            [row[1:] for row in rows if row[0] == run],
        )
        for run in dict.fromkeys(row[0] for row in rows)
    ]


def _rows(path: Path) -> list[tuple[int, str, float]]:
    with open(path, encoding="utf-8") as file:
        return [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]


def _write_log(parts: list[Part], out: Path) -> None:
    with open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "name", "value"])
        for part in parts:
            writer.writerows((part.name, step, name, f"{value:.7g}") for step, name, value in part.log)


def _runs(config: DodoConfig, learned: list[dict]) -> str:
    """Whether the setting `runs` is on, which can be changed without training, and how many of the sets learned with it."""
    if not config.runs:
        return ""
    with_it = sum(bool(recipe["config"].get("runs")) for recipe in learned)
    if with_it == len(learned):
        return ", for the text by runs"
    return ", for the text by runs" + (f" ({with_it} of {len(learned)} parts learned so)" if with_it else " (set after training)")


def _averaging(average: list[dict]) -> str:
    sets = " ".join(f"{one['set']}={one['share']:g}" for one in average)
    return f"python recipes/average.py {sets} --out runs/average/last"


def _card(dodo: Dodo, parts: list[Part], records: list[dict], hardware: str, average: list[dict]) -> str:
    config = dodo.config
    low, high = config.trained_ratios or (1, 1)
    ran = [yaml.safe_load(part.recipe) for part in parts]
    of_part = dict(zip((part.name for part in parts), ran, strict=True))
    learned = [of_part[name] for one in average if (name := Path(one["set"]).parent.name) in of_part] or [ran[-1]]
    kind = LANGUAGE_MODEL if ran[-1]["mixture"]["autoregressive"] else COMPRESSOR
    questions = ", and SQuAD v1.1 train" if any(recipe["mixture"]["question"] for recipe in ran) else ""
    lines = [
        f"# Dodo adapters for {config.base}",
        "",
        kind,
        "",
        f"- base: {config.base}, weights {config.base_fingerprint}; adapter {dodo.fingerprint.adapter}",
        f"- LoRA rank {config.encoder.rank} on {config.encoder.targets}",
        f"- selection: {config.selection}{_runs(config, learned)}; positions: {config.positions}",
        f"- ratios drawn in training: {low:g} to {high:g}",
        *([f"- LoRA matrices: the average of what {len(average)} parts came to (below)"] if average else []),
        f"- trained on {hardware}",
        f"- texts: documents whose licence permits commercial use (Wikipedia, books, code, web){questions}",
        "- not trained on any evaluation set",
        "- `training.csv` is the log, `recipe-*.yaml` are the recipes as they ran",
        "",
        "| run | steps | of | document tokens |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {part.name} | {part.steps:,} | {recipe['running']['steps']:,} | {part.tokens:,} |"
            for part, recipe in zip(parts, ran, strict=True)
        ),
        "",
        "Made by",
        "",
        "```sh",
        *(f"dodo train recipes/{part.name}.yaml --out runs/{part.name}" for part in parts),
        *([_averaging(average)] if average else []),
        "```",
        "",
        "where a recipe's `start` is the folder that ships, it was what shipped then (recipes/README.md).",
        "",
        "## Curve",
        "",
        "Validation by the scorer's selection: loss in nats per token (teacher-forced) and BLEU of held-out texts; `question` is "
        "the loss of answers to questions held back.",
        "",
        *_curve(parts),
        "",
    ]
    if records:
        lines += [
            "## Measured",
            "",
            MEASURED[kind],
            "",
            *_measured(records),
            "",
        ]
    lines += [
        "## Limits",
        "",
        LIMITS[kind],
    ]
    return "\n".join(lines) + "\n"


def _curve(parts: list[Part]) -> list[str]:
    found: dict[tuple[str, int], dict[str, float]] = {}
    for part in parts:
        for step, name, value in part.log:
            if name.startswith("validation/"):
                found.setdefault((part.name, step), {})[name.removeprefix("validation/")] = value
    every = dict.fromkeys(name for values in found.values() for name in values)
    names = [n for n in every if (n.startswith("loss/") and n.endswith("/scorer")) or n.startswith("bleu/")]
    shown = [name.removesuffix("/scorer").replace("loss/", "") for name in names]
    lines = [f"| run | step | {' | '.join(shown)} |", f"| --- | ---: |{' ---: |' * len(names)}"]
    for (run, step), values in found.items():
        if names and not any(name in values for name in names):  # of a model that selects nothing
            continue
        lines.append(f"| {run} | {step:,} | {' | '.join(f'{values[n]:.3g}' if n in values else '' for n in names)} |")
    return lines


def _measured(records: list[dict]) -> list[str]:
    lines = [
        "| task | data | group | method | ratio | n | | standard error | commit |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for record in records:
        settings = record["settings"]
        for group, values in record["measured"].items():
            name, error, count, digits = MEASURES[settings["task"]]
            score = f"{name} {values[name]:.{digits}f} | {'' if values[error] is None else f'{values[error]:.{digits}f}'}"
            ratio = "" if settings["ratio"] is None else f"{settings['ratio']:g}"
            where = f"{settings['task']} | {', '.join(settings['data'])} | {group} | {method_of(settings)} | {ratio}"
            lines.append(f"| {where} | {values[count]:,} | {score} | {short_commit(record['commit'], 12)} |")
    return lines


if __name__ == "__main__":
    main()
