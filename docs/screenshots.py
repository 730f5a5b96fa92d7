"""Pictures of the page that `dodo serve` gives, with the model that ships: docs/figures/page-{light,dark,phone}.png.

    python docs/screenshots.py

Needs playwright (the extra `dev`) and a Chromium on the machine; none is downloaded.
"""

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import Page, sync_playwright

from dodo.serving.app import make_app
from dodo.serving.settings import Settings

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "examples" / "harbour-clock.txt"
QUESTION = "Who built the clock?"
RATIO = "3"
SHOTS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1200, "height": 1340}},
    "dark": {"viewport": {"width": 1200, "height": 1340}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as store, _server(Path(store)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, settings in SHOTS.items():
            page = browser.new_context(**settings).new_page()
            page.set_default_timeout(600_000)
            page.goto(address)
            _use(page)
            page.evaluate("() => scrollTo(0, 0)")
            if name == "phone":
                page.locator("#reading").evaluate("e => e.scrollIntoView()")
            out = ROOT / "docs" / "figures" / f"page-{name}.png"
            page.screenshot(path=out)
            print(f"{out.relative_to(ROOT)}: {out.stat().st_size:,} bytes")
        browser.close()


def _use(page: Page) -> None:
    """Open the text, choose a ratio, and ask."""
    page.locator("#entry:visible").wait_for()
    page.locator("#file").set_input_files(TEXT)
    page.locator("#tokens span").first.wait_for()
    while page.locator("#ratio-shown").inner_text() != RATIO:
        page.locator("#ratio").press("ArrowLeft")
    page.locator("#question").fill(QUESTION)
    page.get_by_role("button", name="Ask", exact=True).click()
    page.locator("#from-whole .facts", has_text="in all").wait_for()
    page.evaluate("() => document.activeElement.blur()")


@contextmanager
def _server(store: Path) -> Iterator[str]:
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(Settings(store=store)), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.1)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
