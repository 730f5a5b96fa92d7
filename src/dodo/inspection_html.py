"""An inspected text as a standalone page.

Paper: Figure 7 (Appendix C).
"""

import html

from dodo.inspection import SHADES, Inspection, ScoredToken, Span, grey, parts, visible

__all__ = ["to_html"]


def to_html(inspection: Inspection, *, title: str) -> str:
    """A standalone page: the shaded text, a legend, the nuggets as a table; scores and ranks show on hovering.

    Without scripts and without anything fetched; follows the reader's dark mode and wish for contrast.

    Args:
        title: what the text is called.
    """
    name = html.escape(visible(title).replace("\n", " "))
    shades = range(SHADES)
    legend = "".join(f'<span class="g{i}">■</span>' for i in shades)
    achieved = len(inspection.tokens) / inspection.states
    state = "" if inspection.trained else "<p><strong>The scorer is untrained:</strong> its choices mean nothing yet.</p>\n"
    return _PAGE.format(
        title=name,
        light="".join(f".g{i}{{color:rgb({grey(i)},{grey(i)},{grey(i)})}}" for i in shades),
        light_contrast="".join(f".g{i}{{color:rgb({_firm(i)},{_firm(i)},{_firm(i)})}}" for i in shades),
        dark="".join(f".g{i}{{color:rgb({255 - grey(i)},{255 - grey(i)},{255 - grey(i)})}}" for i in shades),
        dark_contrast="".join(f".g{i}{{color:rgb({255 - _firm(i)},{255 - _firm(i)},{255 - _firm(i)})}}" for i in shades),
        summary=f"{inspection.n:,} tokens, {inspection.k:,} nuggets, {inspection.states:,} states held, ratio {achieved:.2f}",
        state=state,
        legend=legend,
        text="".join(_html_span(span) for span in inspection.spans()),
        count=f"{inspection.states:,}",
        rows="".join(_html_row(span, token) for span in inspection.spans() for token in span.tokens if token.selected),
    )


def _firm(shade: int) -> int:
    """Greys for who wants contrast: all of them at least 4.5 to 1 on white."""
    return 117 - round(7.8 * shade)


def _html_span(span: Span) -> str:
    before, core, after = (html.escape(part) for part in parts(span))
    tip = html.escape("; ".join(_describe(token) for token in span.tokens))
    tag = "mark" if span.selected else "span"
    return f'{before}<{tag} class="g{span.shade}" title="{tip}">{core}</{tag}>{after}' if core else before + after


def _html_row(span: Span, token: ScoredToken) -> str:
    shown = html.escape(visible(span.text).strip() or repr(visible(span.text) or token.token))
    why = " (first token)" if token.kept_first else ""
    return f"<tr><td>{token.index}</td><td>{shown}{why}</td><td>{token.score:.4f}</td><td>{token.rank}</td></tr>\n"


def _describe(token: ScoredToken) -> str:
    kind = ", first token, kept" if token.kept_first else ", nugget" if token.selected else ""
    return f"score {token.score:.4f}, rank {token.rank}{kind}"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: nuggets</title>
<style>
body{{max-width:46rem;margin:2rem auto;padding:0 1rem;font:1rem/1.7 Georgia,serif;color:#000;background:#fff}}
h1{{font-size:1.3rem;overflow-wrap:anywhere}}
.text{{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #888;padding:1rem}}
mark{{background:rgb(153,255,153);color:#000!important;border-radius:2px;box-shadow:0 0 0 1px #1a7f1a}}
table{{border-collapse:collapse}}th,td{{text-align:left;padding:.1rem .8rem .1rem 0}}
{light}
@media (prefers-contrast:more){{{light_contrast}}}
@media (prefers-color-scheme:dark){{body{{color:#fff;background:#000}}{dark}}}
@media (prefers-color-scheme:dark) and (prefers-contrast:more){{{dark_contrast}}}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{summary}</p>
{state}<p><span aria-hidden="true">{legend}</span> from the lowest score to the highest, by rank.
<mark>Green</mark>: kept as nuggets.
Point at a token for its score.</p>
<div class="text">{text}</div>
<details>
<summary>The {count} tokens that are kept, as a table</summary>
<table>
<thead><tr><th scope="col">Place</th><th scope="col">Text</th><th scope="col">Score</th><th scope="col">Rank</th></tr></thead>
<tbody>
{rows}</tbody>
</table>
</details>
</main>
</body>
</html>
"""
