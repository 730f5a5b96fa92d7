"""Laws of the store: what was acknowledged is there, whole, whatever happened."""

import dataclasses
import errno
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dodo import nuggets_file
from dodo.errors import InputError, StoreDamaged, StoreFull, UnknownContext
from dodo.nuggets import Nuggets
from dodo.serving import store as store_module
from dodo.serving.store import Store
from tests.serving.contexts import made_up

ROOT = Path(__file__).parents[2]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Opens the same folder as often as asked."""
    made: list[Store] = []

    def make(**settings: Any) -> Store:
        made.append(Store(tmp_path / "store", **settings))
        return made[-1]

    yield make
    for store in made:
        store.close()


def files(tmp_path: Path) -> list[str]:
    return sorted(path.stem for path in (tmp_path / "store" / "files").iterdir())


def same(a: Nuggets, b: Nuggets) -> bool:
    return torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) and torch.equal(a.positions, b.positions)


def test_what_is_added_is_loaded_also_by_another_that_has_the_folder_open_and_after_closing(opened):
    one, two = opened(), opened()
    context = one.add(made_up(), name="a name")
    assert (context.n, context.k, context.ratio, context.name) == (20, 5, 4.0, "a name")
    assert same(two.load(context.id), made_up())
    one.close()
    assert opened().get(context.id) == context


def test_what_nuggets_were_chosen_for_is_kept(opened):
    store = opened()
    for use in (None, "questions", "text"):
        assert opened().get(store.add(dataclasses.replace(made_up(), use=use)).id).use == use


def test_a_store_from_before_uses_were_kept_is_taken_over(opened, tmp_path):
    store = opened()
    before = store.add(made_up())
    store.close()
    with closing(sqlite3.connect(tmp_path / "store" / "contexts.sqlite3")) as database:
        database.execute("ALTER TABLE contexts DROP COLUMN use")
    again, beside = opened(), opened()
    assert again.get(before.id) == before
    assert same(beside.load(before.id), made_up())
    assert beside.get(again.add(dataclasses.replace(made_up(), use="text")).id).use == "text"


def test_ids_are_opaque_and_nothing_else_names_a_context(opened):
    store = opened()
    context = store.add(made_up())
    assert context.id.startswith("ctx_") and len(context.id) == 26
    for wrong in ("", "ctx_", f"../{context.sha256}", context.sha256, f"{context.id}\n", f"{context.id}/..", "ctx_" + "a" * 22):
        with pytest.raises(UnknownContext):
            store.load(wrong)
        with pytest.raises(UnknownContext):
            store.read(wrong)
        with pytest.raises(UnknownContext):
            store.delete(wrong)


def test_contexts_with_the_same_contents_share_a_file_until_the_last_of_them_is_deleted(opened, tmp_path):
    store = opened()
    one, two = store.add(made_up()), store.add(made_up())
    assert one.id != two.id
    assert files(tmp_path) == [one.sha256]
    store.delete(one.id)
    assert same(store.load(two.id), made_up())
    store.delete(two.id)
    assert files(tmp_path) == []


def test_pages_are_in_the_order_of_adding_and_go_on_where_the_last_ended(opened):
    store = opened()
    ids = [store.add(made_up(seed=seed)).id for seed in range(5)]
    first = store.page(limit=2)
    assert [context.id for context in first] == [ids[4], ids[3]]
    assert [context.id for context in store.page(limit=9, after=first[-1].id)] == [ids[2], ids[1], ids[0]]
    assert [context.id for context in store.page(limit=9, ascending=True)] == ids
    with pytest.raises(UnknownContext):
        store.page(limit=2, after="ctx_of_another_server_____")


def test_over_the_limit_on_the_disk_those_used_longest_ago_are_deleted(opened, monkeypatch, tmp_path):
    size = opened().add(made_up(seed=9)).stored_bytes
    store = opened(disk_limit=3 * size)
    now = time.time()
    monkeypatch.setattr(store_module.time, "time", lambda: now)
    ids = []
    for seed in range(3):
        now += 100
        ids.append(store.add(made_up(seed=seed)).id)
    assert len(files(tmp_path)) == 3  # seed 9 had to go
    now += 100
    store.load(ids[0])
    now += 100
    store.add(made_up(seed=3))
    kept = {context.id for context in store.page(limit=9)}
    assert ids[0] in kept and ids[1] not in kept and ids[2] in kept
    assert len(files(tmp_path)) == 3
    with pytest.raises(StoreFull, match="compress it more"):
        store.add(made_up(states=500, tokens=1000))
    assert {context.id for context in store.page(limit=9)} == kept


def test_memory_holds_what_was_used_last_and_the_rest_is_read_again(opened):
    store = opened(memory_limit=2 * made_up().nbytes)
    ids = [store.add(made_up(seed=seed)).id for seed in range(4)]
    assert store.totals()["memory_bytes"] == 2 * made_up().nbytes
    assert store.load(ids[3]) is store.load(ids[3])
    assert same(store.load(ids[0]), made_up(seed=0))
    assert store.totals()["memory_bytes"] == 2 * made_up().nbytes


@pytest.mark.parametrize("place", ["writing", "moving", "committing"])
def test_a_full_disk_refuses_and_loses_nothing(place, opened, monkeypatch, tmp_path):
    store = opened()
    kept = store.add(made_up())

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if place == "writing":
            patch.setattr(nuggets_file, "save_file", full)
        elif place == "moving":
            patch.setattr(store_module, "_flush", full)
        else:
            patch.setattr(store, "_insert", full)
        with pytest.raises(StoreFull):
            store.add(made_up(seed=1))
    assert [context.id for context in store.page(limit=9)] == [kept.id]
    assert same(opened().load(kept.id), made_up())
    assert files(tmp_path) == [kept.sha256]  # opening swept what was left
    assert same(store.load(store.add(made_up(seed=1)).id), made_up(seed=1))


def test_a_file_that_was_changed_is_not_served(opened, tmp_path):
    context = opened().add(made_up())
    path = tmp_path / "store" / "files" / f"{context.sha256}.nuggets"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreDamaged):
        opened().load(context.id)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(InputError, match="store"):
        Store(tmp_path / "store")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "contexts.sqlite3").write_text("not a database " * 99)
    with pytest.raises(InputError, match="bad can't be used: file is not a database"):
        Store(tmp_path / "bad")


def test_files_of_a_process_that_lives_are_not_swept(opened):
    living = opened()
    path = living._incoming / "half.nuggets"
    path.write_bytes(b"half")
    opened()
    assert path.exists()


def test_whenever_it_is_killed_what_was_acknowledged_is_whole_and_nothing_half_written_is_left(tmp_path, opened):
    folder, rounds = tmp_path / "store", 12
    command = [sys.executable, "-m", "tests.serving.adding", str(folder), str(rounds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    told = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    lines = told.split("\n")
    deleted = {line[1:] for line in lines if line.startswith("-")}
    added = dict(line.split() for line in lines if line.startswith("ctx_"))
    store = opened()
    assert len(added) >= rounds // 2
    contexts = {context.id: context for context in store.page(limit=1_000_000)}
    last_deletions = set(added) - set(contexts) - deleted  # deleted, and killed before that was said
    assert len(last_deletions) <= rounds
    assert not deleted & set(contexts)
    for context in contexts.values():
        assert store.load(context.id).k == context.k
        assert added.get(context.id, context.sha256) == context.sha256
    assert files(tmp_path) == sorted({context.sha256 for context in contexts.values()})
    assert sum(1 for path in (folder / "incoming").iterdir() if path.is_dir()) == 1  # this store's own


def test_what_is_deleted_while_it_is_loaded_does_not_stay(opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = opened(storage="float16"), opened()
    context = store.add(made_up())
    load = Nuggets.load

    def slow(path: Path) -> Nuggets:
        nuggets = load(path)
        other.delete(context.id)
        return nuggets

    monkeypatch.setattr(Nuggets, "load", slow)
    store.load(context.id)
    assert store.totals()["memory_bytes"] == 0


def test_a_disk_so_full_that_nothing_can_be_deleted_says_so(opened: Callable[..., Store]) -> None:
    store = opened()
    context = store.add(made_up())

    class Full:
        in_transaction = False

        def execute(self, *arguments: Any) -> None:
            raise sqlite3.OperationalError("database or disk is full")

    database, store._db = store._db, Full()  # type: ignore[assignment]
    with pytest.raises(StoreFull, match="make room on it first"):
        store.delete(context.id)
    store._db = database
    assert store.get(context.id) == context
