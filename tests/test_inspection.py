"""Laws of an inspected text (Figure 7): what is shown is the text, what is marked is what `compress` keeps."""

import html.parser
import io
import re

import pytest

from dodo.config import DodoConfig
from dodo.errors import InputError
from dodo.inspection import Inspection, ScoredToken, grey, inspect_text, to_marked_text, to_terminal, visible
from dodo.inspection_html import to_html
from dodo.inspection_png import to_png
from dodo.model import Dodo
from tests.cli.tiny import TEXT, save_model

TEXTS = [
    TEXT,
    "a",
    " leading and trailing  ",
    "\n\n",
    "你好🙂👩‍👩‍👧é",
    "tabs\tand\r\nlines\n",
    "<s> </s> <script>alert('x')</script> & \"quotes\" [brackets]",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Dodo:
    return Dodo.from_pretrained(save_model(tmp_path_factory.mktemp("inspected")), config=DodoConfig(feature_layer=2))


def inspected(model: Dodo, text: str = TEXT, **selection: float) -> Inspection:
    return inspect_text(model, text, **(selection or {"ratio": 3}))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("selection", [{"ratio": 1}, {"ratio": 4}, {"nuggets": 2}])
def test_what_is_selected_is_what_compress_keeps(selection, text, model):
    nuggets = model.compress(text, **selection)
    seen = inspect_text(model, text, **selection)
    kept = [token for token in seen.tokens if token.selected]
    assert [token.index for token in kept] == nuggets.indices[0].tolist()
    assert [token.id for token in kept] == nuggets.token_ids[0].tolist()
    assert [token.score for token in kept] == pytest.approx(nuggets.scores[0].tolist())
    assert (seen.n, seen.k, seen.states) == (int(nuggets.lengths), int(nuggets.k), int(nuggets.states))


def test_text_beyond_the_window_is_inspected_as_it_is_compressed(model):
    with pytest.warns(UserWarning, match="longer than the base's window"):
        nuggets = model.compress(TEXT * 8, ratio=5)
    seen = inspected(model, TEXT * 8, ratio=5)
    assert [token.index for token in seen.tokens if token.selected] == nuggets.indices[0].tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_spans_put_together_are_the_text_and_hold_every_token_once(text, model):
    spans = list(inspected(model, text).spans())
    assert "".join(span.text for span in spans) == text
    seen = inspected(model, text)
    assert [token for span in spans for token in span.tokens] == list(seen.tokens)


def test_a_character_of_several_tokens_is_one_span(model):
    spans = list(inspected(model, "a🙂b").spans())
    assert [span.text for span in spans if span.text] == ["a", "🙂", "b"]
    assert [len(span.tokens) for span in spans if span.text == "🙂"] != [1]


def test_a_span_is_selected_if_one_of_its_tokens_is_and_has_the_highest_shade():
    tokens = tuple(
        ScoredToken(
            index=i, id=i, token="?", start=0, end=1, score=i, rank=2 - i, shade=15 * i, selected=i == 0, kept_first=False
        )
        for i in range(2)
    )
    (span,) = Inspection(text="🙂", tokens=tokens, n=2, k=1, trained=True).spans()
    assert span.selected
    assert span.shade == 15


def test_shades_and_ranks_follow_the_scores(model):
    tokens = sorted(inspected(model).tokens, key=lambda token: token.score)
    assert [token.shade for token in tokens] == sorted(token.shade for token in tokens)
    assert [token.rank for token in tokens] == sorted((token.rank for token in tokens), reverse=True)
    assert (tokens[0].shade, tokens[-1].shade) == (0, 15)
    assert (tokens[0].rank, tokens[-1].rank) == (len(tokens), 1)


def test_greys_are_those_of_the_papers_figure():
    assert [grey(i) for i in range(16)] == [195, 182, 169, 156, 143, 130, 117, 104, 91, 78, 65, 52, 39, 26, 13, 0]


def test_empty_text_is_refused(model):
    with pytest.raises(InputError, match="empty"):
        inspect_text(model, "", ratio=2)


def test_ratio_and_number_together_are_refused(model):
    with pytest.raises(InputError, match="not both"):
        inspect_text(model, "text", ratio=2, nuggets=3)


# -- terminal


def test_marks_change_if_the_text_has_brackets(model):
    assert "[" in to_marked_text(inspected(model, "no brackets"))
    shown = to_marked_text(inspected(model, "with [brackets]"))
    assert "⟦" in shown
    assert re.sub("⟦<s>⟧|[⟦⟧]", "", shown) == "with [brackets]"


@pytest.mark.parametrize(("few", "green"), [(False, "on rgb(153,255,153)"), (True, "on bright_green")])
def test_terminal_colours_set_both_sides(few, green, model):
    shown = to_terminal(inspected(model), few_colours=few)
    for part in shown.spans:
        assert " on " in str(part.style)
    assert any(green in str(part.style) for part in shown.spans)


@pytest.mark.parametrize("code", [*range(9), 11, 12, 13, *range(14, 32), 127, 0x9B])
def test_control_characters_are_made_visible(code):
    assert chr(code) not in visible(f"a{chr(code)}b")


# -- page


class Page(html.parser.HTMLParser):
    """Collects the text of the shaded part, the titles, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tips, self.tags, self.open = "", [], [], []
        self.inside = False

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)
        self.inside |= dict(attrs).get("class") == "text"
        if self.inside and "title" in dict(attrs):
            self.tips.append(dict(attrs)["title"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.inside &= tag != "div"

    def handle_data(self, data):
        if self.inside:
            self.text += data


@pytest.mark.parametrize("text", TEXTS)
def test_page_shows_the_text_and_nothing_of_it_is_markup(text, model):
    page = Page()
    page.feed(to_html(inspected(model, text), title="<b>&"))
    page.close()
    assert page.open == []
    assert re.sub("[↵␍]", "", page.text.replace("<s>", "", 1)) == visible(text)
    assert not {"script", "b", "img", "link"} & {tag for tag, _ in page.tags}


def test_page_stands_alone_and_has_a_title_a_legend_and_a_language(model):
    shown = to_html(inspected(model), title="dodo.txt")
    assert "<title>dodo.txt: nuggets</title>" in shown
    assert '<html lang="en">' in shown
    assert "prefers-color-scheme:dark" in shown
    assert "from the lowest score to the highest" in shown
    assert not re.search(r"https?://|src=|@import|<script", shown)


def test_page_tells_score_and_rank_of_every_token(model):
    seen = inspected(model, "Some-plain-words")
    page = Page()
    page.feed(to_html(seen, title="t"))
    told = "; ".join(page.tips)
    for token in seen.tokens:
        assert f"score {token.score:.4f}, rank {token.rank}" in told


def test_page_marks_as_many_tokens_as_are_kept_and_lists_them(model):
    seen = inspected(model, "Some plain words")
    page = Page()
    page.feed(to_html(seen, title="t"))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("mark") == seen.states + 1  # one in the legend
    assert tags.count("tr") == seen.states + 1  # the head


def test_page_says_that_an_untrained_scorer_is_untrained(model):
    assert "untrained" in to_html(inspected(model), title="t")


# -- picture


def picture(model: Dodo, text: str):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    return matplotlib_image.imread(io.BytesIO(to_png(inspected(model, text), title="t")))


def test_picture_has_green_behind_nuggets_and_grows_with_the_text(model):
    small, large = picture(model, "some words"), picture(model, "some words and more of them\n" * 8)
    green = (small[..., :3] * 255).round() == [153, 255, 153]
    assert green.all(-1).sum() > 100
    assert large.shape[0] > small.shape[0]
    assert large.shape[1] == small.shape[1]


def test_picture_takes_dollars_and_backslashes_literally(model):
    assert picture(model, r"$x^2$ \frac{1}{0} $").size


def test_picture_keeps_inside_its_margins(model):
    image = picture(model, "verylongwordwithoutanyspace" * 10 + " and then some")
    assert (image[:, -20:, :3] == 1).all()
    assert (image[:, :20, :3] == 1).all()


def test_picture_of_characters_that_no_font_has_warns(model):
    with pytest.warns(UserWarning, match="fonts lack"):
        picture(model, "\U0001fae8\u4f60")


def test_picture_of_a_very_long_text_is_refused(model):
    tokens = tuple(
        ScoredToken(
            index=i, id=i, token="a", start=2 * i, end=2 * i + 1, score=0.0, rank=1, shade=0, selected=False, kept_first=False
        )
        for i in range(2000)
    )
    with pytest.raises(InputError, match="--html"):
        to_png(Inspection(text="a\n" * 2000, tokens=tokens, n=2000, k=1, trained=True), title="t")
