"""`dodo evaluate`: a method measured on a task."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dodo.cli.options import (
    DEFAULT_LANGUAGE_MODEL,
    DEFAULT_MODEL,
    json_option,
    load_model,
    model_options_for,
    note_fresh,
    ratio_value,
)
from dodo.cli.terminal import counter, echo_json, table
from dodo.evaluation.names import METHODS_OF, PEERS, WITHOUT_RATIO
from dodo.loading import Loading

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo evaluate autoencoding --data heldout.jsonl.xz --ratio 5 --limit 50
  dodo evaluate squad --data squad-dev.jsonl.xz --ratio 5 --limit 400
  dodo evaluate squad --data squad-dev.jsonl.xz --method full --limit 400
  dodo evaluate squad --data squad-dev.jsonl.xz --method kvpress-snapkv --ratio 5 --limit 400
  dodo evaluate perplexity --data wiki.test.tokens --states 64
  dodo evaluate perplexity --data wiki.test.tokens --states 64 --method compressive --model path/to/its/adapters
"""
)
@click.argument("task", type=click.Choice([*METHODS_OF]))
@click.option(
    "--method",
    type=click.Choice(list(dict.fromkeys(name for names in METHODS_OF.values() for name in names))),
    default="dodo",
    show_default=True,
    help="dodo; the same adapters with a stride or random selection; memory tokens, which need adapters of their own (icae); "
    "the base with the whole text (full), the same fine-tuned (theta, with adapters of its own), no text, a summary by itself "
    "(lmsumm), or the text's end; or a peer on the same base (kvpress-*, llmlingua: see --peers-python). "
    "In perplexity: dodo (by a threshold that follows the text), one for all texts (threshold), top-k, stride, compressive "
    "(means), and the last states alone: full (base), theta. "
    "In endless: dodo (as in perplexity), the latest states alone (window), the base with everything (full).",
)
@click.option("--data", "data", multiple=True, required=True, metavar="PATH", help="Files, patterns or hf: ids; repeatable.")
@click.option("--ratio", "-r", type=ratio_value, metavar="R", help="Tokens per nugget. [default: the model's; 10 for LMs]")
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Tokens of each text; repeatable. In squad the paragraph and others of the data around it. "
    "[default: 64 to 512; 512 to 8000 in efficiency; the paragraph alone]",
)
@click.option(
    "--states",
    type=click.IntRange(min=2),
    multiple=True,
    metavar="S",
    help="States held before each segment; repeatable. [default: 64, 128, 256] In endless: held at most. [default: 1024]",
)
@click.option(
    "--whole",
    "share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="Share of the states that are whole tokens, in perplexity and endless; the others are compressed. [default: 0.5]",
)
@click.option("--segment", type=click.IntRange(min=1), metavar="M", help="Tokens of a segment in perplexity. [default: 16]")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Items (of each length or language); about so many tokens in perplexity; tokens of each text in endless. [default: all]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Which items are drawn.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Items at a time.")
@click.option("--examples", type=click.IntRange(min=0), default=0, show_default=True, help="Documents shown in the record.")
@click.option(
    "--peers-python",
    type=click.Path(path_type=Path),
    metavar="F",
    help="Python of the peers' environment. [default: $DODO_PEERS_PYTHON, or what make peers made: .venv-peers/bin/python]",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The record. [default: results/TASK-DATA-MODEL-METHOD-rR.json]"
)
@model_options_for(None, shown=f"{DEFAULT_MODEL}; {DEFAULT_LANGUAGE_MODEL} in perplexity and endless")
@json_option
def command(
    task: str,
    method: str,
    data: tuple[str, ...],
    ratio: float | None,
    lengths: tuple[int, ...],
    states: tuple[int, ...],
    share: float | None,
    segment: int | None,
    limit: int | None,
    seed: int,
    batch: int,
    examples: int,
    peers_python: Path | None,
    out: Path | None,
    loading: Loading,
    as_json: bool,
) -> None:
    """Measure a method on TASK.

    \b
    autoencoding       rebuild texts
    multilingual       the same, a file for each language
    delimiters         which tokens become nuggets
    highlight          the same shown in texts, with --examples
    optimal-selection  what a search for better nuggets gains
    efficiency         seconds and bytes by length, beside the whole text
    squad              answer questions
    summarization      summarise articles
    perplexity         of language models with a number of states
    endless            the same by position, of texts many windows long

    The record, a JSON file, has what is needed to judge and to repeat the measurement. A stopped one goes on where it was.
    """
    _check(task, method, ratio, lengths, states, share, segment, examples)
    if peers_python is not None and method not in PEERS:
        raise click.UsageError(f"--peers-python {peers_python}: has no effect on {method}; leave it out")
    try:
        from dodo.evaluation.peers import find_python
        from dodo.evaluation.run import evaluate
    except ImportError as error:
        raise click.ClickException(f"evaluating needs {error.name}: pip install 'dodo-lm[evaluate]'") from None
    if method in PEERS:
        find_python(peers_python)  # before the model is loaded
    of_language_models = task in ("perplexity", "endless")
    model = loading.model or (DEFAULT_LANGUAGE_MODEL if of_language_models else DEFAULT_MODEL)
    dodo, _ = load_model(replace(loading, model=model))
    if method in ("dodo", "threshold", "top-k", "stride", "random", "compressive", "theta"):
        note_fresh(dodo)
    used = ratio if ratio is not None else 10.0 if of_language_models else dodo.config.ratio
    named = out is not None
    out = out or Path("results") / _name(task, method, None if method in WITHOUT_RATIO else used, data, model)
    states = states or (1024,) * (task == "endless")
    given: dict[str, Any] = {"lengths": lengths, "states": states, "share": share, "segment": segment}
    given = {name: value for name, value in given.items() if value}
    with counter("item") as progress:
        record = evaluate(
            dodo,
            task,
            method=method,
            ratio=used,
            sources=data,
            **given,
            limit=limit,
            seed=seed,
            batch=batch,
            out=out,
            examples=examples,
            model=model,
            command=shlex.join(["dodo", *sys.argv[1:]]),
            peers_python=peers_python,
            replace=named,
            progress=progress,
        )
    if as_json:
        echo_json({"file": str(out), **{name: record[name] for name in ("settings", "measured", "seconds")}})
        return
    for group, values in record["measured"].items():
        made_at = "" if record["settings"]["ratio"] is None else f", ratio {record['settings']['ratio']:g}"
        click.echo(f"{task}, {method}{made_at}: {group}")
        click.echo(table([(f"  {name}", _shown(value)) for name, value in values.items()]))
    click.echo(f"written to {out}", err=True)


def _check(
    task: str,
    method: str,
    ratio: float | None,
    lengths: tuple[int, ...],
    states: tuple[int, ...],
    share: float | None,
    segment: int | None,
    examples: int,
) -> None:
    """Refuse flags that don't go together, before a model is loaded."""
    if method not in METHODS_OF[task]:
        raise click.UsageError(f"--method {method}: can't do {task}; its methods are {', '.join(METHODS_OF[task])}")
    given = {
        "--states": states[:1],
        "--whole": () if share is None else (share,),
        "--segment": () if segment is None else (segment,),
        "--length": lengths[:1],
        "--examples": (examples,) if examples else (),
    }
    of_task = {"perplexity": ("--states", "--whole", "--segment"), "endless": ("--states", "--whole")}
    of_task |= {"autoencoding": ("--length", "--examples"), "delimiters": ("--length",), "efficiency": ("--length",)}
    of_task |= {"squad": ("--length", "--examples")}
    for flag, values in given.items():
        for value in values if flag not in of_task.get(task, ("--examples",)) else ():
            raise click.UsageError(f"{flag} {value}: has no effect in {task}; leave it out")
    if ratio is not None and method in WITHOUT_RATIO and task != "perplexity":
        raise click.UsageError(f"--ratio {ratio:g}: {method} does not compress; leave it out")
    if task == "endless" and len(states) > 1:
        raise click.UsageError(f"--states {states[1]}: endless takes one number of states")
    if share is not None and method in ("full", "theta", "window"):
        raise click.UsageError(f"--whole {share:g}: all states of {method} are whole tokens; leave it out")
    for count in states:
        if abs(count * (share or 0.5) - round(count * (share or 0.5))) > 1e-6:
            raise click.UsageError(f"--states {count}: a share of {share or 0.5:g} of them is no whole number of whole tokens")
    if task == "perplexity" and ratio is not None and ratio != int(ratio):
        raise click.UsageError(f"--ratio {ratio:g}: perplexity needs a whole number of tokens per state")


def _name(task: str, method: str, ratio: float | None, data: tuple[str, ...], model: str) -> str:
    """A record's file: what would be measured anew has the same. What it leaves out is looked at before it is replaced."""
    folder = Path(model)
    of_what = [
        Path(data[0]).name.split(".")[0].strip("*") or "all",
        (folder.parent if folder.name in ("last", "best") else folder).name,
    ]
    return "-".join([task, *of_what, method, *([] if ratio is None else [f"r{ratio:g}"])]) + ".json"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
