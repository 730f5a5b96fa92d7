"""Texts with what the scorer thinks of each token, to be drawn by `dodo report`: Figure 7.

What the paper shows by a picture is counted besides: the share of nuggets that are punctuation, beside that of the text's tokens.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dodo.data.reading import read_texts, resolve
from dodo.errors import InputError
from dodo.evaluation.methods import Compressed, Method
from dodo.evaluation.tasks import Item, Task, held_each
from dodo.inspection import Inspection, ScoredToken, inspect_text

__all__ = ["Highlight", "inspection_in"]


class Highlight(Task):
    """See above."""

    name = "highlight"

    def items(self, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int) -> list[Item]:
        """The first texts, in their order; a file of one text gives its name."""
        found = [
            Item(Path(source).name if i == 0 else f"{Path(source).name}, {i + 1}", text, "all")
            for source in resolve(sources)
            for i, text in enumerate(read_texts([source]))
        ]
        return found[:limit]

    def run(self, method: Method, batch: Sequence[Item]) -> list[dict[str, Any]]:
        if not isinstance(method, Compressed) or method.choice != "scorer":
            raise InputError(f"method {method.name!r} has no scores to show")
        return [self._one(method, item.document) for item in batch]

    def _one(self, method: Compressed, text: str) -> dict[str, Any]:
        seen = inspect_text(method.dodo, text, ratio=method.ratio, use=self.use)
        shown = [token for token in seen.tokens if token.end > token.start and text[token.start : token.end].strip()]
        marks = [token for token in shown if not any(map(str.isalnum, text[token.start : token.end]))]
        counts = {"nuggets": sum(t.selected for t in shown), "marks": sum(t.selected for t in marks)}
        counts |= {"of the text": len(shown), "marks of the text": len(marks)}
        tokens = [list(dataclasses.astuple(token)) for token in seen.tokens]
        kept = {"states": seen.states, "tokens": len(seen.tokens), "bytes": method.bytes_of(seen.states)}
        return {**counts, **kept, "n": seen.n, "k": seen.k, "trained": seen.trained, "scored": tokens}

    def measure(self, items: Sequence[Item], made: dict[str, dict[str, Any]]) -> dict[str, Any]:
        total = {
            name: sum(made[item.key][name] for item in items) for name in ("nuggets", "marks", "of the text", "marks of the text")
        }
        shares = {
            "punctuation: share of nuggets": total["marks"] / total["nuggets"] if total["nuggets"] else None,
            "punctuation: share of text": total["marks of the text"] / total["of the text"] if total["of the text"] else None,
        }
        return {"all": {"n": len(items), "nuggets": total["nuggets"], **shares, **held_each(items, made)}}


def inspection_in(example: dict[str, Any]) -> Inspection:
    """What a record's example shows."""
    tokens = tuple(ScoredToken(*values) for values in example["scored"])
    return Inspection(example["document"], tokens, example["n"], example["k"], example["trained"])
