"""Peers of today, through their own packages, on the same base: presses of kvpress, and LLMLingua.

None of them knows the question when it reads a document, and each holds as many states as Dodo would (see decision 0011). Their
packages want older versions of ours, so they run in an environment of their own, made by `make peers`, by `peers_worker`.
"""

import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dodo.errors import InputError
from dodo.evaluation.methods import Held, Whole, cached, states_of
from dodo.evaluation.worker import Worker
from dodo.model import Dodo
from dodo.prompts import opening_turn

__all__ = ["Peer", "Pressed", "Shortened", "around_document", "export_base", "find_python", "make_peer"]

DEFAULT_PYTHON = Path(".venv-peers/bin/python")
SCRIPT = Path(__file__).with_name("peers_worker.py")
_MARK = "\ue000"
"""Stands for the document where a chat template is asked what it puts around one."""


class Peer(Whole):
    """What has a worker of the peers' environment, that has loaded the same base.

    Args:
        dodo: its base, exported, is what the peer loads; its adapters play no part.
        name: one of `names.PEERS`.
        ratio: tokens per state.
        python: of the peers' environment; see `find_python`.
        script: what runs there; None: `peers_worker`.

    Attributes:
        versions: of the packages that it runs with.
    """

    def __init__(self, dodo: Dodo, *, name: str, ratio: float, python: Path | None = None, script: Path | None = None) -> None:
        super().__init__(dodo, name=name)
        self._wanted = ratio
        self._worker = Worker(name, find_python(python), script or SCRIPT)
        folder = tempfile.TemporaryDirectory(prefix="dodo-base-")
        weakref.finalize(self, folder.cleanup)
        export_base(dodo, Path(folder.name))
        where = {"base": folder.name, "device": str(dodo.device), "threads": torch.get_num_threads()}
        self.versions: dict[str, str] = self._worker.ask("start", method=name, **where)["versions"]

    def forget_peak(self) -> None:
        """Count the worker's peak memory from now on."""
        self._worker.ask("forget_peak")

    def peak(self) -> int | None:
        """Highest resident bytes of the worker (Linux), or of the GPU."""
        highest: int | None = self._worker.ask("peak")["bytes"]
        return highest


class Shortened(Peer):
    """LLMLingua: the base's perplexity says which tokens to drop, and the base reads the shorter text in the document's place."""

    def read(self, documents: Sequence[str]) -> Held:
        states = [states_of(self.dodo, text, self._wanted) for text in documents]
        texts = self._worker.ask("read", documents=list(documents), states=states)["texts"]
        held = [len(self.dodo.document_ids(text)) if text else 0 for text in texts]
        tokens = [len(self.dodo.document_ids(text)) for text in documents]
        return Held(held, tokens, texts, cached(self.dodo, held))


class Pressed(Peer):
    """A press of kvpress: the base reads the beginning of its chat turn and a document, and drops states of the document.

    What stands before the document is kept whole and not counted, as it is not counted for the other methods. Every head may keep
    other tokens; `states` is their number, on average over heads and layers.
    """

    def read(self, documents: Sequence[str]) -> Held:
        before, _ = around_document(self.dodo)
        rows = [self._ids(text.lstrip(), literal=True) for text in documents]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise InputError(f"document {empty[0] + 1} is empty: there is nothing to compress")
        states = [min(states_of(self.dodo, text, self._wanted), len(row)) for text, row in zip(documents, rows, strict=True)]
        found = self._worker.ask("read", before=self._ids(before), documents=rows, states=states)
        tokens = [len(self.dodo.document_ids(text)) for text in documents]
        return Held(found["states"], tokens, found["held"], found["bytes"])

    def reply(self, held: Held, requests: Sequence[str], *, max_new_tokens: int, exactly: bool = False) -> list[str]:
        """One greedy reply per document, to its end or `exactly` so long.

        Raises:
            InputError: other documents have been read since; a worker holds those that it read last.
        """
        _, after = around_document(self.dodo)
        prompts = [self._ids(f"\n{request}".rstrip() + after) for request in requests]
        how = {"max_new_tokens": max_new_tokens, "ends": self.dodo.answer_ends, "exactly": exactly}
        made: list[str] = self._worker.ask("reply", held=held.what, prompts=prompts, **how)["texts"]
        return made

    def _ids(self, text: str, *, literal: bool = False) -> list[int]:
        tokenizer = self.dodo.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=literal, verbose=False)["input_ids"]
        return ids


def make_peer(name: str, dodo: Dodo, ratio: float, *, python: Path | None = None) -> Peer:
    """A peer by its name, one of `names.PEERS`.

    Raises:
        InputError: its environment is missing, or it can't work with this base.
    """
    kind: type[Peer] = Shortened if name == "llmlingua" else Pressed
    return kind(dodo, name=name, ratio=ratio, python=python)


def find_python(given: Path | None) -> Path:
    """The Python of the peers' environment: what is given, or `$DODO_PEERS_PYTHON`, or that of `make peers`.

    Raises:
        InputError: it is not there.
    """
    python = given or Path(os.environ.get("DODO_PEERS_PYTHON") or DEFAULT_PYTHON)
    if not python.is_file():
        raise InputError(
            f"there is no {python}: peers run in an environment of their own; make peers sets it up, and --peers-python "
            "or $DODO_PEERS_PYTHON says where its Python is"
        )
    return python.absolute()


def around_document(dodo: Dodo) -> tuple[str, str]:
    """What the chat format puts before a document and behind a request.

    Raises:
        InputError: the chat template does not show messages as they are.
    """
    before, found, after = opening_turn(dodo.tokenizer, _MARK).partition(_MARK)
    if not found:
        raise InputError("the base's chat template does not show messages as they are, so nothing can be compressed inside one")
    return before, after


def export_base(dodo: Dodo, folder: Path) -> None:
    """The base as a folder of transformers: its weights as they are in memory, without adapters, and its tokenizer.

    Raises:
        InputError: the base is quantised.
    """
    base: Any = dodo.compressor.base
    if getattr(base, "is_quantized", False):
        raise InputError("peers can't load a quantised base; take it whole")
    base.save_pretrained(folder, state_dict=dodo.compressor.adapters.base_weights())
    dodo.tokenizer.save_pretrained(folder)
