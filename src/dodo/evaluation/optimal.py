"""How far the scorer's selection is from the best one, as a greedy search finds it. Paper: Section 7.1, Appendix A, Algorithm 1.

A text's first tokens are encoded once; a selection is a subset of the keys and values of all of them. The decoder reads on with
some tokens that are not compressed, and what counts is the perplexity of the tokens behind those. One nugget after the other is
put in each place that is free, and stays in the best, if that is better than where it was.

Appendix A updates within its inner loop. For one nugget the candidates do not depend on each other, so the best of them is where
that loop ends, and they are computed in batches.

Shapes: C candidates, K nuggets, N tokens encoded, M tokens read behind them, L layers, H heads, D head width.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dodo.architecture import token_nats
from dodo.compressor import Compressor
from dodo.data.reading import read_texts
from dodo.errors import InputError
from dodo.evaluation.methods import Compressed, Method, own_ids
from dodo.evaluation.scoring import perplexity
from dodo.evaluation.tasks import Item, Task, windows
from dodo.nuggets import Nuggets

__all__ = ["OptimalSelection", "greedy", "nats_of", "take"]

ENCODED, WHOLE, SCORED = 128, 64, 64
"""Tokens that are compressed, read as they are, and scored. Appendix A."""
AT_ONCE = 23
"""Candidates in a batch."""


class OptimalSelection(Task):
    """See above: how many nuggets the search moves, and what it gains."""

    name = "optimal-selection"

    def items(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int) -> list[Item]:
        texts = list(read_texts(sources))
        length = ENCODED + WHOLE + SCORED + 8  # cut out, a text may come to fewer tokens
        cut = windows(texts, tokenizer, length, np.random.default_rng(seed), limit or len(texts))
        found = [Item(str(i), text, "all") for i, text in enumerate(cut)]
        if not found:
            raise InputError(f"no text has {length} tokens")
        return found

    @torch.no_grad()
    def run(self, method: Method, batch: Sequence[Item]) -> list[dict[str, Any]]:
        if not isinstance(method, Compressed):
            raise InputError(f"method {method.name!r} selects no tokens")
        return [self._search(method, item.document) for item in batch]

    def _search(self, method: Compressed, text: str) -> dict[str, Any]:
        dodo = method.dodo
        ids = dodo.document_ids(text)
        first = len(ids) - len(own_ids(dodo, text))  # a BOS token is not one of the text's
        document, behind = torch.tensor([ids[: first + ENCODED]]), torch.tensor(ids[first + ENCODED :][: WHOLE + SCORED])
        document, behind = document.to(dodo.device), behind.to(dodo.device)
        chosen = method.encode(document, torch.ones_like(document)).indices[0]
        whole = dodo.compressor.encode(document, ratio=1)
        sinks = int(whole.sinks)

        def nats(choices: Tensor) -> Tensor:
            return nats_of(dodo.compressor, whole, choices, behind, WHOLE)

        best, before, after = greedy(chosen, document.shape[1], nats, keep=sinks)
        moved = len(set(chosen[sinks:].tolist()) - set(best[sinks:].tolist()))
        counts = {"nuggets": len(chosen) - sinks, "moved": moved, "counted": len(behind) - WHOLE}
        return {**counts, "before": before, "after": after, "states": len(chosen), "tokens": document.shape[1]}

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        rows = [made[item.key] for item in items]
        counts = [row["counted"] for row in rows]
        states, tokens = (sum(row[name] for row in rows) for name in ("states", "tokens"))
        found: dict[str, Any] = {"n": len(rows), "states each": states / len(rows), "ratio": tokens / states}
        shares = [row["moved"] / row["nuggets"] for row in rows]
        found["share of nuggets moved"] = sum(shares) / len(shares)
        found["share of nuggets moved standard error"] = (
            float(np.std(shares, ddof=1) / math.sqrt(len(shares))) if rows[1:] else None
        )
        for name in ("before", "after"):
            value, error = perplexity([row[name] for row in rows], counts)
            found |= {f"perplexity {name}": value, f"perplexity {name} standard error": error}
        found["perplexity after / before"] = found["perplexity after"] / found["perplexity before"]
        return {"all": found}


def greedy(
    chosen: Tensor, tokens: int, nats: Callable[[Tensor], Tensor], *, keep: int = 0, at_once: int = AT_ONCE
) -> tuple[Tensor, float, float]:
    """Algorithm 1: each nugget in its turn goes where the loss is least.

    Args:
        chosen: int64 [K], the selection to begin with.
        tokens: N, places there are.
        nats: takes selections, int64 [C, K], each ascending, and gives the loss of each, fp32 [C].
        keep: nuggets at the beginning that are not moved.
        at_once: the most selections that `nats` is given.

    Returns:
        The selection found, int64 [K], ascending; the loss of the first one, and of this.
    """
    before = best = float(nats(chosen.sort().values[None])[0])
    current = chosen.clone()
    for slot in range(keep, len(chosen)):
        free = torch.tensor(sorted(set(range(tokens)) - set(current.tolist())), device=chosen.device)
        if not len(free):
            break
        candidates = current.repeat(len(free), 1)
        candidates[:, slot] = free
        found = torch.cat([nats(some.sort(-1).values) for some in candidates.split(at_once)])
        if float(found.min()) < best:
            best, current = float(found.min()), candidates[int(found.argmin())]
    return current.sort().values, before, best


def nats_of(compressor: Compressor, whole: Nuggets, choices: Tensor, behind: Tensor, read: int) -> Tensor:
    """Loss of the tokens behind a text, given some of its states: fp32 [C], summed over the scored tokens.

    Args:
        whole: states of all tokens of one text.
        choices: int64 [C, K], ascending places among them.
        behind: int64 [M], the tokens that follow.
        read: how many of these are read but not scored, at least 1.
    """
    rows = behind.expand(len(choices), -1)
    states = compressor.decode(take(whole, choices), rows[:, :-1], states=True)[:, read - 1 :]
    return token_nats(compressor.base, states, rows[:, read:]).sum(-1)


def take(whole: Nuggets, choices: Tensor) -> Nuggets:
    """A batch of C subsets of one text's states.

    Args:
        whole: of one text.
        choices: int64 [C, K], ascending places among its states.
    """
    C = len(choices)
    picked: dict[str, Any] = {
        name: getattr(whole, name)[0][choices] for name in ("positions", "indices", "scores", "token_ids", "mask")
    }
    picked |= {name: getattr(whole, name).expand(C) for name in ("lengths", "next_positions", "sinks")}
    picked |= {name: getattr(whole, name)[:, 0][:, :, choices].transpose(1, 2) for name in ("keys", "values")}
    return dataclasses.replace(whole, **picked)
