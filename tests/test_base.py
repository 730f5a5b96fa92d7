"""Loading a base from wherever it is, and saying clearly why not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from dodo import Dodo, architecture
from dodo.architecture import FAMILIES, backbone, check_supported, token_nats
from dodo.base import _times_of_float32, computes_in, load_base
from dodo.errors import InputError, UnsupportedModelError
from tests.conftest import COMMON, small_config, tiny_model
from tests.conftest import FAMILIES as FAMILY_SETTINGS
from tests.standins.models import byte_tokenizer, save_base, save_gguf, text_logits, tiny_llama

TEXT = "the quick brown dodo"

# -- forms of a base


@pytest.mark.parametrize("form", ["folder", "gguf", "path object"])
def test_every_form_of_a_base_loads_the_same_model(form: str, tmp_path: Path) -> None:
    model = tiny_llama()
    where: Any = save_gguf(tmp_path / "tiny.gguf", model=model) if form == "gguf" else save_base(tmp_path, model=model)
    loaded = load_base(where if form == "path object" else str(where))
    torch.testing.assert_close(
        text_logits(loaded.model, loaded.tokenizer, TEXT), text_logits(model, byte_tokenizer(), TEXT), rtol=0, atol=0
    )
    assert loaded.name == str(where)
    assert not loaded.model.training


@pytest.mark.parametrize("family", list(FAMILY_SETTINGS))
def test_every_tested_family_loads_and_answers(family: str, tmp_path: Path) -> None:
    settings = FAMILY_SETTINGS[family]
    config = AutoConfig.for_model(**{**tiny_model(family).config.to_diff_dict(), **settings, "vocab_size": 259})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    dodo = Dodo.from_pretrained(tmp_path, config=small_config())
    nuggets = dodo.compress(TEXT, ratio=2)
    assert nuggets.k.tolist() == [10]
    assert isinstance(dodo.generate(nuggets, "more", max_new_tokens=3), str)


def test_a_gguf_file_compresses_and_answers_like_its_folder(tmp_path: Path) -> None:
    model = tiny_llama()
    answers = []
    for where in (save_base(tmp_path / "folder", model=model), save_gguf(tmp_path / "tiny.gguf", model=model)):
        dodo = Dodo.from_pretrained(where, config=small_config())
        answers.append(dodo.generate_ids(dodo.compress(TEXT, ratio=2), [[40, 41]], max_new_tokens=8))
    assert answers[0] == answers[1]


def test_a_gguf_file_whose_tokenizer_is_read_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, wrong = save_gguf(tmp_path / "tiny.gguf"), byte_tokenizer()
    wrong.backend_tokenizer.decoder = decoders.Fuse()
    monkeypatch.setattr("dodo.base.AutoTokenizer.from_pretrained", lambda *_, **__: wrong)
    with pytest.raises(InputError, match="transformers reads its tokenizer wrongly"):
        load_base(where)


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_base(tmp_path / "base")
    assert load_base("~/base").fingerprint == load_base(tmp_path / "base").fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_dtype_in_memory_is_the_asked_one_or_the_stored_one(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dodo.base.computes_in", lambda *_: True)
    save_base(tmp_path, dtype=dtype)
    assert load_base(tmp_path).model.dtype == dtype
    assert load_base(tmp_path, dtype=torch.float32).model.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cpu_that_is_slower_in_the_stored_dtype_gets_float32_unless_asked(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dodo.base.computes_in", lambda kind, _: kind != dtype)
    save_base(tmp_path, dtype=dtype)
    widened = load_base(tmp_path)
    assert {parameter.dtype for parameter in widened.model.parameters()} == {torch.float32}
    assert load_base(tmp_path, dtype=dtype).model.dtype == dtype
    assert widened.fingerprint == load_base(tmp_path, dtype=dtype).fingerprint


def test_a_base_that_would_fill_the_memory_in_float32_keeps_its_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dodo.base.computes_in", lambda *_: False)
    save_base(tmp_path, dtype=torch.bfloat16)
    size = 4 * load_base(tmp_path).model.num_parameters()
    for memory, kept in [(2 * size - 1, torch.bfloat16), (2 * size, torch.float32)]:
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: SimpleNamespace(total=memory))
        assert load_base(tmp_path).model.dtype == kept


@pytest.mark.parametrize(("times", "expected"), [(0.5, True), (1.8, False)])
def test_what_a_device_computes_in(times: float, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dodo.base._times_of_float32", lambda _: times)
    capable = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert computes_in(torch.bfloat16, "cpu") == (capable and expected)
    assert computes_in(torch.float32, "cpu")
    assert computes_in(torch.bfloat16, "cuda")


def test_a_product_is_timed_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = _times_of_float32(torch.bfloat16)
    monkeypatch.setattr("torch.mm", lambda *_: pytest.fail("timed again"))
    assert 0 < timed < 100
    assert _times_of_float32(torch.bfloat16) == timed


def test_the_attention_backend_is_the_familys_own_unless_asked(tmp_path: Path) -> None:
    save_base(tmp_path)
    assert load_base(tmp_path).model.config._attn_implementation == "sdpa"
    assert load_base(tmp_path, attn_implementation="eager").model.config._attn_implementation == "eager"


# -- no base there


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./missing", "neither a model folder, nor a .gguf file"),
        ("/missing/model", "neither a model folder, nor a .gguf file"),
        ("~/missing-model", "neither a model folder, nor a .gguf file"),
        ("a/b/c", "neither a model folder, nor a .gguf file"),
        ("missing.gguf", "there is no GGUF file missing.gguf"),
        ("smollm2-136m", r"known aliases: smollm2-135m"),
        ("has spaces/in it", "that is no name of a repository"),
        ("", "not a transformers model"),
    ],
)
def test_a_name_of_nothing_is_one_line(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        Dodo.from_pretrained(name)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="without a config.json"):
        Dodo.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["text.txt", "model.safetensors", "model.bin"])
def test_a_file_that_is_no_gguf_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("not a model")
    with pytest.raises(InputError, match="neither a model folder"):
        Dodo.from_pretrained(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_a_file_that_only_looks_like_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(InputError, match="could not load a base model") as caught:
        Dodo.from_pretrained(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)


def test_a_truncated_gguf_file_is_refused(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match="could not load a base model"):
        load_base(path)


# -- a damaged base


def _damage(folder: Path, flaw: str) -> None:
    weights = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    if flaw == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif flaw == "empty weights":
        weights.write_bytes(b"")
    elif flaw == "no weights":
        weights.unlink()
    elif flaw == "pickled weights":
        torch.save(tiny_llama().state_dict(), folder / "pytorch_model.bin")
        weights.unlink()
    elif flaw == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif flaw == "broken tokenizer":
        (folder / "tokenizer.json").write_text("{")
    elif flaw == "broken config":
        (folder / "config.json").write_text("{")
    elif flaw == "config of nothing":
        (folder / "config.json").write_text("{}")
    elif flaw == "unknown family":
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "dodo-net"}))
    elif flaw == "one layer too many":
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    elif flaw == "another width":
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    else:
        raise AssertionError(flaw)


@pytest.mark.parametrize(
    "flaw",
    [
        "truncated weights",
        "empty weights",
        "no weights",
        "pickled weights",
        "no tokenizer",
        "broken tokenizer",
        "broken config",
        "config of nothing",
        "unknown family",
        "one layer too many",
        "another width",
    ],
)
def test_a_damaged_base_is_one_line_and_never_half_loaded(flaw: str, tmp_path: Path) -> None:
    save_base(tmp_path)
    _damage(tmp_path, flaw)
    with pytest.raises(InputError, match=str(tmp_path)) as caught:
        load_base(tmp_path)
    assert "\n" not in str(caught.value)
    assert flaw != "another width" or "in other shapes, the first of them model.layers.0.mlp" in str(caught.value)


def test_a_base_without_the_asked_attention_says_what_to_take(tmp_path: Path) -> None:
    tiny_model("gemma2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no attention backend 'sdpa'; take .*'eager'; in a recipe, running.attention"):
        load_base(tmp_path, attn_implementation="sdpa")
    loaded = load_base(tmp_path)
    assert loaded.model.config._attn_implementation == "eager"
    loaded.model.config._attn_implementation = "sdpa"  # as transformers 5.6 lets it
    with pytest.raises(InputError, match="has no attention backend 'sdpa'"):
        Dodo.from_model(loaded.model, loaded.tokenizer)


def test_a_base_of_one_layer_is_refused_by_name(tmp_path: Path) -> None:
    save_base(tmp_path, model=tiny_llama(num_hidden_layers=1))
    with pytest.raises(UnsupportedModelError, match="has 1 layer; .* two are needed"):
        Dodo.from_pretrained(tmp_path)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "dodo-net", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(InputError):
        load_base(tmp_path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("options", [{"device": "nowhere"}, {"attn_implementation": "nothing"}, {"dtype": "float12"}], ids=str)
def test_an_impossible_option_is_one_line(options: dict[str, Any], tmp_path: Path) -> None:
    save_base(tmp_path)
    with pytest.raises(InputError) as caught:
        load_base(tmp_path, **options)
    assert "\n" not in str(caught.value)


# -- architectures


@pytest.mark.parametrize("texts", [1, 3])
def test_the_head_reads_states_that_lie_packed(texts: int, tmp_path: Path) -> None:
    """Not the slice that transformers makes of a pass, whose strides are the pass's even for one text."""
    save_base(tmp_path)
    base = Dodo.from_pretrained(tmp_path).compressor.base
    seen: list[tuple[int, ...]] = []
    base.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].stride()))
    with torch.no_grad():
        base(torch.ones(texts, 9, dtype=torch.long), logits_to_keep=1)
    width = base.config.hidden_size
    assert seen == [(width, width, 1)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "recurrent|linear_attention|mamba"),
    "mamba2": ({}, "recurrent|linear_attention|mamba"),
    "falcon_mamba": ({}, "recurrent|linear_attention|mamba"),
    "rwkv": ({}, "recurrent"),
    "recurrent_gemma": ({}, "."),
    "jamba": ({}, "."),
    "qwen3_next": ({}, "linear_attention"),
    "gemma3n_text": ({}, "share the keys and values"),
    "gemma3": ({}, "gemma3_text"),
    "gpt2": ({}, "learned absolute positions"),
    "t5": ({}, "encoder-decoder"),
    "bart": ({}, "encoder-decoder"),
    "deepseek_v3": ({}, "compressed latent"),
    "llama4_text": ({}, "chunked_attention"),
}


def _config(family: str, settings: dict[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(family, **settings)
    except (ValueError, KeyError) as error:
        pytest.skip(f"this transformers has no {family}: {error}")


@pytest.mark.parametrize("allow_untested", [False, True])
@pytest.mark.parametrize("family", list(REFUSED))
def test_what_cannot_hold_nuggets_is_refused_by_name_with_the_reason(family: str, allow_untested: bool) -> None:
    settings, reason = REFUSED[family]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_supported(_config(family, settings), allow_untested=allow_untested)
    assert repr(family) in str(caught.value)
    assert "not tested" not in str(caught.value)


def test_a_supported_family_with_a_foreign_layer_type_is_refused() -> None:
    config = AutoConfig.for_model("qwen3")
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        check_supported(config)


@pytest.mark.parametrize("family", ["olmo2", "glm4", "cohere2", "granite"])
def test_an_untested_family_is_refused_unless_it_is_asked_for(family: str) -> None:
    config = _config(family, {})
    with pytest.raises(UnsupportedModelError, match=f"'{family}' are not tested with dodo.*allow_untested"):
        check_supported(config)
    check_supported(config, allow_untested=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tested_family_passes_as_published(family: str) -> None:
    check_supported(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["mamba", "gpt2"])
def test_an_unsupported_base_is_refused_before_its_weights_are_read(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedModelError, match=f"'{family}'"):
        Dodo.from_pretrained(tmp_path)


# -- tokenizers


@pytest.mark.parametrize("tokens", [{}, {"bos_token": None}, {"bos_token": None, "eos_token": None}], ids=str)
def test_a_tokenizer_without_pad_start_or_end_token_works_and_nothing_is_resized(
    tokens: dict[str, str | None], tmp_path: Path
) -> None:
    save_base(tmp_path)
    byte_tokenizer(**tokens).save_pretrained(tmp_path)
    dodo = Dodo.from_pretrained(tmp_path, config=small_config(keep_first=True))
    assert dodo.tokenizer.pad_token_id is None
    before = (len(dodo.tokenizer), dodo.compressor.base.get_input_embeddings().weight.shape)
    texts = [TEXT, "a shorter one", "x"]
    together = dodo.compress(texts, ratio=2)
    answers = dodo.generate(together, ["one", "another one", "a third one"], max_new_tokens=4)
    alone = [dodo.generate(dodo.compress(text, ratio=2), "one", max_new_tokens=4) for text in texts]
    assert answers[0] == alone[0]
    assert dodo.tokenizer.pad_token_id is None
    assert (len(dodo.tokenizer), dodo.compressor.base.get_input_embeddings().weight.shape) == before


# -- machines without a GPU


def test_nothing_asks_for_cuda_or_flash_attention(tmp_path: Path) -> None:
    save_base(tmp_path)
    script = (
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "for name in ('flash_attn', 'bitsandbytes', 'triton', 'kernels'):\n"
        "    sys.modules[name] = None  # importing it fails\n"
        "import torch\n"
        "def refuse(*_): raise AssertionError('asked for CUDA')\n"
        "torch.cuda._lazy_init = refuse\n"
        "from dodo import Dodo\n"
        f"dodo = Dodo.from_pretrained({str(tmp_path)!r})\n"
        "nuggets = dodo.compress('the quick brown dodo', ratio=2)\n"
        "dodo.generate(nuggets, 'more', max_new_tokens=2)\n"
        "print(dodo.device, sorted(name for name in sys.modules if name.startswith('flash_attn') and sys.modules[name]))\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert made.stdout.split() == ["cpu", "[]"], made.stderr


def test_importing_dodo_loads_no_torch() -> None:
    script = "import sys, dodo; print([name for name in ('torch', 'transformers', 'peft') if name in sys.modules])"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert made.stdout.strip() == "[]", made.stderr


def test_loading_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base")
    copy = shutil.copytree(folder, tmp_path / "copy")
    Dodo.from_pretrained(folder).compress(TEXT)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {p.name: p.read_bytes() for p in copy.iterdir()}


def _untested(family: str) -> Any:
    config = AutoConfig.for_model(family, **{**COMMON, "vocab_size": 300, "head_dim": 8, "pad_token_id": 0})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_model_in_memory_of_an_untested_family_is_refused_unless_it_is_asked_for() -> None:
    model = _untested("granite")
    with pytest.raises(UnsupportedModelError, match="'granite' are not tested"):
        Dodo.from_model(model, byte_tokenizer(), small_config())
    dodo = Dodo.from_model(model, byte_tokenizer(), small_config(), allow_untested=True)
    nuggets = dodo.compress(TEXT, ratio=2)
    assert torch.allclose(nuggets.shift(9).shift(-9).keys, nuggets.keys, atol=1e-4)


@pytest.mark.parametrize("family", ["glm4", "exaone4", "ernie4_5", "helium"])
def test_a_family_whose_keys_turn_in_another_way_is_refused_though_it_is_asked_for(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'{family}' (can't hold nuggets|do not work)"):
        Dodo.from_model(_untested(family), byte_tokenizer(), small_config(), allow_untested=True)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_nats_of_tokens_are_those_of_the_bases_own_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2 caps its logits; how many are made at once changes nothing."""
    base: Any = tiny_model(family).eval()
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = backbone(base)(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = -base(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        for at_once in (512, 5):
            monkeypatch.setattr(architecture, "AT_ONCE", at_once)
            torch.testing.assert_close(token_nats(base, states, ids[:, 1:]), wanted, atol=1e-5, rtol=1e-5)
