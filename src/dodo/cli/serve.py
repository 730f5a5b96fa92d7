"""`dodo serve`: an OpenAI-style server over compressed contexts."""

import math
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dodo.cli.options import json_option, load_model, model_options, note_fresh, ratio_value
from dodo.cli.terminal import echo_json, note
from dodo.loading import Loading

if TYPE_CHECKING:
    from dodo.serving.settings import Settings

__all__ = ["command"]

MB = 1024**2


@click.command(
    epilog="""\b
Examples:
  dodo serve
  dodo serve --port 8080 --store ~/contexts --max-disk 20000
  dodo serve --host 0.0.0.0 --api-key-file keys.txt
  dodo serve --compress-over 1000 --ratio 5
  dodo serve --ray --replicas 4 --gpus-per-replica 1
"""
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; beyond loopback it needs keys.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any that is free.")
@click.option(
    "--store", type=click.Path(file_okay=False, path_type=Path), help="Folder of the contexts. [default: in the user's data]"
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keys, one a line; who asks must send one.",
)
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN", help="Let pages of this site ask; repeatable.")
@click.option("--compress-over", type=click.IntRange(min=1), metavar="N", help="Compress messages of more than N tokens.")
@click.option(
    "--ratio", type=ratio_value, metavar="R", help="Tokens per nugget of messages that are compressed. [default: the model's]"
)
@click.option("--max-memory", type=click.IntRange(min=1), default=2048, show_default=True, help="MB of contexts kept loaded.")
@click.option("--max-disk", type=click.IntRange(min=1), help="MB of contexts kept; the least recently used are deleted.")
@click.option("--max-body", type=click.IntRange(min=1), default=32, show_default=True, help="MB of a request.")
@click.option(
    "--max-document", type=click.IntRange(min=1), default=100_000, show_default=True, help="Tokens of a text to compress."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of an answer.")
@click.option("--max-batch", type=click.IntRange(min=1), default=32, show_default=True, help="Answers made at once.")
@click.option("--max-queue", type=click.IntRange(min=1), default=64, show_default=True, help="Answers that may wait.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=300, show_default=True, help="Seconds for a request."
)
@click.option("--ray", is_flag=True, help="Run replicas on Ray: here, or on the cluster at --ray-address.")
@click.option("--ray-address", metavar="A", help="Of a Ray cluster to join, or auto. [default: start one here]")
@click.option("--replicas", type=click.IntRange(min=1), metavar="N", help="How many, each with the model. [default: 1]")
@click.option("--cpus-per-replica", type=click.FloatRange(0, min_open=True), metavar="C", help="CPUs of each. [default: 1]")
@click.option("--gpus-per-replica", type=click.FloatRange(0), metavar="G", help="GPUs of each, or a fraction. [default: 0]")
@model_options
@json_option
def command(
    host: str,
    port: int,
    store: Path | None,
    api_key_file: Path | None,
    cors_origins: tuple[str, ...],
    compress_over: int | None,
    ratio: float | None,
    max_memory: int,
    max_disk: int | None,
    max_body: int,
    max_document: int,
    max_new_tokens: int,
    max_batch: int,
    max_queue: int,
    timeout: float,
    ray: bool,
    ray_address: str | None,
    replicas: int | None,
    cpus_per_replica: float | None,
    gpus_per_replica: float | None,
    loading: Loading,
    as_json: bool,
) -> None:
    """Keep documents compressed, and answer questions over them for any OpenAI client.

    The API's documentation is at /docs of the server. With --json, stdout says where it listens.

    With --ray, Ray's proxies listen at that address on each machine with replicas, and Dodo and the model must be there under
    the same names; the store is this machine's folder for all of them. --max-batch and --max-queue are
    of each, --max-memory is the store's.
    """
    try:
        import uvicorn

        from dodo.serving.app import make_app
        from dodo.serving.server import Server
        from dodo.serving.service import open_store
        from dodo.serving.settings import Settings, is_loopback, read_keys
    except ImportError as error:
        raise click.ClickException(f"serving needs {error.name}: pip install 'dodo-lm[serve]'") from None

    if api_key_file is None and not is_loopback(host):
        raise click.UsageError(f"--host {host}: others could ask as well; add --api-key-file FILE, or listen at 127.0.0.1")
    if ratio is not None and compress_over is None:
        raise click.UsageError(f"--ratio {ratio:g}: is for messages that are compressed; add --compress-over N")
    for flag, value in {
        "--ray-address": ray_address,
        "--replicas": replicas,
        "--cpus-per-replica": cpus_per_replica,
        "--gpus-per-replica": gpus_per_replica,
    }.items():
        if value is not None and not ray:
            raise click.UsageError(f"{flag} {value}: is for a server on Ray; add --ray")
    settings = Settings(
        store=store or _default_store(),
        loading=loading,
        keys=() if api_key_file is None else read_keys(api_key_file),
        cors_origins=cors_origins,
        compress_over=compress_over,
        compress_ratio=ratio,
        max_body=max_body * MB,
        max_document=max_document,
        max_new_tokens=max_new_tokens,
        timeout=timeout,
        memory_limit=max_memory * MB,
        disk_limit=None if max_disk is None else max_disk * MB,
        max_batch=max_batch,
        max_queue=max_queue,
    )
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise click.ClickException(f"can't listen at {host}, port {port}: {error.strerror or error}") from None
    port = listening.getsockname()[1]
    if ray:
        listening.close()
        number, cpus, gpus = replicas or 1, cpus_per_replica or 1.0, gpus_per_replica or 0.0
        _serve_on_ray(settings, number, cpus, gpus, ray_address, host=host, port=port, as_json=as_json)
        return
    with listening, closing(open_store(settings)) as kept:
        dodo, _ = load_model(loading)
        note_fresh(dodo)
        _say_where(settings, host, port, as_json)
        app = make_app(settings, dodo, store=kept)
        server = Server(uvicorn.Config(app, log_level="warning"), close=lambda: app.state.service.engine.close())
        server.run(sockets=[listening])
    if not server.started:
        raise click.ClickException("the server could not start; what it said stands above")


def _serve_on_ray(
    settings: "Settings", number: int, cpus: float, gpus: float, address: str | None, *, host: str, port: int, as_json: bool
) -> None:
    """Until it is interrupted."""
    from dodo.cluster import joined
    from dodo.serving.on_ray import Replicas, deployed

    replicas = Replicas(number, cpus, gpus)
    with joined(address, cpus=math.ceil(number * cpus)), deployed(settings, replicas, host=host, port=port):
        _say_where(settings, host, port, as_json)
        while True:
            time.sleep(3600)


def _say_where(settings: "Settings", host: str, port: int, as_json: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}"
    if as_json:
        echo_json({"address": address, "model": settings.name, "store": str(settings.store)})
    note(f"serving {settings.name} at {address} (contexts in {settings.store}); Ctrl-C ends it")


def _default_store() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("dodo", appauthor=False)) / "contexts"
