"""The live page in a real headless Chromium: what is written into the ledger appears, and a cancel takes a confirmation."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, expect

from muscale import Study
from muscale.pages.live_page import LivePage
from muscale.pages.live_server import HOST, live_app
from muscale.proxies.study_check import _key
from muscale.search.record import Record
from muscale.store.cancels import cancelled_trials
from muscale.store.ledger_tables import ResultKind
from tests.muscale.browsers import Opened, chromium, opened
from tests.muscale.conftest import MICRO, write_text
from tests.muscale.pages.test_live_page import TOKEN, add_result, begun
from tests.muscale.planted import planted_check


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, LivePage, Record]]:
    """A page with actions, of a study whose name is evil and whose search has begun."""
    folder = tmp_path_factory.mktemp("live")
    write_text(folder / "text")
    (folder / "study.toml").write_text(
        MICRO.replace('name = "micro"', "name = '<img src=x onerror=\"window.evil = 1\">'")
    )
    study, record = begun(folder / "study.toml", trials=5)
    live = LivePage(study=study.contents, token=TOKEN)
    live.look()
    with serving(live) as url:
        yield url, live, record


@contextmanager
def serving(live: LivePage) -> Iterator[str]:
    """As `live_server.serve` does it, in a thread."""
    with socket.create_server((HOST, 0)) as bound, live.looking():
        server = uvicorn.Server(uvicorn.Config(live_app(live), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://{HOST}:{bound.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def shown(browser: Browser, served: tuple[str, LivePage, Record]) -> Iterator[Opened]:
    with opened(browser, served[0]) as page:
        yield page


def test_a_result_that_is_written_appears_and_nothing_else_moves(
    shown: Opened, served: tuple[str, LivePage, Record]
) -> None:
    page = shown.page
    expect(page.locator("#live")).to_have_attribute("data-state", "up")
    page.evaluate("document.getElementById('how-to-reproduce').marked = true")
    rows = page.locator("#search-in-progress tbody tr")
    assert rows.count() == 5
    before = page.locator("#search-in-progress .point").count()
    record = served[2]
    add_result(record, 3)
    expect(rows.nth(3)).to_contain_text("2.8")
    record.start({"learning_rate": 0.07}, 1)
    expect(rows).to_have_count(6)
    shown.wait_until_drawn()
    expect(page.locator("#search-in-progress .point")).to_have_count(before + 1)
    assert page.evaluate("document.getElementById('how-to-reproduce').marked"), "what did not change stays as it is"
    assert page.evaluate("window.evil") is None
    assert shown.complaints == []


def test_a_section_that_is_new_is_listed_too(shown: Opened, served: tuple[str, LivePage, Record]) -> None:
    page, live = shown.page, served[1]
    assert page.locator("#coordinate-check .missing").count() == 1
    assert page.locator("nav a[href='#coordinate-check'].unknown").count() == 1
    study = Study.open(live.study.path, quiet=True)
    numerics = study.config.shared_numerics(study.corpus, study.directory)
    live.study.ledger.record_result(ResultKind.CHECK, _key(study.config, numerics), planted_check().to_dict())
    expect(page.locator("#coordinate-check .figure .main-svg").first).to_be_visible()
    expect(page.locator("nav a[href='#coordinate-check'].unknown")).to_have_count(0)


def test_a_cancel_takes_a_confirmation_and_the_token(shown: Opened, served: tuple[str, LivePage, Record]) -> None:
    page, live, record = shown.page, served[1], served[2]
    button = page.locator("button[data-path='/cancel/trial/2']")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog")
    expect(dialog).to_contain_text("Cancel trial 2?")
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    button.click()
    dialog.locator("#reason").fill("too slow")
    dialog.locator("#token").fill("a guess")
    dialog.locator("#confirm-yes").click()
    expect(page.locator("#refusal")).not_to_be_empty()
    assert cancelled_trials(live.study.ledger, record.sweep) == {}
    shown.complaints.clear()  # Chromium reports the answer 401
    dialog.locator("#token").fill(TOKEN)
    dialog.locator("#confirm-yes").click()
    expect(dialog).not_to_be_visible()
    expect(button).to_have_count(0)
    expect(page.locator("#running-now")).to_contain_text("trial 2 was asked to end: too slow")
    assert cancelled_trials(live.study.ledger, record.sweep) == {2: "too slow"}
    assert shown.complaints == []


def test_a_server_that_is_gone_is_shown(browser: Browser, tmp_path: Path) -> None:
    write_text(tmp_path / "text", documents=2)
    (tmp_path / "study.toml").write_text(MICRO)
    study, _ = begun(tmp_path / "study.toml")
    with ExitStack() as stack:
        with serving(LivePage(study=study.contents)) as url:
            read_only = stack.enter_context(opened(browser, url))
            expect(read_only.page.locator("button.act")).to_have_count(0)
        expect(read_only.page.locator("#live")).to_contain_text("does not answer")
