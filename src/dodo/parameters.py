"""How many parameters each part has, and which of them learn.

Paper: Appendix B, Table 5. A base that is known by its configuration only is built on torch's meta device: nothing is
downloaded and no memory is taken.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from dodo.adapters import PHI, THETA, Adapters
from dodo.compressor import Compressor
from dodo.config import DodoConfig
from dodo.errors import InputError
from dodo.scorer import Scorer

__all__ = ["BASE_CONFIGS", "ParameterRow", "base_config", "parameters_of", "parameters_of_config", "people_count", "people_share"]

_LLAMA_7B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}

BASE_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-7b": {**_LLAMA_7B, "max_position_embeddings": 2048},
    "llama-2-7b": {**_LLAMA_7B, "max_position_embeddings": 4096},
    "llama-2-7b-chat": {**_LLAMA_7B, "max_position_embeddings": 4096},
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Published architectures of bases, by name, as arguments of `LlamaConfig`."""


@dataclass(frozen=True)
class ParameterRow:
    """A row of Table 5."""

    module: str
    count: int
    percentage: float
    """Of all parameters, the base's among them."""
    trainable: bool


def base_config(name: str) -> LlamaConfig:
    """The configuration of a known base.

    Raises:
        InputError: unknown name.
    """
    if name not in BASE_CONFIGS:
        raise InputError(f"there is no base configuration {name!r}; known are {', '.join(BASE_CONFIGS)}")
    return LlamaConfig.from_dict(BASE_CONFIGS[name])


def parameters_of(compressor: Compressor, *, name: str) -> list[ParameterRow]:
    """Table 5 of a model in memory. Tied weights count once, quantised ones as what they stand for.

    Args:
        compressor: the model.
        name: of its base, for the first row.
    """
    return _rows(name, compressor.base, compressor.adapters, compressor.scorer, compressor.soft_token.numel())


def parameters_of_config(config: PreTrainedConfig, *, name: str, settings: DodoConfig | None = None) -> list[ParameterRow]:
    """Table 5 of a base with this configuration, built on the meta device.

    Args:
        config: the base's.
        name: of the base, for the first row.
        settings: of the adapters; None: the defaults.
    """
    settings = settings or DodoConfig()
    with torch.device("meta"), no_init_weights():
        base = AutoModelForCausalLM.from_config(config)
        base.tie_weights()
        adapters = Adapters(base, encoder=settings.encoder, decoder=settings.decoder)
        scorer = Scorer(config.hidden_size, by_use=settings.scores_by_use)
    return _rows(name, base, adapters, scorer, config.hidden_size)


def people_count(count: int) -> str:
    """A count as Table 5 prints it.

    >>> people_count(6_738_415_616), people_count(25_165_824), people_count(4096)
    ('6.74B', '25.2M', '4,096')
    """
    for unit, digits, power in (("B", 2, 9), ("M", 1, 6)):
        if count >= 10**power:
            return f"{count / 10**power:.{digits}f}{unit}"
    return f"{count:,}"


def people_share(percentage: float) -> str:
    """A percentage as Table 5 prints it.

    >>> people_share(99.0148), people_share(0.00042), people_share(0.00006)
    ('99.01%', '0.0004%', '<0.0001%')
    """
    if 0 < percentage < 0.0001:
        return "<0.0001%"
    return f"{percentage:.2f}%" if percentage >= 0.005 or percentage == 0 else f"{percentage:.1g}%"


def _rows(name: str, base: PreTrainedModel, adapters: Adapters, scorer: Scorer, soft: int) -> list[ParameterRow]:
    counts = [
        (name, sum(_numel(p) for key, p in base.named_parameters() if ".lora_" not in key), False),
        ("encoder (phi)", sum(p.numel() for p in adapters.parameters(PHI)), True),
        ("decoder (theta)", sum(p.numel() for p in adapters.parameters(THETA)), True),
        ("scorer (varphi)", sum(p.numel() for p in scorer.parameters()), True),
        ("soft prompt (theta)", soft, True),
    ]
    total = sum(count for _, count, _ in counts)
    return [ParameterRow(module, count, 100 * count / total, trainable) for module, count, trainable in counts]


def _numel(parameter: torch.Tensor) -> int:
    packed = getattr(parameter, "quant_state", None)  # bitsandbytes keeps two 4-bit weights in a byte
    return math.prod(packed.shape) if packed is not None else parameter.numel()
