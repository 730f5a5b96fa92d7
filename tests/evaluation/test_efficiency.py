"""Cost by length."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dodo.errors import InputError
from dodo.evaluation import efficiency
from dodo.evaluation.efficiency import Efficiency, break_even_length
from dodo.evaluation.methods import cached, make_method, states_of
from dodo.model import Dodo
from tests.cli.tiny import TEXT, save_model


@pytest.fixture(scope="module")
def dodo(tmp_path_factory: pytest.TempPathFactory) -> Dodo:
    return Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("efficiency") / "base"))


def test_what_is_held_is_a_ratio_th_of_the_whole_cache(dodo: Dodo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "NEW_TOKENS", 3)
    monkeypatch.setattr(efficiency, "ROUNDS", 1)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": TEXT}) for _ in range(9)), encoding="utf-8")
    task, method = Efficiency([41, 81]), make_method("dodo", dodo, 4.0)
    items = task.items([str(tmp_path / "texts.jsonl")], dodo.tokenizer, None, 0)
    made = {item.key: row for item, row in zip(items, task.run(method, items), strict=True)}
    found = task.measure(items, made)
    assert list(found) == ["41 tokens", "81 tokens", "one question"]
    sooner = {n: found[f"{n} tokens"]["questions from which it is sooner"] == 1 for n in (41, 81)}
    assert found["one question"] == {"n": 2, "sooner from tokens": 41 if all(sooner.values()) else 81 if sooner[81] else None}
    for n, values in ((41, found["41 tokens"]), (81, found["81 tokens"])):
        states = (n - 1) // 4 + 1
        assert values["states each"] == states
        assert values["bytes held"] * n == values["whole: bytes held"] * states
        assert all(values[name] > 0 for name in ("encode, s", "whole: read, s", "first token, s", "whole: first token, s"))


@pytest.mark.parametrize("name", ["kvpress-knorm", "llmlingua"])
def test_a_peer_has_the_base_beside_it(dodo: Dodo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(efficiency, "NEW_TOKENS", 3)
    monkeypatch.setattr(efficiency, "ROUNDS", 1)
    monkeypatch.setattr("dodo.evaluation.peers.SCRIPT", Path(__file__).parents[1] / "standins" / "peer.py")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": TEXT}) for _ in range(9)), encoding="utf-8")
    task, method = Efficiency([41]), make_method(name, dodo, 4.0, peers_python=Path(sys.executable))
    items = task.items([str(tmp_path / "texts.jsonl")], dodo.tokenizer, None, 0)
    asked: list[dict[str, Any]] = []
    if name.startswith("kvpress"):
        ask = method._worker.ask  # type: ignore[attr-defined]
        monkeypatch.setattr(method._worker, "ask", lambda do, **what: asked.append({"do": do, **what}) or ask(do, **what))  # type: ignore[attr-defined]
    (values,) = task.run(method, items)
    k = states_of(dodo, dodo.tokenizer.decode(task._ids[:41]), 4.0)
    shorter = len(dodo.document_ids(dodo.tokenizer.decode(task._ids[:41])[:k]))
    held = 100 * k if name.startswith("kvpress") else cached(dodo, [shorter])[0]  # a press tells its own
    assert (values["bytes held"], values["peak memory, bytes"]) == (held, 12345)
    assert values["whole: bytes held"] > 0
    assert all(values[what] > 0 for what in ("encode, s", "whole: read, s", "first token, s", "whole: first token, s"))
    replies = [request for request in asked if request["do"] == "reply"]
    assert all(request["exactly"] for request in replies)
    assert {request["max_new_tokens"] for request in replies} == ({1, 3} if asked else set())


def test_what_can_not_be_measured_is_refused(dodo: Dodo, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": TEXT * 9}), encoding="utf-8")
    data = [str(tmp_path / "texts.jsonl")]
    with pytest.raises(InputError, match="9,000 are wanted"):
        Efficiency([9000]).items(data, dodo.tokenizer, None, 0)
    task = Efficiency([510])
    items = task.items(data, dodo.tokenizer, None, 0)
    with pytest.raises(InputError, match="do not fit the base's window of 512"):
        task.run(make_method("dodo", dodo, 4.0), items)
    with pytest.raises(InputError, match="not measured by itself"):
        task.run(make_method("full", dodo, 4.0), items)


def test_a_long_round_counts_itself_and_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("dodo.evaluation.efficiency.time.perf_counter", lambda: clock[0])

    def measured(*seconds: float) -> tuple[dict[str, float], int]:
        left = list(seconds)

        def task() -> None:
            clock[0] += left.pop(0)

        found = efficiency._in_turn({"a": task, "b": task}, torch.device("cpu"))
        assert not left
        return found

    assert measured(40.0, 19.0, 1.0, 2.0, 3.0, 4.0, 2.0, 9.0) == ({"a": 2.0, "b": 4.0}, 3)
    assert measured(40.0, 21.0) == ({"a": 40.0, "b": 21.0}, 1)


@pytest.mark.parametrize(
    ("sooner", "length"),
    [
        ({512: False, 2048: True, 8000: True}, 2048),
        ({512: True, 2048: False, 8000: True}, 8000),
        ({512: True, 2048: True}, 512),
        ({512: True, 2048: False}, None),
    ],
)
def test_a_way_is_sooner_from_a_length_on_if_it_is_so_at_all_longer_ones(sooner: dict[int, bool], length: int | None) -> None:
    assert break_even_length(sooner) == length
