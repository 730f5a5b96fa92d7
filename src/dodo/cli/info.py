"""`dodo info`: configuration and Table 5."""

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from dodo.cli.options import adapters_state, json_option, load_model, model_options, note_fresh, size
from dodo.cli.terminal import echo_json, reporter, silence_libraries, table
from dodo.loading import Loading

if TYPE_CHECKING:
    from dodo.config import DodoConfig
    from dodo.parameters import ParameterRow

__all__ = ["command"]

BASE_CONFIG_NAMES = ("llama-7b", "llama-2-7b", "llama-2-7b-chat", "smollm2-135m")


@click.command(
    epilog="""\b
Examples:
  dodo info
  dodo info --model path/to/adapters --json
  dodo info --base-config llama-7b                the paper's Table 5, without the model
"""
)
@model_options
@click.option(
    "--base-config",
    type=click.Choice(BASE_CONFIG_NAMES),
    help="Count for a published architecture instead, without loading a model.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, loading: Loading, base_config: str | None, as_json: bool) -> None:
    """Show a model's configuration and the number of its parameters (the paper's Table 5)."""
    if base_config is None:
        configuration, settings, rows = _loaded(loading)
    else:
        for flag in ("model", "base", "device", "dtype", "quantization"):
            if ctx.get_parameter_source(flag) is not click.core.ParameterSource.DEFAULT:
                raise click.UsageError(f"--{flag} {ctx.params[flag]}: has no effect with --base-config; leave one of them out")
        configuration, settings, rows = _known(base_config)
    adapter_settings = {key: value for key, value in dataclasses.asdict(settings).items() if not key.startswith("base")}
    if as_json:
        parameters = [dataclasses.asdict(row) for row in rows]
        echo_json({**configuration, "config": adapter_settings, "parameters": parameters})
        return
    shown = {**configuration, **adapter_settings}
    shown["cache_bytes_per_token"] = size(shown["cache_bytes_per_token"])
    for name in ("encoder", "decoder"):
        shown[name] = ", ".join(f"{key} {value}" for key, value in shown[name].items())
    shown["trained_ratios"] = " to ".join(f"{r:g}" for r in shown["trained_ratios"] or ()) or "none"
    click.echo(table([(name.replace("_", " "), str(value)) for name, value in shown.items()]))
    click.echo()
    click.echo(_parameter_table(rows))


def _loaded(loading: Loading) -> tuple[dict[str, Any], "DodoConfig", "list[ParameterRow]"]:
    dodo, _ = load_model(loading)
    note_fresh(dodo)
    from dodo.base import held_in
    from dodo.parameters import parameters_of

    base = dodo.compressor.base
    configuration = {
        "model": loading.model,
        "adapters": adapters_state(dodo),
        "base": dodo.config.base,
        **_architecture(base.config, base.dtype.itemsize),
        "dtype": held_in(base),
        "device": str(dodo.device),
        "fingerprint": " ".join(f"{name}:{value}" for name, value in vars(dodo.fingerprint).items()),
    }
    return configuration, dodo.config, parameters_of(dodo.compressor, name=str(dodo.config.base or loading.model))


def _known(name: str) -> tuple[dict[str, Any], "DodoConfig", "list[ParameterRow]"]:
    with reporter() as report:
        report(f"counting {name}", 0, 0)
        silence_libraries()
        from dodo.config import DodoConfig
        from dodo.parameters import base_config, parameters_of_config

        config = base_config(name)
        rows = parameters_of_config(config, name=name)
    return {"model": name, "adapters": "fresh", **_architecture(config, 2), "dtype": "float16"}, DodoConfig(), rows


def _architecture(config: Any, bytes_per_number: int) -> dict[str, Any]:
    from dodo.architecture import state_bytes, window_of

    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "family": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": heads,
        "key_value_heads": key_heads,
        "head_width": width,
        "window": window_of(config),
        "cache_bytes_per_token": state_bytes(config, bytes_per_number=bytes_per_number),
    }


def _parameter_table(rows: "list[ParameterRow]") -> str:
    from dodo.parameters import people_count, people_share

    cells = [("module", "#params", "percentage", "trainable")]
    cells += [(r.module, people_count(r.count), people_share(r.percentage), "yes" if r.trainable else "no") for r in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
