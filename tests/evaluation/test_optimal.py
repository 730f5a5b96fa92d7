"""Algorithm 1 against the double loop that it is."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dodo.errors import InputError
from dodo.evaluation import optimal
from dodo.evaluation.methods import make_method
from dodo.evaluation.optimal import OptimalSelection, greedy, nats_of, take
from dodo.evaluation.tasks import Item
from dodo.model import Dodo
from tests.cli.tiny import TEXT, save_model
from tests.conftest import stir


@pytest.fixture(scope="module")
def dodo(tmp_path_factory: pytest.TempPathFactory) -> Dodo:
    made = Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("optimal") / "base"))
    stir(made.compressor)
    return made


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENCODED": 16, "WHOLE": 4, "SCORED": 6, "AT_ONCE": 5}.items():
        monkeypatch.setattr(optimal, name, value)


def double_loop(chosen: list[int], tokens: int, nats: Callable[[list[int]], float]) -> tuple[list[int], float]:
    """Algorithm 1 as it is written: each nugget's place in turn, each free place in turn, better ones taken at once."""
    best = nats(chosen)
    for slot in range(len(chosen)):
        for other in [i for i in range(tokens) if i not in chosen]:
            tried = [*chosen[:slot], other, *chosen[slot + 1 :]]
            if (found := nats(tried)) < best:
                best, chosen = found, tried
    return sorted(chosen), best


@pytest.mark.parametrize("seed", range(6))
def test_the_search_equals_the_double_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    alone, pairs = torch.randn(12, generator=generator), torch.randn(12, 12, generator=generator)

    def nats(choices: Tensor) -> Tensor:
        return alone[choices].sum(-1) + pairs[choices[:, :, None], choices[:, None, :]].sum((1, 2))

    first = torch.randperm(12, generator=generator)[:4].sort().values
    found, before, after = greedy(first, 12, nats, at_once=3)
    wanted, least = double_loop(first.tolist(), 12, lambda choice: float(nats(torch.tensor([sorted(choice)]))[0]))
    assert (found.tolist(), after) == (wanted, pytest.approx(least, rel=1e-6))
    assert before == pytest.approx(float(nats(first[None])[0]), rel=1e-6)
    assert after < before
    fixed, _, _ = greedy(first, 12, nats, keep=1)
    assert int(first[0]) in fixed.tolist()


def test_all_places_taken_is_the_best_there_is() -> None:
    found, before, after = greedy(torch.arange(3), 3, lambda choices: choices.sum(-1).float())
    assert (found.tolist(), before, after) == ([0, 1, 2], 3.0, 3.0)


def test_a_subset_of_all_states_is_what_encoding_with_that_selection_gives(dodo: Dodo) -> None:
    ids = torch.tensor([dodo.document_ids(TEXT)[:17]])
    with torch.no_grad():
        made = dodo.compressor.encode(ids, ratio=4)
        subset = take(dodo.compressor.encode(ids, ratio=1), made.indices)
        for name in ("keys", "values", "positions", "indices", "token_ids", "mask", "next_positions"):
            torch.testing.assert_close(getattr(subset, name), getattr(made, name), atol=1e-5, rtol=1e-5, msg=name)


def test_the_loss_is_that_of_the_tokens_behind_those_read(dodo: Dodo) -> None:
    ids = dodo.document_ids(TEXT)
    behind = torch.tensor(ids[17:27])
    with torch.no_grad():
        made = dodo.compressor.encode(torch.tensor([ids[:17]]), ratio=4)
        whole = dodo.compressor.encode(torch.tensor([ids[:17]]), ratio=1)
        logits = dodo.compressor.decode(made, behind[None])[0].float()
        wanted = torch.nn.functional.cross_entropy(logits[3:9], behind[4:], reduction="sum")
        found = nats_of(dodo.compressor, whole, made.indices.repeat(2, 1), behind, 4)
    torch.testing.assert_close(found, wanted.repeat(2), atol=1e-4, rtol=1e-4)


def test_a_record_of_the_search(dodo: Dodo, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT}) + "\n" + json.dumps({"text": TEXT[5:]}))
    task, method = OptimalSelection(), make_method("dodo", dodo, 4.0)
    items = task.items([str(tmp_path / "texts.jsonl")], dodo.tokenizer, None, 0)
    made = {item.key: row for item, row in zip(items, task.run(method, items), strict=True)}
    found = task.measure(items, made)["all"]
    assert found["n"] == 2
    for row in made.values():
        assert (row["nuggets"], row["counted"], row["tokens"]) == (4, 6, 17)
        assert 0 <= row["moved"] <= 4
        assert row["after"] <= row["before"]
    nats = sum(row["before"] for row in made.values())
    assert found["perplexity before"] == pytest.approx(math.exp(nats / 12))
    assert found["perplexity after / before"] <= 1
    with pytest.raises(InputError, match="selects no tokens"):
        task.run(make_method("full", dodo, 4.0), [Item("0", TEXT, "all")])
