"""Tiny random models of every family, made from configurations: no network, CPU, seeded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dodo.compressor import Compressor
from dodo.config import DodoConfig, LoraSettings

VOCABULARY = 97
LAYERS = 4

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama"},
    "llama, multi-query": {"model_type": "llama", "num_key_value_heads": 1},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama, linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama, llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral, sliding": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 9},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "phi3, sliding, partial rotation": {"model_type": "phi3", "sliding_window": 9, "partial_rotary_factor": 0.5},
    "phi3, longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.1, 2.2, 2.3],
            "original_max_position_embeddings": 128,
            "factor": 2.0,
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
}


def tiny_model(family: str = "llama", *, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, in evaluation mode."""
    settings = {**COMMON, **copy.deepcopy(FAMILIES[family])}
    config = AutoConfig.for_model(**settings)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # initial weights of 0.02 make attention nearly uniform: positions and masks would not matter
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def small_config(**changes: object) -> DodoConfig:
    """Adapters of rank 2 on features of layer 2."""
    lora = LoraSettings(rank=2, alpha=4)
    settings: dict[str, object] = {"feature_layer": 2, "keep_first": False, "encoder": lora, "decoder": lora} | changes
    return DodoConfig(**settings)  # type: ignore[arg-type]


def stir(compressor: Compressor, *, seed: int = 7, scale: float = 0.1) -> Compressor:
    """Give fresh adapters random weights, so that phi and theta do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in compressor.adapters.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return compressor


def tokens(rows: int, length: int, *, seed: int = 3) -> torch.Tensor:
    """Random token ids, special ones left out."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Pair:
    """A compressor and an untouched copy of its base."""

    compressor: Compressor
    base: PreTrainedModel


@pytest.fixture
def pair() -> Callable[..., Pair]:
    """Makes compressors beside their base: pair("gemma2", keep_first=True)."""

    def make(family: str = "llama", *, attention: str | None = None, seed: int = 0, **config: object) -> Pair:
        model = tiny_model(family, attention=attention, seed=seed)
        base = copy.deepcopy(model)
        return Pair(Compressor(model, small_config(**config)).eval(), base)

    return make
