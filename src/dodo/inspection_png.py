"""An inspected text as a picture, drawn with matplotlib.

Paper: Figure 7 (Appendix C).
"""

import io
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from dodo.errors import DodoWarning, InputError
from dodo.inspection import GREEN, Inspection, grey, parts, visible

__all__ = ["check_plotting", "to_png"]

_DPI = 200
_WIDTH = 1600
_MARGIN = 50
_FONT_POINTS = 11
_LINE = 52
_TALLEST = 60_000
"""Pixels; matplotlib draws no higher than 2^16."""
_LONGEST_TITLE = 60
_FALLBACKS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Noto Sans", "Noto Emoji", "Symbola", "Unifont")


def check_plotting() -> None:
    """Whether pictures can be drawn.

    Raises:
        InputError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InputError("a picture needs matplotlib: pip install 'dodo-lm[plot]'; or make a page with --html")


def to_png(inspection: Inspection, *, title: str) -> bytes:
    """The shaded text as a picture, drawn with matplotlib.

    Args:
        title: written above the text.

    Raises:
        InputError: the text is too long for a picture, or matplotlib is not installed.
    """
    check_plotting()
    from matplotlib import font_manager
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    families = ["DejaVu Sans", *(family for family in _FALLBACKS if family in installed)]
    font = font_manager.FontProperties(family=families, size=_FONT_POINTS)
    measuring = FigureCanvasAgg(Figure(dpi=_DPI)).get_renderer()
    widths: dict[str, float] = {}

    def width(piece: str) -> float:
        if piece not in widths and piece != "\n":
            framed, frame = (measuring.get_text_width_height_descent(s, font, False)[0] for s in (f"|{piece}|", "||"))
            widths[piece] = float(framed - frame)
        return widths.get(piece, 0.0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed, lines = _layout(inspection, width)
        height = 2 * _MARGIN + (lines + 2) * _LINE
        if height > _TALLEST:
            raise InputError(f"a picture of {lines:,} lines would be too tall; make a page with --html")
        figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        common: dict[str, Any] = {"fontproperties": font, "transform": None, "va": "baseline", "parse_math": False}

        def write(x: float, line: float, piece: str, color: Any) -> None:
            figure.text(x, height - _MARGIN - (line + 0.75) * _LINE, piece, color=color, **common)

        summary = f"{inspection.n:,} tokens, {inspection.k:,} nuggets (green); darker: higher score"
        if not inspection.trained:
            summary += "; the scorer is untrained"
        shown = visible(title) if len(title) <= _LONGEST_TITLE else f"{visible(title[: _LONGEST_TITLE - 4])} ..."
        write(_MARGIN, 0, f"{shown}: {summary}".replace("\n", " "), "black")
        for x, line, piece in placed:
            if piece.marked:
                corner = (x - 1, height - _MARGIN - (line + 2.98) * _LINE)
                colour = [level / 255 for level in GREEN]
                box = Rectangle(corner, width(piece.text) + 2, 0.92 * _LINE, color=colour, transform=None, zorder=-1)
                figure.add_artist(box)
            write(x, line + 2, piece.text, "black" if piece.marked else [grey(piece.shade) / 255] * 3)
        picture = io.BytesIO()
        canvas.print_png(picture)
    if any("missing from font" in str(warning.message) for warning in caught):
        warnings.warn(
            "the installed fonts lack some of the text's characters: they are drawn as boxes", DodoWarning, stacklevel=2
        )
    return picture.getvalue()


@dataclass(frozen=True)
class _Piece:
    """Characters in one style; "\n" by itself."""

    text: str
    shade: int
    marked: bool


def _layout(inspection: Inspection, width: Callable[[str], float]) -> tuple[list[tuple[float, int, _Piece]], int]:
    """Where each piece goes (x, line), and the number of lines. Breaks at white space where it can."""
    placed: list[tuple[float, int, _Piece]] = []
    left, right = float(_MARGIN), float(_WIDTH - _MARGIN)
    x, line = left, 0
    for word in _words(inspection):
        total = sum(width(piece.text) for piece in word)
        printed = any(piece.text.strip() or piece.marked for piece in word)
        if printed and left < x and x + total > right and total <= right - left:
            x, line = left, line + 1
        for piece in word:
            if piece.text == "\n":
                x, line = left, line + 1
                continue
            blank = not piece.text.strip() and not piece.marked
            if left < x and x + width(piece.text) > right:
                x, line = left, line + 1
                if blank:
                    continue
            if not blank:
                placed.append((x, line, piece))
            x += width(piece.text)
    return placed, line + 1


def _words(inspection: Inspection) -> Iterator[list[_Piece]]:
    """Pieces in runs that white space parts from each other; white space is a run too."""
    pieces = []
    for span in inspection.spans():
        for number, part in enumerate(parts(span)):
            for text in re.findall(r"\n|[^\n]+", part):
                pieces.append(_Piece(text.replace("\t", "    "), span.shade, span.selected and number == 1))
    for _, run in itertools.groupby(pieces, key=lambda piece: not piece.text.strip()):
        yield list(run)
