"""`save_pretrained` and back: everything that was trained, nothing of the base."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dodo import Dodo
from dodo.adapter_files import SHIPPED, find
from dodo.config import DodoConfig, LoraSettings
from dodo.errors import DodoWarning, FingerprintMismatch, InputError
from tests.conftest import small_config, stir
from tests.standins.models import save_base, tiny_llama

TEXT = "the quick brown dodo"
FILES = {
    "README.md",
    "dodo_config.json",
    "scorer.safetensors",
    "phi/adapter_config.json",
    "phi/adapter_model.safetensors",
    "theta/adapter_config.json",
    "theta/adapter_model.safetensors",
}


def _trained(folder: Path, config: DodoConfig | None = None, *, tied: bool = False) -> Dodo:
    save_base(folder, model=tiny_llama(tie_word_embeddings=tied))
    dodo = Dodo.from_pretrained(folder, config=config or small_config(trained_ratios=(2.0, 9.0)))
    stir(dodo.compressor)
    dodo.stamp()
    return dodo


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _learned(dodo: Dodo) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in dodo.compressor.named_parameters() if p.requires_grad}


def test_every_setting_and_weight_survives_saving(tmp_path: Path) -> None:
    config = DodoConfig(
        feature_layer=1,
        ratio=4.5,
        trained_ratios=(2.0, 9.0),
        keep_first=False,
        positions="compact",
        selection="density",
        encoder=LoraSettings(rank=3, alpha=5.0, targets="all-linear"),
        decoder=LoraSettings(rank=2, alpha=7.0, targets=("q_proj", "o_proj")),
        seed=5,
    )
    dodo = _trained(tmp_path / "base", config)
    dodo.save_pretrained(tmp_path / "saved")
    loaded = Dodo.from_pretrained(tmp_path / "saved")
    assert loaded.config == dodo.config
    before, after = _learned(dodo), _learned(loaded)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.fingerprint == dodo.fingerprint
    nuggets = dodo.compress(TEXT)
    assert loaded.generate(nuggets, "more", max_new_tokens=5) == dodo.generate(nuggets, "more", max_new_tokens=5)


def test_a_saved_folder_holds_two_peft_adapters_scorer_settings_and_card(tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    assert set(_files(tmp_path / "saved")) == FILES
    assert set(load_file(tmp_path / "saved" / "scorer.safetensors")) == {
        "scorer.hidden.weight",
        "scorer.hidden.bias",
        "scorer.output.weight",
        "scorer.output.bias",
        "soft_token",
    }
    for name in ("phi", "theta"):
        assert json.loads((tmp_path / "saved" / name / "adapter_config.json").read_text())["peft_type"] == "LORA"
        assert all(".lora_" in key for key in load_file(tmp_path / "saved" / name / "adapter_model.safetensors"))


def test_peft_itself_can_read_the_adapters(tmp_path: Path) -> None:
    from peft import PeftModel
    from peft.utils import load_peft_weights

    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "saved")
    weights = load_peft_weights(str(tmp_path / "saved" / "phi"), device="cpu")
    assert len(weights) == len(dodo.compressor.adapters.parameters("phi"))
    assert PeftModel is not None


def test_no_file_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "saved")
    for adapter in ("phi", "theta"):
        assert str(tmp_path) not in (tmp_path / "saved" / adapter / "adapter_config.json").read_text(encoding="utf-8")


def test_the_shipped_adapters_name_no_folder_and_are_small_enough() -> None:
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert files
    assert sum(path.stat().st_size for path in files) < 25_000_000
    for path in SHIPPED.rglob("adapter_config.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] == ""


def test_the_card_says_what_it_is_of(tmp_path: Path) -> None:
    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "2 to 9" in card and str(dodo.config.base_fingerprint) in card
    assert "base_model:" not in card  # the hub refuses folders there
    dodo.save_pretrained(tmp_path / "saved", card="mine")
    assert (tmp_path / "saved" / "README.md").read_text() == "mine"


def test_half_precision_storage_halves_the_files_and_rounds_the_weights(tmp_path: Path) -> None:
    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "whole")
    dodo.save_pretrained(tmp_path / "half", dtype=torch.float16)
    for path in (tmp_path / "half").rglob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}
    before, after = _learned(dodo), _learned(Dodo.from_pretrained(tmp_path / "half"))
    for name in before:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name].half().to(before[name].dtype)), name


def test_saving_over_a_saved_folder_replaces_it(tmp_path: Path) -> None:
    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "saved")
    stir(dodo.compressor, seed=8)
    dodo.stamp()
    dodo.save_pretrained(tmp_path / "saved")
    assert set(_files(tmp_path / "saved")) == FILES
    assert Dodo.from_pretrained(tmp_path / "saved").fingerprint == dodo.fingerprint


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "saved")
    before = _files(tmp_path / "saved")
    stir(dodo.compressor, seed=8)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dodo.adapter_files.save_file", full)
    with pytest.raises(InputError, match="could not save .*No space left"):
        dodo.save_pretrained(tmp_path / "saved")
    assert _files(tmp_path / "saved") == before


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    dodo = _trained(tmp_path / "base")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="could not save"):
        dodo.save_pretrained(tmp_path / "file" / "saved")


def test_adapters_on_another_base_are_refused_unless_told_to_go_on(tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    sibling = save_base(tmp_path / "sibling", model=tiny_llama(seed=1))
    with pytest.raises(FingerprintMismatch, match="ignore_fingerprint=True"):
        Dodo.from_pretrained(tmp_path / "saved", base=sibling)
    forced = Dodo.from_pretrained(tmp_path / "saved", base=sibling, ignore_fingerprint=True)
    assert forced.is_trained
    assert forced.generate(forced.compress(TEXT, ratio=3), "more", max_new_tokens=2) is not None


def test_adapters_on_a_base_of_another_shape_are_one_clear_error(tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    wider = save_base(tmp_path / "wider", model=tiny_llama(hidden_size=64))
    with pytest.raises(InputError) as caught:
        Dodo.from_pretrained(tmp_path / "saved", base=wider, ignore_fingerprint=True)
    assert "\n" not in str(caught.value)


def test_a_base_where_adapters_were_expected_is_refused(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    with pytest.raises(InputError, match="there are no adapters"):
        Dodo.from_pretrained(tmp_path / "base", base=tmp_path / "base")


def _delete(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _pickle(path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, path)


def _lose_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, path)


@pytest.mark.parametrize("harm", [_delete, _truncate, _empty, _pickle, _lose_a_tensor])
@pytest.mark.parametrize("file", ["scorer.safetensors", "phi/adapter_model.safetensors", "theta/adapter_model.safetensors"])
def test_a_missing_or_damaged_weight_file_is_one_clear_error(harm: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    harm(tmp_path / "saved" / file)
    with pytest.raises(InputError, match=file.split("/")[0]) as caught:
        Dodo.from_pretrained(tmp_path / "saved")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("harm", [_delete, _truncate, _empty])
def test_a_missing_or_damaged_adapter_configuration_is_one_clear_error(harm: Callable[[Path], None], tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    harm(tmp_path / "saved" / "theta" / "adapter_config.json")
    with pytest.raises(InputError, match="theta") as caught:
        Dodo.from_pretrained(tmp_path / "saved")
    assert "\n" not in str(caught.value)


def test_adapters_of_another_rank_than_configured_are_one_clear_error(tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "dodo_config.json"
    config = json.loads(path.read_text())
    config["encoder"]["rank"] = 5
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="phi") as caught:
        Dodo.from_pretrained(tmp_path / "saved")
    assert "\n" not in str(caught.value)


def test_a_model_that_was_half_loaded_does_not_pass_for_what_it_was(tmp_path: Path) -> None:
    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "saved")
    stir(dodo.compressor, seed=8)
    dodo.stamp()
    before = dodo.fingerprint
    (tmp_path / "saved" / "theta" / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match="theta"):
        dodo.load_adapters(tmp_path / "saved")
    assert dodo.fingerprint != before


@pytest.mark.parametrize("tied", [True, False])
def test_the_base_is_byte_identical_after_a_training_step_saving_and_loading(tied: bool, tmp_path: Path) -> None:
    dodo = _trained(tmp_path / "base", tied=tied)
    on_disk = _files(tmp_path / "base")
    weights = {name: p.detach().clone() for name, p in dodo.compressor.base.named_parameters() if ".lora_" not in name}
    learning = [p for p in dodo.compressor.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    ids = torch.tensor([dodo.document_ids(TEXT)])
    before = _learned(dodo)
    nuggets = dodo.compressor.encode(ids, ratio=3)
    dodo.compressor.decode(nuggets, ids, soft_token=True).logsumexp(-1).sum().backward()
    optimizer.step()
    after = _learned(dodo)
    assert not torch.equal(before["soft_token"], after["soft_token"])
    dodo.stamp()
    dodo.save_pretrained(tmp_path / "saved")
    loaded = Dodo.from_pretrained(tmp_path / "saved")
    for model in (dodo, loaded):
        base = model.compressor.base
        assert (base.get_input_embeddings().weight is base.get_output_embeddings().weight) is tied
        found = dict(base.named_parameters())
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert _files(tmp_path / "base") == on_disk
    assert loaded.fingerprint == dodo.fingerprint


@pytest.mark.skipif(os.name == "nt", reason="no modes")
def test_saved_adapters_are_as_readable_as_other_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").rglob("*") if path.is_file()} == {0o644}


@pytest.mark.parametrize(
    "other", [{"feature_layer": 1}, {"selection": "density"}, {"keep_first": True}, {"positions": "compact"}]
)
def test_adapters_are_not_loaded_into_a_model_of_other_settings(other: dict[str, object], tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    same = Dodo.from_pretrained(tmp_path / "base", config=small_config())
    same.load_adapters(tmp_path / "saved")
    assert same.is_trained
    differing = Dodo.from_pretrained(tmp_path / "base", config=small_config(**other))
    before = differing.fingerprint
    with pytest.raises(InputError, match=next(iter(other))):
        differing.load_adapters(tmp_path / "saved")
    assert differing.fingerprint == before
    save_base(tmp_path / "second", model=tiny_llama(seed=4))
    with pytest.raises(FingerprintMismatch, match="belong to base weights"):
        Dodo.from_pretrained(tmp_path / "second", config=small_config()).load_adapters(tmp_path / "saved")


def test_a_save_that_is_cut_short_leaves_no_set_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dodo = _trained(tmp_path / "base")
    dodo.save_pretrained(tmp_path / "saved")
    stir(dodo.compressor, seed=8)
    moved: list[Path] = []
    replace = Path.replace

    def stopped(self: Path, target: Path) -> Path:
        if len(moved) == 4:
            raise OSError(5, "Input/output error")
        moved.append(self)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(InputError, match="could not save"):
        dodo.save_pretrained(tmp_path / "saved")
    monkeypatch.undo()
    with pytest.raises(InputError, match="saving them was cut short; save them again"):
        Dodo.from_pretrained(tmp_path / "saved")
    dodo.save_pretrained(tmp_path / "saved")
    assert Dodo.from_pretrained(tmp_path / "saved").fingerprint.base == dodo.fingerprint.base


@pytest.mark.parametrize("file", ["phi/adapter_model.safetensors", "scorer.safetensors"])
def test_adapters_that_are_not_finite_are_refused(file: str, tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / file)
    tensors[sorted(tensors)[0]].view(-1)[0] = torch.nan
    save_file(tensors, tmp_path / "saved" / file)
    with pytest.raises(InputError, match="not all finite"):
        Dodo.from_pretrained(tmp_path / "saved")


def test_adapters_find_a_base_that_was_named_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_base(tmp_path / "m" / "base")
    monkeypatch.chdir(tmp_path)
    dodo = Dodo.from_pretrained("m/base")
    dodo.save_pretrained("saved")
    monkeypatch.chdir(tmp_path / "m")
    assert Dodo.from_pretrained("../saved").fingerprint == dodo.fingerprint
    (tmp_path / "m" / "base").rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"it is the base that the adapters in \.\./saved name; pass another place as base="):
        Dodo.from_pretrained("../saved")
    moved = Dodo.from_pretrained("../saved", base=tmp_path / "moved")
    assert moved.fingerprint == dodo.fingerprint
    moved.save_pretrained("../again")
    assert Dodo.from_pretrained("../again").fingerprint == dodo.fingerprint


def test_the_folder_of_a_run_says_where_its_adapters_are(tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "run" / "last")
    with pytest.raises(InputError, match="is the folder of a run; its adapters are in .*last"):
        Dodo.from_pretrained(tmp_path / "run")


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1" * 5000, "[" * 200_000])
def test_numbers_and_texts_beyond_all_bounds_are_one_clear_error(number: str, tmp_path: Path) -> None:
    _trained(tmp_path / "base").save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "dodo_config.json"
    values = path.read_text(encoding="utf-8")
    path.write_text(values.replace('"reach": ', f'"reach": {number}, "was": ', 1), encoding="utf-8")
    with pytest.raises(InputError, match=r"dodo_config\.json") as caught:
        Dodo.from_pretrained(tmp_path / "saved")
    assert "\n" not in str(caught.value)


def test_a_folder_with_the_name_of_what_ships_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.warns(DodoWarning, match=r"for the folder of this name say \..smollm2-135m"):
        assert find("smollm2-135m") == SHIPPED / "smollm2-135m"
    assert find("./smollm2-135m") is None
