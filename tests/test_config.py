"""`dodo_config.json`: nothing is lost, nothing is guessed."""

import dataclasses
import json
from pathlib import Path

import pytest

from dodo.config import CONFIG_VERSION, DodoConfig, LoraSettings
from dodo.errors import InputError

UNUSUAL = DodoConfig(
    feature_layer=5,
    ratio=7.5,
    trained_ratios=(2.0, 20.0),
    trained_as="icae",
    keep_first=False,
    positions="compact",
    selection="density",
    reach=4.5,
    scores_by_use=True,
    runs=True,
    encoder=LoraSettings(rank=3, alpha=1.5, targets="all-linear"),
    decoder=LoraSettings(rank=9, alpha=4.0, targets=("q_proj", "o_proj")),
    seed=11,
    base="someone/base",
    base_fingerprint="0123456789abcdef",
)


def test_the_unusual_configuration_differs_from_the_defaults_in_every_field() -> None:
    for unusual, plain in ((UNUSUAL, DodoConfig()), (UNUSUAL.encoder, LoraSettings()), (UNUSUAL.decoder, LoraSettings())):
        for field in dataclasses.fields(unusual):
            assert getattr(unusual, field.name) != getattr(plain, field.name), field.name


@pytest.mark.parametrize("config", [DodoConfig(), UNUSUAL], ids=["defaults", "unusual"])
def test_no_setting_is_lost_or_changes_type_in_a_round_trip(config: DodoConfig, tmp_path: Path) -> None:
    (tmp_path / "dodo_config.json").write_text(config.to_json(), encoding="utf-8")
    loaded = DodoConfig.load(tmp_path / "dodo_config.json")
    assert loaded == config
    assert isinstance(loaded.decoder.targets, type(config.decoder.targets))
    assert isinstance(loaded.trained_ratios, type(config.trained_ratios))
    assert hash(loaded) == hash(config)


def test_each_single_setting_survives_a_round_trip() -> None:
    for field in dataclasses.fields(DodoConfig):
        config = dataclasses.replace(DodoConfig(), **{field.name: getattr(UNUSUAL, field.name)})
        assert DodoConfig.from_json(config.to_json()) == config, field.name


def test_a_setting_that_is_not_in_the_file_has_its_default() -> None:
    assert DodoConfig.from_json('{"version": 1, "seed": 4}') == DodoConfig(seed=4)


def test_the_version_of_the_format_is_written_first() -> None:
    assert next(iter(json.loads(DodoConfig().to_json()).items())) == ("version", CONFIG_VERSION)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ration": 3}, "unknown keys: ration"),
        ({"encoder": {"ranks": 3}}, "encoder has unknown keys: ranks"),
        ({"version": CONFIG_VERSION + 1}, "upgrade"),
        ({"version": None}, "no valid format version"),
        ({"version": True}, "no valid format version"),
        ({"version": "1"}, "no valid format version"),
        ({"feature_layer": "3"}, "feature_layer must be a whole number of at least 1, not '3'"),
        ({"feature_layer": 3.0}, "feature_layer"),
        ({"feature_layer": True}, "feature_layer"),
        ({"feature_layer": 0}, "feature_layer"),
        ({"seed": -1}, "seed"),
        ({"ratio": "10"}, "ratio"),
        ({"ratio": 0.5}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"ratio": float("inf")}, "ratio"),
        ({"ratio": None}, "ratio"),
        ({"trained_ratios": 10}, "trained_ratios"),
        ({"trained_ratios": [10]}, "trained_ratios"),
        ({"trained_ratios": [20, 10]}, "trained_ratios"),
        ({"trained_ratios": ["a", "b"]}, "trained_ratios"),
        ({"trained_as": "dodo"}, "trained_as must be one of compressor, autoregressive"),
        ({"trained_as": ["icae"]}, "trained_as"),
        ({"keep_first": "no"}, "keep_first"),
        ({"positions": "relative"}, "positions"),
        ({"positions": ["original"]}, "positions"),
        ({"encoder": 32}, "encoder"),
        ({"encoder": {"rank": 0}}, "encoder: LoRA rank"),
        ({"decoder": {"rank": 2.5}}, "decoder: LoRA rank"),
        ({"encoder": {"alpha": "64"}}, "encoder: LoRA alpha"),
        ({"encoder": {"targets": "everything"}}, "encoder: LoRA targets"),
        ({"encoder": {"targets": []}}, "encoder: LoRA targets"),
        ({"encoder": {"targets": [1]}}, "encoder: LoRA targets"),
        ({"base": 3}, "base"),
        ({"base_fingerprint": []}, "base_fingerprint"),
    ],
)
def test_a_bad_file_is_one_clear_error(changes: dict[str, object], message: str) -> None:
    text = json.dumps(json.loads(DodoConfig().to_json()) | changes)
    with pytest.raises(InputError, match=message) as caught:
        DodoConfig.from_json(text, where="here.json")
    assert "here.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '"text"', "3"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="JSON"):
        DodoConfig.from_json(text)


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_what_is_no_text_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "dodo_config.json"
    if kind == "folder":
        path.mkdir()
    if kind == "binary":
        path.write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(InputError, match="could not read"):
        DodoConfig.load(path)


def test_bad_values_are_refused_at_construction_too() -> None:
    with pytest.raises(InputError, match="rank"):
        LoraSettings(rank=0)
    with pytest.raises(InputError, match="ratio"):
        DodoConfig(ratio=0)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DodoConfig().ratio = 3.0  # type: ignore[misc]


def test_what_nuggets_belong_to_stays_as_it_was_when_settings_are_added() -> None:
    """A configuration without the newer settings is told as it always was, byte by byte."""
    first = {
        "version": 1,
        "feature_layer": 3,
        "ratio": 1.0,
        "trained_ratios": None,
        "keep_first": True,
        "positions": "original",
        "selection": "density",
        "encoder": {"rank": 8, "alpha": 16.0, "targets": "qkv"},
        "decoder": {"rank": 32, "alpha": 64.0, "targets": "qkv"},
        "seed": 0,
        "base": None,
        "base_fingerprint": None,
    }
    config = DodoConfig(
        selection="density", encoder=LoraSettings(rank=8, alpha=16.0), ratio=7.5, base="someone/base", seed=3, reach=4.5
    )
    assert config.identity() == json.dumps(first, indent=2) + "\n"
    covering = dataclasses.replace(config, selection="coverage")
    assert '"reach": 4.5' in covering.identity()
    assert "scores_by_use" not in covering.identity()
    assert "runs" not in covering.identity()
    assert "runs" not in dataclasses.replace(config, runs=True).identity()
    assert '"runs": true' in dataclasses.replace(covering, runs=True).identity()
    assert '"scores_by_use": true' in dataclasses.replace(config, scores_by_use=True).identity()
