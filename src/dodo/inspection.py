"""What the scorer thinks of a text: every token with its score, and which of them become nuggets.

Paper: Figure 7 (Appendix C): darker tokens have a higher score, those on green are nuggets. Here as data and as text
for a terminal; as a page in `inspection_html`, as a picture in `inspection_png`. Nothing is encoded: only the scorer's layers
of the base run.

Characters that several tokens share (an emoji in bytes, say) are shown once, as one span, with the highest of their scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dodo.config import Use
from dodo.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

    from dodo.model import Dodo

__all__ = [
    "GREEN",
    "SHADES",
    "Inspection",
    "Placed",
    "ScoredToken",
    "Span",
    "grey",
    "inspect_scores",
    "inspect_text",
    "parts",
    "place_tokens",
    "to_marked_text",
    "to_terminal",
    "visible",
]

SHADES = 16
GREEN = (153, 255, 153)
"""Behind nuggets; the paper's."""


@dataclass(frozen=True)
class ScoredToken:
    """One token of a text."""

    index: int
    """Its place among the tokens that the model sees, first token 0."""
    id: int
    token: str
    """As it stands in the vocabulary."""
    start: int
    """First character that it shares; `start == end` for tokens that stand for no text (BOS)."""
    end: int
    score: float
    rank: int
    """1 for the highest score; equal scores have equal ranks."""
    shade: int
    """0 .. 15 by rank, 15 for the highest score."""
    selected: bool
    """Whether its states are kept."""
    kept_first: bool
    """Whether they are kept for being the text's first, beyond the k nuggets."""


@dataclass(frozen=True)
class Span:
    """Characters that belong together, and the tokens they are made of."""

    text: str
    tokens: tuple[ScoredToken, ...]

    @property
    def selected(self) -> bool:
        """Whether one of the tokens is kept."""
        return any(token.selected for token in self.tokens)

    @property
    def shade(self) -> int:
        """Of the token with the highest score."""
        return max(token.shade for token in self.tokens)


@dataclass(frozen=True)
class Placed:
    """A text, and which tokens the model sees of it.

    ids: of T tokens.
    names: as they stand in the vocabulary.
    offsets: first character of each, and the one behind its last.
    """

    text: str
    ids: list[int]
    names: list[str]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True)
class Inspection:
    """A text as the scorer sees it."""

    text: str
    tokens: tuple[ScoredToken, ...]
    n: int
    """Tokens that compete."""
    k: int
    """Nuggets."""
    trained: bool
    """Whether the scorer has been trained."""

    @property
    def states(self) -> int:
        """Tokens whose states are kept: nuggets, and the first token where it is kept beyond them."""
        return sum(token.selected for token in self.tokens)

    def spans(self) -> Iterator[Span]:
        """The whole text in order, cut wherever tokens share no character."""
        groups: list[list[ScoredToken]] = []
        end = 0
        for token in self.tokens:
            if groups and token.start < end and token.end > token.start:
                groups[-1].append(token)
            else:
                groups.append([token])
            end = max(end, token.end)
        begin = 0
        for number, group in enumerate(groups):
            end = len(self.text) if number == len(groups) - 1 else max(begin, *(token.end for token in group))
            yield Span(self.text[begin:end], tuple(group))
            begin = end


def inspect_text(
    dodo: "Dodo", text: str, *, ratio: float | None = None, nuggets: int | None = None, use: Use = "questions"
) -> Inspection:
    """Score a text, and select as `Dodo.compress` would.

    Args:
        dodo: the model.
        text: not empty.
        ratio: tokens per nugget; or
        nuggets: number of nuggets; neither: the configured ratio.
        use: see `Dodo.compress`.

    Raises:
        InputError: an empty text, a bad ratio or count, or a tokenizer that can't say where its tokens stand.
    """
    if ratio is not None and nuggets is not None:
        raise InputError("give either a ratio or a number of nuggets, and not both")
    placed = place_tokens(dodo, text)
    with torch.no_grad():
        scores = dodo.compressor.score(torch.tensor([placed.ids], device=dodo.device), use)[0]
    return inspect_scores(dodo, placed, scores, ratio=ratio, nuggets=nuggets, use=use)


def place_tokens(dodo: "Dodo", text: str) -> Placed:
    """Tokenize a text, and find out where its tokens stand. Runs no model.

    Raises:
        InputError: an empty text, or a tokenizer that can't say where its tokens stand.
    """
    ids = dodo.document_ids(text)
    return Placed(text, ids, list(dodo.tokenizer.convert_ids_to_tokens(ids)), _offsets(dodo, text, ids))


def inspect_scores(
    dodo: "Dodo",
    placed: Placed,
    scores: Tensor,
    *,
    ratio: float | None = None,
    nuggets: int | None = None,
    use: Use = "questions",
) -> Inspection:
    """Select among tokens that have been scored. Runs no model, so that one text can be seen at many ratios.

    Args:
        dodo: whose settings are used.
        placed: T tokens.
        scores: fp32 [T], from `Compressor.score` for the same use.
        ratio, nuggets, use: see `inspect_text`.

    Raises:
        InputError: a bad ratio or count.
    """
    real = torch.ones_like(scores[None], dtype=torch.bool)
    selection, sinks = dodo.compressor.select(scores[None], real, ratio=ratio, nuggets=nuggets, use=use)
    chosen = set(selection.indices[0].tolist())
    kept_first, ids = int(sinks), placed.ids
    values: list[float] = scores.tolist()
    ordered = torch.tensor(values).sort().values
    below = torch.searchsorted(ordered, torch.tensor(values)).tolist()  # how many have a lower score
    not_above = torch.searchsorted(ordered, torch.tensor(values), right=True).tolist()
    tokens = tuple(
        ScoredToken(
            index=i,
            id=ids[i],
            token=placed.names[i],
            start=placed.offsets[i][0],
            end=placed.offsets[i][1],
            score=values[i],
            rank=len(ids) - not_above[i] + 1,
            shade=SHADES - 1 if len(ids) == 1 else round((SHADES - 1) * below[i] / (len(ids) - 1)),
            selected=i in chosen,
            kept_first=i < kept_first,
        )
        for i in range(len(ids))
    )
    return Inspection(
        text=placed.text, tokens=tokens, n=len(ids) - kept_first, k=len(chosen) - kept_first, trained=dodo.is_trained
    )


def grey(shade: int) -> int:
    """Level of a shade, 195 for the lowest score to 0 for the highest; the paper's.

    >>> grey(0), grey(1), grey(15)
    (195, 182, 0)
    """
    return 195 - 13 * shade


# -- as text


def to_marked_text(inspection: Inspection) -> str:
    """The text with brackets around the nuggets: [so]; or ⟦so⟧ if it has square brackets of its own."""
    left, right = "⟦⟧" if "[" in inspection.text or "]" in inspection.text else "[]"
    shown = []
    for span in inspection.spans():
        before, core, after = parts(span)
        shown.append(f"{before}{left}{core}{right}{after}" if span.selected else before + core + after)
    return "".join(shown)


def to_terminal(inspection: Inspection, *, few_colours: bool = False) -> "Text":
    """The text for a terminal with colours, as on paper: greys on white, nuggets on green.

    Background and foreground are both set, so that it reads alike on dark and light terminals.

    Args:
        inspection: what to show.
        few_colours: for terminals of 16 colours: two greys and their green.
    """
    from rich.text import Text

    shown = Text()
    marked = "bold black on bright_green" if few_colours else "bold rgb(0,0,0) on rgb({},{},{})".format(*GREEN)
    for span in inspection.spans():
        level = grey(span.shade)
        plain = f"rgb({level},{level},{level}) on rgb(255,255,255)"
        if few_colours:
            plain = ("black" if span.shade >= SHADES // 2 else "bright_black") + " on bright_white"
        before, core, after = parts(span)
        shown.append(before, style=plain).append(core, style=marked if span.selected else plain).append(after, style=plain)
    return shown


def parts(span: Span) -> tuple[str, str, str]:
    """How to show a span: white space before, what to shade, white space after.

    Control characters are made visible, and so are nuggets that print nothing.
    """
    text = visible(span.text)
    core = text.strip()
    if core:
        start = text.index(core)
        return text[:start], core, text[start + len(core) :]
    if not span.text:
        return "", span.tokens[0].token if span.selected else "", ""
    if not span.selected:
        return text, "", ""
    newline = text.find("\n")
    return ("", text, "") if newline < 0 else (text[:newline], "↵", text[newline:])


_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {127: "␡"}
_CONTROLS |= dict.fromkeys(range(128, 160), "�")


def visible(text: str) -> str:
    """The text with control characters, which terminals obey and HTML forbids, as pictures of themselves.

    >>> visible("a\\x1b[2Jb\\r\\n")
    'a␛[2Jb\\n'
    """
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def _offsets(dodo: "Dodo", text: str, ids: list[int]) -> list[tuple[int, int]]:
    tokenizer = dodo.tokenizer
    if not tokenizer.is_fast:
        raise InputError(f"{type(tokenizer).__name__} can't say where its tokens stand in a text; a fast tokenizer is needed")
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False)
    offsets: list[tuple[int, int]] = [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
    return [(0, 0)] * (len(ids) - len(offsets)) + offsets
