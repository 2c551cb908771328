"""A real headless Chromium for tests, and what every page must be in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",  # root may not have one
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DRAWN = "document.documentElement.dataset.drawn === 'all'"
PATIENCE = 120_000  # milliseconds: on a busy machine plotly.js alone takes 30 s
WIDE, NARROW = (1280, 900), (390, 844)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; a test without one is skipped, and failed where CI=true."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = "needs Chromium: Debian's package chromium (`make ci-system`)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A page in a browser, and what it complained of."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def wait_until_drawn(self) -> None:
        """Until no figure is left to draw."""
        self.page.wait_for_function(DRAWN)


@contextmanager
def opened(browser: Browser, url: str, *, size: tuple[int, int] = WIDE, dark: bool = False) -> Iterator[Opened]:
    """The page at an address, in a context of its own: nothing is kept from one to the next."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light"
    )
    try:
        context.set_default_timeout(PATIENCE)
        tab = context.new_page()
        found = Opened(page=tab)
        tab.on("console", lambda message: found.complaints.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: found.complaints.append(str(error)))
        tab.add_init_script(
            "document.addEventListener('securitypolicyviolation',"
            " event => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"
        )
        tab.goto(url)
        found.wait_until_drawn()
        yield found
    finally:
        context.close()
