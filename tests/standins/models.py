"""A tiny base in each form that a base comes in: in memory, as a folder, as a GGUF file."""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

LAYERS, WIDTH, HEADS, KV_HEADS = 4, 32, 4, 2
SPECIAL, MERGE = ("<s>", "</s>"), ("t", "h")


def byte_tokenizer(**tokens: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, one merge, a start and an end token, and no padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet, "".join(MERGE)])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[MERGE]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]} | tokens
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{k: v for k, v in named.items() if v is not None})


def tiny_llama(*, seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A random Llama whose vocabulary is `byte_tokenizer`'s."""
    common = {
        "vocab_size": 259,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(common | settings)))
    with torch.no_grad():  # initial weights of 0.02 make attention nearly uniform
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model.eval()


def save_base(folder: Path, *, model: LlamaForCausalLM | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """A model folder as the hub's have it."""
    copy.deepcopy(model or tiny_llama()).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_gguf(path: Path, *, model: LlamaForCausalLM | None = None) -> Path:
    """The same as an unquantised GGUF file."""
    import gguf

    model = model or tiny_llama()
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in tokens])
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # GGUF interleaves the two halves of the rotation
            tensor = tensor.reshape(heads, 2, -1, config.hidden_size).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(_gguf_name(name), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *rest = name.split(".")
    part = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }[rest[-2]]
    return f"blk.{layer}.{part}.weight"


def text_logits(model: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Logits of a text, to tell whether two models are the same."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits
    return logits
