"""A tiny random Llama and a byte-level tokenizer, as files: what `--model` is given in these tests."""

import dataclasses
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dodo.config import DodoConfig
from dodo.model import Dodo

TEXT = (
    "The dodo was a flightless bird of Mauritius. It stood about a metre tall, and weighed some seventeen kilograms. "
    "Sailors first wrote of it in 1598; the last sighting that is widely accepted was in 1662.\n\n"
    "Its nearest relatives are pigeons. The café's menu — 你好 🙂 — never had dodo.\n"
)


def save_model(folder: Path, *, seed: int = 0, **changes: int) -> Path:
    """A base of 3 layers with a window of 512 positions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    settings = {
        "vocab_size": len(fast),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": fast.bos_token_id,
        "eos_token_id": fast.eos_token_id,
        **changes,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():  # initial weights of 0.02 make attention nearly uniform
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def save_adapters(folder: Path, *, base: Path) -> Path:
    """Adapters that say of themselves that they were trained, at ratios 2 to 4."""
    fresh = DodoConfig(feature_layer=2, ratio=3.0)
    dodo = Dodo.from_pretrained(base, config=fresh)
    dodo.compressor.config = dataclasses.replace(dodo.config, trained_ratios=(2.0, 4.0))
    dodo.save_pretrained(folder)
    return folder
