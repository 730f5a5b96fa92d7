"""4-bit and 8-bit bases through bitsandbytes, which has a CPU build."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dodo import Dodo
from dodo.base import load_base
from dodo.cli import dodo as command
from dodo.errors import DodoError, InputError
from dodo.parameters import parameters_of
from tests.conftest import small_config, stir
from tests.standins.models import save_base, tiny_llama

TEXT = "the quick brown dodo"
BOTH = pytest.mark.parametrize("bits", ["4bit", "8bit"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is an extra")
    return save_base(tmp_path / "base", model=tiny_llama(hidden_size=64, intermediate_size=128))  # 4-bit blocks hold 64


def _quantized(folder: Path, bits: str) -> Dodo:
    dodo = Dodo.from_pretrained(folder, quantization=bits, device="cpu", config=small_config())
    stir(dodo.compressor)
    dodo.stamp()
    return dodo


@BOTH
def test_a_quantized_base_holds_fewer_bytes_and_the_same_parameters(bits: str, folder: Path) -> None:
    plain, small = load_base(folder).model, load_base(folder, quantization=bits, device="cpu").model
    assert small.get_memory_footprint() < plain.get_memory_footprint()
    weight = small.model.layers[0].self_attn.q_proj.weight
    assert weight.dtype == (torch.uint8 if bits == "4bit" else torch.int8)
    counts = [
        parameters_of(Dodo.from_pretrained(folder, quantization=q, device="cpu").compressor, name="x")[0].count
        for q in (None, bits)
    ]
    assert counts[0] == counts[1]


@BOTH
def test_a_quantized_base_keeps_the_fingerprint_of_its_files(bits: str, folder: Path) -> None:
    assert load_base(folder, quantization=bits, device="cpu").fingerprint == load_base(folder).fingerprint


@BOTH
def test_compressing_and_answering_work(bits: str, folder: Path) -> None:
    dodo = _quantized(folder, bits)
    nuggets = dodo.compress([TEXT, "short"], ratio=2)
    assert bool(torch.isfinite(nuggets.keys.float()).all())
    first = dodo.generate(nuggets, ["more", "and more"], max_new_tokens=3)
    assert dodo.generate(nuggets, ["more", "and more"], max_new_tokens=3) == first


@BOTH
def test_scorer_and_adapters_are_in_float(bits: str, folder: Path) -> None:
    compressor = _quantized(folder, bits).compressor
    learned = [*compressor.scorer.parameters(), *compressor.adapters.parameters(), compressor.soft_token]
    assert {p.dtype for p in learned} == {torch.float32}
    assert compressor.score(torch.arange(3, 20)[None]).dtype == torch.float32


@BOTH
def test_features_come_from_the_base_with_adapters_off(bits: str, folder: Path) -> None:
    compressor = _quantized(folder, bits).compressor
    ids = torch.arange(3, 20)[None]
    before = compressor.score(ids)
    with torch.no_grad():
        for parameter in compressor.adapters.parameters():
            parameter.mul_(5)
    torch.testing.assert_close(compressor.score(ids), before, rtol=0, atol=0)


@BOTH
def test_one_step_trains_adapters_and_scorer_and_leaves_the_base(bits: str, folder: Path) -> None:
    dodo = _quantized(folder, bits)
    compressor = dodo.compressor
    base = {name: p.detach().clone() for name, p in compressor.base.named_parameters() if ".lora_" not in name}
    learned = {name: p for name, p in compressor.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in learned.items()}
    ids = torch.tensor([dodo.document_ids(TEXT)])
    compressor.decode(compressor.encode(ids, ratio=3), ids, soft_token=True).float().logsumexp(-1).sum().backward()
    for name, parameter in learned.items():
        assert parameter.grad is None or bool(torch.isfinite(parameter.grad).all()), name
    torch.optim.SGD(list(learned.values()), lr=0.1).step()
    changed = {name for name, p in learned.items() if not torch.equal(p, before[name])}
    for part in (".phi.", ".theta.", "scorer.", "soft_token"):
        assert any(part in name for name in changed), part
    after = dict(compressor.base.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in base.items())


@BOTH
def test_gradients_are_the_same_after_an_evaluation(bits: str, folder: Path) -> None:
    """bitsandbytes packs 4-bit weights for inference on some CPUs, in place and without gradients: see `_keep_differentiable`."""

    def gradients(*, evaluate_first: bool) -> list[torch.Tensor]:
        dodo = _quantized(folder, bits)
        if evaluate_first:
            dodo.generate(dodo.compress(TEXT, ratio=2), "more", max_new_tokens=2)
        compressor = dodo.compressor.train()
        ids = torch.tensor([dodo.document_ids(TEXT)])
        compressor.decode(compressor.encode(ids, ratio=3), ids).float().logsumexp(-1).sum().backward()
        return [p.grad for p in compressor.parameters() if p.grad is not None]

    torch.testing.assert_close(gradients(evaluate_first=True), gradients(evaluate_first=False))


@BOTH
def test_adapters_trained_on_a_quantized_base_load_on_the_plain_one(bits: str, folder: Path, tmp_path: Path) -> None:
    dodo = _quantized(folder, bits)
    dodo.save_pretrained(tmp_path / "saved")
    plain = Dodo.from_pretrained(tmp_path / "saved")
    again = Dodo.from_pretrained(tmp_path / "saved", quantization=bits, device="cpu")
    assert plain.fingerprint == again.fingerprint == dodo.fingerprint


@BOTH
def test_the_command_takes_it(bits: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--model", str(folder), "--quantization", bits, "--device", "cpu", "--json"]
    shown = CliRunner().invoke(command, ["info", *flags])
    assert json.loads(shown.stdout)["dtype"] == f"{bits}, float32"
    asked = CliRunner().invoke(command, ["ask", str(tmp_path / "text.txt"), "what?", *flags, "--max-new-tokens", "2"])
    assert asked.exit_code == 0, asked.stderr


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'3bit'"):
        load_base(save_base(tmp_path), quantization="3bit")  # type: ignore[arg-type]


def test_without_bitsandbytes_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    Dodo(load_base(save_base(tmp_path / "base"))).save_pretrained(tmp_path / "adapters")
    with pytest.raises(DodoError, match=r"dodo-lm\[quantized\]'$"):  # and nothing of the base's place, which is right
        Dodo.from_pretrained(tmp_path / "adapters", quantization="4bit")
