"""`dodo compress-corpus`: many documents into a folder of nuggets files."""

import time
from pathlib import Path
from typing import Any

import click

from dodo.cli.compress import STORAGE
from dodo.cli.options import check_device, check_selection, json_option, model_options, selection_options, size, use_option
from dodo.cli.terminal import counter, echo_json, silence_libraries, table, warn
from dodo.errors import DodoError
from dodo.loading import Loading

__all__ = ["command"]


@click.command(
    epilog="""\b
Examples:
  dodo compress-corpus reports/ nuggets/
  dodo compress-corpus papers.jsonl.xz nuggets/ --ratio 20 --storage int8 --workers 4
  dodo compress-corpus papers.jsonl.xz nuggets/ --ray --ray-address auto --workers 16

\b
OUT/index.jsonl says which file holds which document. Run the same again after
an interruption, or when documents were added: what is done is skipped.
"""
)
@click.argument("source", metavar="INPUT", type=click.Path(exists=True, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(file_okay=False, path_type=Path))
@selection_options
@use_option
@model_options
@click.option("--storage", type=click.Choice(STORAGE), help="Type of the states in the files. [default: the model's]")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True, metavar="N", help="Processes, each with the model."
)
@click.option("--ray", is_flag=True, help="Run the workers on Ray: here, or on the cluster at --ray-address.")
@click.option("--ray-address", metavar="A", help="Of a Ray cluster to join, or auto. [default: start one here]")
@click.option("--gpus-per-worker", type=click.FloatRange(0), metavar="G", help="GPUs of each on Ray, or a fraction. [default: 0]")
@json_option
def command(
    source: Path,
    out: Path,
    ratio: float | None,
    nuggets: int | None,
    use: Any,
    loading: Loading,
    storage: str | None,
    workers: int,
    ray: bool,
    ray_address: str | None,
    gpus_per_worker: float | None,
    as_json: bool,
) -> None:
    """Compress each document in INPUT and write it to the folder OUT.

    INPUT is a folder of texts (.txt, .md), HTML, PDF and Word files (.html, .pdf, .docx), JSON lines (.jsonl, .jsonl.xz,
    .jsonl.gz; the field 'text' of each) and parquet files, or one such file. Documents that fail are listed at the end, and the
    exit code is 1. Folders in INPUT that an earlier run wrote are left out. OUT is for one INPUT: names in its index are within
    that.

    With --ray, all machines must see INPUT, OUT and the model under the same names, and have Dodo.
    """
    check_selection(ratio, nuggets)
    for flag, value in (("--ray-address", ray_address), ("--gpus-per-worker", gpus_per_worker)):
        if value is not None and not ray:
            raise click.UsageError(f"{flag} {value}: is for workers on Ray; add --ray")
    if loading.device is not None and not ray:  # the workers may have what this machine lacks
        check_device(loading.device)
    from dodo.corpus.work import Settings

    settings = Settings(loading, ratio=ratio, nuggets=nuggets, use=use, storage=storage)
    began = time.perf_counter()
    with counter("documents") as show:
        more: dict[str, Any] = {
            "workers": workers,
            "initializer": silence_libraries,
            "progress": lambda done: show(done, 0),
        }
        if ray:
            from dodo.corpus.on_ray import compress_corpus_on_ray

            report = compress_corpus_on_ray(source, out, settings, address=ray_address, gpus=gpus_per_worker or 0, **more)
        else:
            from dodo.corpus.run import compress_corpus

            report = compress_corpus(source, out, settings, **more)

    warned = [row for row in report.rows if row["warnings"]]
    if warned:
        warn(f"{warned[0]['document']}: {warned[0]['warnings'][0]} (documents with warnings: {len(warned)}; the index has all)")
    result: dict[str, Any] = {
        "index": str(out / "index.jsonl"),
        "documents": len(report.rows),
        "skipped": report.skipped,
        "failed": [{"document": failure.name, "error": failure.error} for failure in report.failures],
        "n": sum(row["n"] for row in report.rows),
        "states": sum(row["states"] for row in report.rows),
        "bytes_files": sum({row["file"]: row["bytes"] for row in report.rows}.values()),
        "seconds": round(time.perf_counter() - began, 4),
    }
    if as_json:
        echo_json(result)
    else:
        rows = [
            ("index", result["index"]),
            ("documents", f"{result['documents']:,} ({report.skipped:,} of them done before)"),
            ("failed", f"{len(report.failures):,}"),
            ("n, tokens", f"{result['n']:,}"),
            ("states held", f"{result['states']:,}"),
            ("size of files", size(result["bytes_files"])),
            ("seconds", f"{result['seconds']:.2f}"),
        ]
        click.echo(table(rows))
    from dodo.inspection import visible

    for failure in report.failures:
        told = " ".join(f"{failure.name}: {failure.error}".split())
        click.echo(f"failed: {visible(told)}", err=True)
    if report.failures:
        total = len(report.rows) + len(report.failures)
        raise DodoError(f"{len(report.failures)} of {total} documents failed; mend them and run the same again: it does the rest")
