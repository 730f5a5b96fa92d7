"""The page at `/`, in a real browser without a screen: what a person does, and what is seen of it.

Needs Chromium on the machine (Debian's package `chromium`); none is downloaded.
"""

import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")

from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from dodo.serving.pages import PAGE
from tests.serving.conftest import tiny_dodo

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

KEY = "key-of-the-tests-1234"
TEXT = "The dodo lived on Mauritius. It could not fly, and it was not afraid of sailors. In 1662 the last was seen."
MARKUP = "<img src=x onerror=\"document.title='broken'\"> <b>bold</b> &amp; <script>document.title='broken'</script> and words."
DESKTOP: ViewportSize = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    expect.set_options(timeout=30_000)  # for a busy machine
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser: Any, listening: Callable[..., tuple[str, Any]]) -> Iterator[Callable[..., tuple[Page, str]]]:
    """Opens the page of a server of its own: page, address = opened(viewport=..., color_scheme=..., keys=(...)).

    In the end nothing may have been said in the console, and nothing refused by the page's policy.
    """
    contexts: list[Any] = []
    said: list[str] = []

    def make(*, viewport: ViewportSize = DESKTOP, color_scheme: str = "light", **settings: Any) -> tuple[Page, str]:
        address, _ = listening(**settings)
        context = browser.new_context(viewport=viewport, color_scheme=color_scheme)
        context.set_default_timeout(30_000)
        page: Page = context.new_page()
        refused = "the server responded with a status of 4"  # the browser itself logs each answer that is an error
        page.on("console", lambda message: said.append(message.text) if refused not in message.text else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        contexts.append(context)
        page.goto(address)
        page.locator("#entry:visible, #key:visible").wait_for()
        return page, address

    yield make
    for context in contexts:
        context.close()
    assert said == []


def read(page: Page, text: str = TEXT) -> None:
    page.get_by_label("Paste a text here, or drop a file").fill(text)
    page.get_by_role("button", name="Show its nuggets").click()
    expect(page.locator("#tokens span").first).to_be_visible()


def inspected(address: str, ratio: float, text: str = TEXT, **headers: str) -> dict[str, Any]:
    body = json.dumps({"text": text, "ratio": ratio}).encode()
    request = urllib.request.Request(f"{address}/v1/inspect", body, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def ratio_of(page: Page) -> float:
    return float(page.locator("#ratio-shown").inner_text())


def marked(page: Page) -> list[int]:
    """Numbers of the spans that are marked."""
    every = page.locator("#tokens .nugget")
    found: list[int] = every.evaluate_all("all => all.map(each => Number(each.dataset.span))")
    return found


def kept(seen: dict[str, Any]) -> list[int]:
    """Numbers of the spans with a token that the server selects."""
    chosen = set(seen["selected"])
    return [i for i, span in enumerate(seen["spans"]) if any(token["index"] in chosen for token in span["tokens"])]


def test_a_text_is_shown_with_its_scores_as_shades_and_its_nuggets_marked(opened):
    page, address = opened()
    read(page)
    seen = inspected(address, ratio_of(page))
    assert page.locator("#tokens").inner_text() == TEXT
    assert marked(page) == kept(seen)
    shades = page.locator("#tokens span").evaluate_all("all => all.map(each => Number(/g(\\d+)/.exec(each.className)[1]))")
    assert shades == [span["shade"] for span in seen["spans"]]
    assert len(set(shades)) > 2
    page.locator("#tokens span").nth(3).hover()
    expect(page.locator("#token")).to_contain_text(f"score {seen['spans'][3]['tokens'][0]['score']:.2f}")
    page.get_by_text("What is kept, as a table").click()
    expect(page.locator("#table tbody tr")).to_have_count(len(seen["selected"]))


def test_the_slider_selects_and_costs_as_the_server_does(opened):
    page, address = opened()
    read(page)
    for key in ("End", "Home", "ArrowRight"):
        page.locator("#ratio").press(key)
        seen = inspected(address, ratio_of(page))
        for name in ("k", "n", "states", "bytes", "full_bytes", "ratio"):
            expect(page.locator(f"[data-cost={name}]")).to_have_attribute("data-value", re.compile(rf"^{seen[name]:.10g}"))
        assert marked(page) == kept(seen)
    assert ratio_of(page) > 1


def test_a_text_that_is_pasted_or_dropped_is_shown_at_once(opened):
    page, address = opened()
    page.locator("#text").fill(TEXT)
    page.locator("#text").press("Control+A")
    page.locator("#text").press("Control+X")
    page.locator("#text").press("Control+V")
    expect(page.locator("#tokens")).to_have_text(TEXT)
    page.get_by_role("button", name="Another text").click()
    page.evaluate(
        """text => {
            const transfer = new DataTransfer();
            transfer.setData("text/plain", text);
            document.querySelector(".drop").dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, cancelable: true}));
        }""",
        "Of another bird.",
    )
    expect(page.locator("#tokens")).to_have_text("Of another bird.")
    assert marked(page) == kept(inspected(address, ratio_of(page), "Of another bird."))


def test_a_file_is_dropped_or_opened(opened):
    page, _ = opened()
    drop = """([name, text]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([text], name, {type: "text/plain"}));
        for (const kind of ["dragover", "drop"]) {
            const event = new DragEvent(kind, {dataTransfer: transfer, bubbles: true, cancelable: true});
            document.querySelector(".drop").dispatchEvent(event);
        }
    }"""
    page.evaluate(drop, ["dodo.txt", TEXT])
    expect(page.get_by_role("heading", name="dodo.txt")).to_be_visible()
    expect(page.locator("#tokens")).to_have_text(TEXT)
    page.get_by_role("button", name="Another text").click()
    page.locator("#file").set_input_files(
        {"name": "other.html", "mimeType": "text/html", "buffer": b"<p>Of sailors and of birds.</p>"}
    )
    expect(page.get_by_role("heading", name="other.html")).to_be_visible()
    expect(page.locator("#tokens")).to_have_text("Of sailors and of birds.")


def test_what_is_wrong_with_a_text_is_said_in_the_servers_words(opened):
    page, address = opened()
    file = {"name": "a.exe", "mimeType": "application/x-msdownload", "buffer": b"MZ\x00\x01"}
    page.locator("#file").set_input_files(file)
    said = page.request.post(f"{address}/v1/inspect", multipart={"file": file}).json()["error"]["message"]
    expect(page.locator("#entry .error")).to_have_text(said)


def test_a_question_is_answered_from_the_nuggets_and_from_the_whole_text(opened):
    page, address = opened()
    streams: list[str] = []
    page.on("response", lambda got: streams.append(kind_of(got)) if "/chat/completions" in got.url else None)
    read(page)
    page.get_by_label("A question about the text").fill("Where did it live?")
    page.get_by_role("button", name="Ask", exact=True).click()
    for card in ("#from-nuggets", "#from-whole"):
        expect(page.locator(f"{card} .facts")).to_contain_text("s in all")
    shown = [page.locator(f"{card} .answer").inner_text() for card in ("#from-nuggets", "#from-whole")]
    (context,) = page.request.get(f"{address}/v1/contexts").json()["data"]
    (model,) = page.request.get(f"{address}/v1/models").json()["data"]
    question = "Where did it live?"
    whole = f"{TEXT}\n{model['question_prompt'].format(question=question)}".strip()
    for content, more, said in ((question, {"context_ids": [context["id"]]}, shown[0]), (whole, {}, shown[1])):
        asked = {"model": model["id"], "messages": [{"role": "user", "content": content}], "max_tokens": 64, **more}
        answer = page.request.post(f"{address}/v1/chat/completions", data=asked).json()
        assert said == answer["choices"][0]["message"]["content"]
    assert shown[0] != shown[1]
    assert streams == ["text/event-stream"] * 2
    page.get_by_role("button", name="Another text").click()
    expect(page.locator("#ask")).to_be_hidden()
    for _ in range(100):
        if not page.request.get(f"{address}/v1/contexts").json()["data"]:
            break
        page.wait_for_timeout(50)
    else:
        pytest.fail("the text is still kept")


def test_a_context_that_is_gone_is_made_again(opened):
    page, address = opened()
    read(page)
    page.get_by_label("A question about the text").fill("Where did it live?")
    answers = []
    for _ in range(2):
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator("#from-whole .facts")).to_contain_text("s in all")
        expect(page.locator("#from-nuggets .facts")).to_contain_text("s in all")
        answers.append(page.locator("#from-nuggets .answer").inner_text())
        (context,) = page.request.get(f"{address}/v1/contexts").json()["data"]
        page.request.delete(f"{address}/v1/contexts/{context['id']}")
    assert answers[0] == answers[1] != ""


def kind_of(response: Any) -> str:
    kind: str = response.headers["content-type"].partition(";")[0]
    return kind


def test_answers_about_one_text_do_not_reach_the_next(opened):
    page, _ = opened()
    read(page)
    page.get_by_label("A question about the text").fill("Where did it live?")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.evaluate("() => document.querySelector('#another').click()")  # at once, with the question on its way
    read(page, "Of another bird.")
    page.wait_for_timeout(1000)
    for card in ("#from-nuggets", "#from-whole"):
        assert page.locator(card).locator(".answer, .facts, .error").all_text_contents() == ["", "", ""]
    expect(page.locator("#ask .stop")).to_be_hidden()


def test_a_text_is_rebuilt_and_its_differences_marked(opened):
    page, _ = opened()
    read(page)
    page.get_by_role("button", name="Rebuild the text").click()
    expect(page.locator("#rebuild .facts")).to_contain_text("of the words came back")
    left = page.locator("#rebuilt").evaluate(
        "root => [...root.children].filter(e => e.tagName !== 'INS').map(e => e.textContent).join('')"
    )
    assert left.split() == TEXT.split()
    assert page.locator("#rebuilt del").count() > 0
    assert page.locator("#rebuilt").inner_text().split()[: len(TEXT.split())] == TEXT.split()  # what is put in stands apart
    lines = page.locator("#rebuilt del").first.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert lines == "line-through"  # not by colour alone


def test_a_text_is_rebuilt_from_nuggets_that_were_chosen_for_it_where_the_model_has_such(opened):
    page, address = opened(dodo=tiny_dodo(scores_by_use=True))
    read(page)
    page.get_by_label("A question about the text").fill("Where did it live?")
    page.get_by_role("button", name="Ask", exact=True).click()
    for card in ("#from-nuggets", "#from-whole"):
        expect(page.locator(f"{card} .facts")).to_contain_text("s in all")
    for _ in range(2):
        page.get_by_role("button", name="Rebuild the text").click()
        expect(page.locator("#rebuild .facts")).to_contain_text("of the words came back")
    assert sorted(uses(address)) == ["questions", "text"]
    page.get_by_role("button", name="Another text").click()
    page.wait_for_timeout(1000)
    assert uses(address) == []


def uses(address: str) -> list[str | None]:
    with urllib.request.urlopen(f"{address}/v1/contexts") as answer:
        return [context["use"] for context in json.load(answer)["data"]]


def test_all_can_be_done_by_keyboard(opened):
    page, _ = opened()

    def tab_to(selector: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                outline = page.evaluate(
                    "() => { const e = document.activeElement; const l = e.type === 'file' ? e.nextElementSibling : e;"
                    " return getComputedStyle(l).outlineStyle }"
                )
                assert outline != "none"
                return
        pytest.fail(f"{selector} is not reached")

    expect(page.locator("#entry")).to_be_visible()
    tab_to("#text")
    page.keyboard.type("Birds of the sea fly far. ")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#reading-title")).to_be_focused()
    tab_to("#ratio")
    before = ratio_of(page)
    page.keyboard.press("ArrowLeft")
    assert ratio_of(page) < before
    tab_to("#question")
    page.keyboard.type("Who flies?")
    page.keyboard.press("Enter")
    expect(page.locator("#from-whole .facts")).to_contain_text("s in all")
    tab_to("#rebuild .start")
    page.keyboard.press("Enter")
    expect(page.locator("#rebuild .facts")).to_contain_text("of the words came back")


def test_colours_follow_the_scheme_and_have_enough_contrast(opened):
    shown = []
    for scheme in ("light", "dark"):
        page, _ = opened(color_scheme=scheme)
        read(page)
        colours = """selector => {
            const element = document.querySelector(selector);
            let back = element;
            while (getComputedStyle(back).backgroundColor === "rgba(0, 0, 0, 0)") back = back.parentElement;
            const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
            return [getComputedStyle(element).color, getComputedStyle(back).backgroundColor].map(colour => {
                canvas.fillStyle = colour;
                canvas.fillRect(0, 0, 1, 1);
                return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
            });
        }"""
        for selector in ("body", "#tokens .nugget", "#tokens .g0", "button.primary", ".quiet", "dt"):
            if page.locator(selector).count():
                front, back = page.evaluate(colours, selector)
                assert contrast(front, back) >= 4.5, (scheme, selector, front, back)
        shown.append(page.evaluate(colours, "body"))
    assert shown[0] != shown[1]


def contrast(a: list[int], b: list[int]) -> float:
    """WCAG's, of two colours."""

    def luminance(colour: list[int]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_is_wider_than_a_phone(opened):
    page, _ = opened(viewport={"width": 360, "height": 740})
    wide = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) == 0
    read(page, TEXT + " " + "unbroken" * 60)
    page.get_by_label("A question about the text").fill("Where did it live?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator("#from-whole .facts")).to_contain_text("s in all")
    page.get_by_role("button", name="Rebuild the text").click()
    expect(page.locator("#rebuild .facts")).to_contain_text("of the words came back")
    page.get_by_text("What is kept, as a table").click()
    assert page.evaluate(wide) == 0


def test_a_text_with_markup_is_text(opened):
    page, _ = opened()
    read(page, MARKUP)
    assert page.locator("#tokens").inner_text() == MARKUP
    assert page.locator("#tokens img, #tokens script, #tokens b").count() == 0
    page.get_by_role("button", name="Rebuild the text").click()
    expect(page.locator("#rebuild .facts")).to_contain_text("of the words came back")
    assert page.locator("#rebuilt img, #rebuilt script").count() == 0
    assert page.title() == "Dodo"


def test_a_key_is_asked_for_and_a_wrong_one_said_to_be_wrong(opened):
    page, address = opened(keys=(KEY,))
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.locator("#entry")).to_be_hidden()
    assert page.request.get(f"{address}/v1/models").status == 401
    page.get_by_label("API key").fill("wrong-key-of-the-tests")
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key .error")).to_have_text("This is not a key of this server.")
    for file in PAGE.iterdir():
        assert page.request.get(f"{address}/page/{file.name}").status == 200
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    read(page)
    assert marked(page) == kept(inspected(address, ratio_of(page), Authorization=f"Bearer {KEY}"))
    assert page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]


def test_a_long_text_is_shown_at_once(opened):
    page, _ = opened()
    text = " ".join(f"{TEXT} Number {i}." for i in range(15))  # a token for each byte
    read(page, text)
    assert page.locator("#tokens").inner_text() == text
    assert page.locator("#tokens span").count() > 300
