"""Table 5, number by number."""

import pytest
import torch

from dodo.errors import InputError
from dodo.parameters import BASE_CONFIGS, base_config, parameters_of, parameters_of_config, people_count, people_share

LLAMAS = ["llama-7b", "llama-2-7b", "llama-2-7b-chat"]


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_7b_has_the_counts_of_table_5(name):
    rows = parameters_of_config(base_config(name), name=name)
    assert [row.count for row in rows] == [
        6_738_415_616,
        32 * 3 * (4096 + 4096) * 32,
        32 * 3 * (4096 + 4096) * 32,
        4096 * 4096 + 4096 + 4096 + 1,
        4096,
    ]
    assert [people_count(row.count) for row in rows] == ["6.74B", "25.2M", "25.2M", "16.8M", "4,096"]


@pytest.mark.parametrize("name", LLAMAS)
def test_llama_7b_has_the_percentages_of_table_5(name):
    rows = parameters_of_config(base_config(name), name=name)
    assert [people_share(row.percentage) for row in rows] == ["99.01%", "0.37%", "0.37%", "0.25%", "<0.0001%"]


def test_only_the_base_is_frozen():
    rows = parameters_of_config(base_config("llama-7b"), name="llama-7b")
    assert [row.trainable for row in rows] == [False, True, True, True, True]


def test_tied_embeddings_count_once():
    first, *_ = parameters_of_config(base_config("smollm2-135m"), name="smollm2-135m")
    assert first.count == 134_515_008


def test_a_model_in_memory_has_the_counts_of_its_configuration(pair):
    for family in ("llama", "llama, tied", "qwen3", "phi3"):
        made = pair(family)
        compressor = made.compressor
        rows = parameters_of(compressor, name=family)
        assert rows == parameters_of_config(made.base.config, name=family, settings=compressor.config)
        assert rows[0].count == sum(parameter.numel() for parameter in made.base.parameters())
        trainable = sum(parameter.numel() for parameter in compressor.parameters() if parameter.requires_grad)
        assert trainable == sum(row.count for row in rows if row.trainable)


def test_percentages_add_up_to_100():
    for name in BASE_CONFIGS:
        assert sum(row.percentage for row in parameters_of_config(base_config(name), name=name)) == pytest.approx(100)


def test_counting_touches_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    parameters_of_config(base_config("smollm2-135m"), name="smollm2-135m")
    torch.testing.assert_close(torch.rand(3), expected)


def test_unknown_base_configuration_is_refused_with_the_known_names():
    with pytest.raises(InputError, match="llama-7b"):
        base_config("gpt-5")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (999, "999"), (332_929, "332,929"), (1_000_000, "1.0M"), (25_165_824, "25.2M"), (6_738_415_616, "6.74B")],
)
def test_counts_are_printed_as_in_table_5(count, shown):
    assert people_count(count) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "0.00%"), (6e-5, "<0.0001%"), (3.4e-4, "0.0003%"), (0.005, "0.01%"), (99.0137, "99.01%")]
)
def test_shares_are_printed_as_in_table_5(share, shown):
    assert people_share(share) == shown
