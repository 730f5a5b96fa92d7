"""Fingerprints: the same for the same base however it is loaded, another for another."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dodo import fingerprint
from dodo.base import load_base
from dodo.errors import FingerprintMismatch
from dodo.model import Dodo
from tests.conftest import small_config, tiny_model
from tests.standins.models import byte_tokenizer, save_base, save_gguf, tiny_llama

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _files(folder: Path) -> str:
    return fingerprint.of_files(folder.glob("*.safetensors"))


def _dodo(seed: int = 0, **config: object) -> Dodo:
    return Dodo.from_model(tiny_llama(), byte_tokenizer(), small_config(seed=seed, **config))


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gemma3", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_memory_has_the_fingerprint_of_its_files(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(family).to(dtype)
    model.save_pretrained(tmp_path)
    assert fingerprint.of_model(model) == _files(tmp_path)


def test_splitting_weights_over_files_changes_nothing(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    byte_tokenizer().save_pretrained(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert _files(tmp_path / "one") == _files(tmp_path / "many") == load_base(tmp_path / "many").fingerprint


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_base_keeps_its_fingerprint_in_any_loaded_dtype(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dodo.base.computes_in", lambda *_: True)  # so that auto is the stored one
    save_base(tmp_path, dtype=stored)
    bases = [load_base(tmp_path, dtype=dtype) for dtype in ("auto", torch.float32, torch.bfloat16, torch.float16)]
    assert bases[0].model.dtype == stored
    assert len({base.model.dtype for base in bases}) == 3
    assert len({base.fingerprint for base in bases}) == 1


def test_files_beside_the_weights_do_not_count(tmp_path: Path) -> None:
    save_base(tmp_path)
    before = load_base(tmp_path).fingerprint
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert load_base(tmp_path).fingerprint == before


def test_the_stored_dtype_is_part_of_a_base(tmp_path: Path) -> None:
    assert _files(save_base(tmp_path / "a")) != _files(save_base(tmp_path / "b", dtype=torch.bfloat16))


@pytest.mark.parametrize("part", ["embed_tokens", "layers.3.self_attn.v_proj", "layers.0.input_layernorm", "lm_head"])
def test_a_fine_tuned_sibling_differs_whichever_part_was_tuned(part: str) -> None:
    model = tiny_llama()
    before = fingerprint.of_model(model)
    (weight,) = [parameter for name, parameter in model.named_parameters() if part in name]
    with torch.no_grad():
        weight.add_(1e-4)
    assert fingerprint.of_model(model) != before


def test_one_changed_number_is_seen_exactly_if_it_is_sampled() -> None:
    model = tiny_llama()
    weight = model.model.layers[1].mlp.up_proj.weight
    sampled = set(np.linspace(0, weight.numel() - 1, 64).astype(int).tolist())
    before = fingerprint.of_model(model)
    for place, seen in ((0, True), (weight.numel() - 1, True), (next(i for i in range(99) if i not in sampled), False)):
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.model.layers[1].mlp.up_proj.weight.view(-1)[place] += 1
        assert (fingerprint.of_model(changed) != before) is seen, place


def test_swapped_layers_differ() -> None:
    model = tiny_llama()
    before = fingerprint.of_model(model)
    first, second = (model.model.layers[i].mlp.up_proj for i in (0, 1))
    first.weight.data, second.weight.data = second.weight.data, first.weight.data
    assert fingerprint.of_model(model) != before


def test_a_gguf_file_is_known_by_its_contents(tmp_path: Path) -> None:
    same, again = save_gguf(tmp_path / "a.gguf"), save_gguf(tmp_path / "b.gguf")
    other = save_gguf(tmp_path / "c.gguf", model=tiny_llama(seed=1))
    assert load_base(same).fingerprint == load_base(again).fingerprint != load_base(other).fingerprint


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 4},
        {"rms_norm_eps": 1e-2},
        {"hidden_act": "gelu"},
        {"rope_parameters": YARN | {"attention_factor": 2.0}},
        {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}},
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}},
    ],
    ids=str,
)
def test_the_same_weights_under_another_configuration_are_another_base(settings: dict[str, object]) -> None:
    rope: Any = settings.get("rope_parameters", {})
    usual = {"yarn": YARN, "llama3": LLAMA3}.get(rope.get("rope_type"))
    plain, changed = tiny_llama(**({} if usual is None else {"rope_parameters": usual})), tiny_llama(**settings)
    changed.load_state_dict(plain.state_dict())
    assert fingerprint.of_model(plain) == fingerprint.of_model(changed)
    nuggets = Dodo.from_model(plain, byte_tokenizer(), small_config()).compress("some text", ratio=2)
    with pytest.raises(FingerprintMismatch, match=r"another base|heads of width"):
        Dodo.from_model(changed, byte_tokenizer(), small_config()).generate(nuggets, "more", max_new_tokens=2)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"query_pre_attn_scalar": 64}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"attn_logit_softcapping": 20.0}),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 0]}),
        ("phi3", {"partial_rotary_factor": 0.5}),
    ],
    ids=str,
)
def test_what_a_family_alone_has_tells_bases_apart(family: str, changes: dict[str, Any]) -> None:
    config = tiny_model(family).config
    settings = config.to_dict() | ({"rope_parameters": None} if "partial_rotary_factor" in changes else {})
    changed = type(config)(**{**settings, **changes})
    assert fingerprint.of_base("weights", config) != fingerprint.of_base("weights", changed)


def test_a_base_without_anything_unusual_has_the_stamp_that_it_always_had() -> None:
    config = tiny_llama().config
    assert fingerprint._unusual(config, [config.rope_parameters]) == []


def test_nuggets_of_another_tokenizer_are_refused() -> None:
    model = tiny_llama()
    nuggets = Dodo.from_model(model, byte_tokenizer(), small_config()).compress("some text", ratio=2)
    other = Dodo.from_model(tiny_llama(), byte_tokenizer(bos_token=None), small_config())
    with pytest.raises(FingerprintMismatch, match="another tokenizer"):
        other.generate(nuggets, "more", max_new_tokens=2)


def test_a_tokenizer_is_known_by_its_vocabulary_and_by_how_it_splits() -> None:
    plain = byte_tokenizer()
    more, lower, other_start = byte_tokenizer(), byte_tokenizer(), byte_tokenizer(bos_token="</s>")
    more.add_tokens(["dodo"])
    from tokenizers import normalizers

    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    prints = [fingerprint.of_tokenizer(t) for t in (plain, byte_tokenizer(), more, lower, other_start)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_padding_side_and_pad_token_are_not_part_of_a_tokenizer() -> None:
    changed = byte_tokenizer(pad_token="</s>")
    changed.padding_side = "left"
    assert fingerprint.of_tokenizer(changed) == fingerprint.of_tokenizer(byte_tokenizer())


def test_fresh_adapters_agree_exactly_if_their_seeds_do() -> None:
    assert _dodo(seed=0).fingerprint == _dodo(seed=0).fingerprint
    assert _dodo(seed=0).fingerprint.adapter != _dodo(seed=1).fingerprint.adapter


def test_fresh_adapters_agree_whatever_the_global_generator_did() -> None:
    torch.manual_seed(1)
    first = _dodo().fingerprint
    torch.manual_seed(2)
    torch.rand(3)
    assert _dodo().fingerprint == first


@pytest.mark.parametrize("changes", [{"keep_first": True}, {"positions": "compact"}, {"feature_layer": 1}], ids=str)
def test_settings_that_shape_nuggets_are_part_of_the_adapters(changes: dict[str, object]) -> None:
    assert _dodo(**changes).fingerprint.adapter != _dodo().fingerprint.adapter


@pytest.mark.parametrize(
    "changes", [{"ratio": 3.0}, {"trained_ratios": (2.0, 4.0)}, {"trained_as": "icae"}, {"base": "elsewhere"}], ids=str
)
def test_settings_that_do_not_shape_nuggets_are_no_part_of_the_adapters(changes: dict[str, object]) -> None:
    assert _dodo(**changes).fingerprint == _dodo().fingerprint


def test_each_trained_part_is_part_of_the_fingerprint_once_stamped() -> None:
    dodo = _dodo()
    compressor = dodo.compressor
    parts = {
        "phi": compressor.adapters.parameters("phi")[0],
        "theta": compressor.adapters.parameters("theta")[-1],
        "scorer": compressor.scorer.output.bias,
        "soft token": compressor.soft_token,
    }
    seen = {dodo.fingerprint.adapter}
    for part in parts.values():
        with torch.no_grad():
            part.view(-1)[0] += 1e-3
        dodo.stamp()
        seen.add(dodo.fingerprint.adapter)
        assert compressor.fingerprint == dodo.fingerprint
    assert len(seen) == 1 + len(parts)


def test_nuggets_of_other_adapters_are_refused_and_can_be_adopted() -> None:
    dodo = _dodo()
    nuggets = dodo.compress("some text", ratio=2)
    with torch.no_grad():
        dodo.compressor.scorer.output.bias += 1
    dodo.stamp()
    with pytest.raises(FingerprintMismatch, match="another adapter"):
        dodo.generate(nuggets, "more", max_new_tokens=2)
    dodo.generate(dodo.adopt(nuggets), "more", max_new_tokens=2)


def test_two_processes_agree_on_base_tokenizer_and_fresh_adapters(tmp_path: Path) -> None:
    save_base(tmp_path)
    script = f"from dodo import Dodo; print(*vars(Dodo.from_pretrained({str(tmp_path)!r}).fingerprint).values())"
    environment = os.environ | {"PYTHONHASHSEED": "7", "CUDA_VISIBLE_DEVICES": ""}
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert made.stdout.split() == list(vars(Dodo.from_pretrained(tmp_path).fingerprint).values()), made.stderr
