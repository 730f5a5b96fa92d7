"""Laws of `dodo info`."""

import json
import shutil

import pytest


@pytest.mark.parametrize("name", ["llama-7b", "llama-2-7b", "llama-2-7b-chat"])
def test_base_config_prints_table_5_of_the_paper(name, run):
    lines = run("info", "--base-config", name).stdout.splitlines()
    cells = [line.split() for line in lines[-5:]]
    assert cells == [
        [name, "6.74B", "99.01%", "no"],
        ["encoder", "(phi)", "25.2M", "0.37%", "yes"],
        ["decoder", "(theta)", "25.2M", "0.37%", "yes"],
        ["scorer", "(varphi)", "16.8M", "0.25%", "yes"],
        ["soft", "prompt", "(theta)", "4,096", "<0.0001%", "yes"],
    ]


def test_base_config_gives_exact_numbers_as_json(run):
    report = json.loads(run("info", "--base-config", "llama-7b", "--json").stdout)
    assert [row["count"] for row in report["parameters"]] == [6_738_415_616, 25_165_824, 25_165_824, 16_785_409, 4_096]
    assert [row["trainable"] for row in report["parameters"]] == [False, True, True, True, True]
    assert sum(row["percentage"] for row in report["parameters"]) == pytest.approx(100)


def test_model_shows_its_own_configuration(run, models):
    report = json.loads(run("info", "--model", models.trained, "--json").stdout)
    assert report["adapters"] == "trained"
    assert report["base"] == models.base
    assert report["layers"] == 3
    assert report["window"] == 512
    assert report["config"]["trained_ratios"] == [2.0, 4.0]
    assert report["cache_bytes_per_token"] == 2 * 3 * 2 * 8 * 4


def test_fresh_adapters_are_announced(run, models):
    result = run("info", "--model", models.base)
    assert "note: adapters are fresh (untrained)" in result.stderr
    assert "trained ratios" in result.stdout


def test_base_config_and_model_together_are_refused(run, models):
    result = run("info", "--base-config", "llama-7b", "--model", models.base)
    assert result.exit_code == 2
    assert f"--model {models.base}: has no effect" in result.stderr


def test_base_takes_the_place_of_the_one_that_the_adapters_name(run, models, tmp_path):
    copy = shutil.copytree(models.base, tmp_path / "copy")
    shown = json.loads(run("info", "--model", models.trained, "--base", copy, "--json").stdout)
    assert shown["base"] == str(copy)
    assert shown["adapters"] == "trained"


@pytest.mark.parametrize(("model", "named"), [("trained", "trained on base weights"), ("base", "no adapters")])
def test_a_base_that_does_not_fit_is_refused(run, models, model, named):
    failed = run("info", "--model", getattr(models, model), "--base", models.other)
    assert failed.exit_code in (1, 2)
    assert named in failed.stderr


def test_a_base_that_is_none_is_named_with_its_flag(run, models, tmp_path):
    failed = run("info", "--model", models.trained, "--base", tmp_path)
    assert failed.exit_code == 2
    assert f"--base {tmp_path}: " in failed.stderr


@pytest.mark.parametrize(("flag", "value"), [("--base", "other"), ("--quantization", "4bit"), ("--device", "cpu")])
def test_flags_of_loading_have_no_effect_with_base_config_and_are_refused(run, no_model, flag, value):
    failed = run("info", "--base-config", "llama-7b", flag, value)
    assert failed.exit_code == 2
    assert f"{flag} {value}" in failed.stderr


def test_unknown_base_config_is_a_usage_error_that_names_the_known(run):
    result = run("info", "--base-config", "gpt-5")
    assert result.exit_code == 2
    assert "llama-2-7b-chat" in result.stderr


@pytest.mark.parametrize("model", ["no/such-model", "./nowhere", "/dev/null"])
def test_model_that_does_not_exist_is_a_usage_error(model, run):
    result = run("info", "--model", model)
    assert result.exit_code == 2
    assert f"--model {model}" in result.stderr


def test_the_list_of_base_configs_is_the_one_in_parameters():
    from dodo.cli.info import BASE_CONFIG_NAMES
    from dodo.parameters import BASE_CONFIGS

    assert tuple(BASE_CONFIGS) == BASE_CONFIG_NAMES
