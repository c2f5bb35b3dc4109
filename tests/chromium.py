"""A real browser for tests. Without a browser the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = Path("/usr/bin/chromium")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, NARROW = 1280, 400
PATIENCE_MS = 60_000
SERIOUS = {"serious", "critical"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Starts Debian's chromium with a fresh profile."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="there is no playwright: install the extra `browser`"
    )
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: `make browser` installs it, as root")
    with playwright.sync_playwright() as started:
        started_browser: Browser = started.chromium.launch(executable_path=CHROMIUM, args=list(SWITCHES))
        try:
            yield started_browser
        finally:
            started_browser.close()


@dataclass
class Opened:
    """An open page, and the errors that occurred in it."""

    page: Page
    troubles: list[str] = field(default_factory=list)
    """Errors and warnings of the console, errors of the page's own code, and failed requests."""
    requested_urls: list[str] = field(default_factory=list)
    """Every URL that the page requested."""

    def on_console(self, message: ConsoleMessage) -> None:
        """Keeps a message of the console."""
        if message.type in ("error", "warning"):
            self.troubles.append(message.text)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def figure(self, name: str) -> str:
        """Returns one of the figures at the top, without its unit."""
        return self.text(f"[data-figure={name}] dd b")

    def serial(self) -> int:
        return int(self.page.locator("#main").get_attribute("data-serial") or 0)

    def wait(self, condition: str, timeout_ms: float = PATIENCE_MS) -> None:
        """Waits for a condition, given as JavaScript. It polls, because the page's policy forbids `eval`."""
        self.page.wait_for_function(f"() => {condition}", timeout=timeout_ms, polling=100)

    def wait_for_connection(self, connection: str) -> None:
        self.wait(f"document.body.dataset.connection === '{connection}'")

    def wait_for_updates(self, number: int) -> None:
        self.wait(f"Number(document.getElementById('main').dataset.serial) >= {self.serial() + number}")

    def findings(self) -> list[str]:
        """Returns axe's serious and critical findings."""
        from axe_playwright_python.sync_playwright import Axe

        found: dict[str, Any] = Axe().run(self.page).response
        return [
            f"{each['id']}: {node['html'][:200]}"
            for each in found["violations"]
            if each["impact"] in SERIOUS
            for node in each["nodes"]
        ]


@contextmanager
def opened(browser: Browser, url: str, *, width: int = WIDE, scheme: Any = "light") -> Iterator[Opened]:
    """Opens a tab without anything that other tabs have stored."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page_log = Opened(page)
    page.on("console", page_log.on_console)
    page.on("pageerror", lambda error: page_log.troubles.append(str(error)))
    page.on("request", lambda request: page_log.requested_urls.append(request.url))
    page.goto(url)
    try:
        yield page_log
    finally:
        context.close()
