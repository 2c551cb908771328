"""The report in a real headless Chromium: drawn, sorted, readable on a telephone, and deaf to what names say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from muscale.pages.report import write_report
from tests.muscale.browsers import NARROW, Opened, chromium, opened
from tests.muscale.planted_report import planted_contents

EVIL = "<script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of everything, of a study with an evil name."""
    folder = tmp_path_factory.mktemp("report")
    return write_report(planted_contents(folder, EVIL), folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def shown(browser: Browser, report: str) -> Iterator[Opened]:
    """The page on a desk, for tests that leave it as it is."""
    with opened(browser, report) as page:
        yield page


@pytest.fixture(scope="module")
def narrow(browser: Browser, report: str) -> Iterator[Opened]:
    """The page on a telephone, for tests that leave it as it is."""
    with opened(browser, report, size=NARROW) as page:
        yield page


def test_every_figure_is_drawn_and_nothing_complains(shown: Opened) -> None:
    figures = shown.page.eval_on_selector_all(
        ".figure",
        """figures => figures.map(figure => [
            figure.getAttribute("aria-label"),
            figure.querySelectorAll(".trace path, .point, .points path, .bars path, .gl-canvas, .lines path").length,
            figure.getBoundingClientRect().height,
            [...figure.querySelectorAll(".g-xtitle, .g-ytitle, .parcoords, .yaxislayer-above")].length,
        ])""",
    )
    assert len(figures) >= 20
    for label, marks, height, named in figures:
        assert label, "every figure says what it shows"
        assert marks > 0, label
        assert height > 100, label
        assert named > 0, label
    for label in (
        "every trial across its hyperparameters",
        "loss over size and tokens",
        "shares of compute and time by purpose",
    ):
        assert label in {figure[0] for figure in figures}
    assert shown.complaints == []


def test_tables_sort_by_click_and_by_keyboard(shown: Opened) -> None:
    table = shown.page.locator("#every-run table")

    def column() -> list[float]:
        cells = table.locator("tbody tr td:nth-child(4)").all_inner_texts()
        return [float(text.replace(",", "")) for text in cells]

    heading = table.locator("th", has_text="n_tokens")
    before = column()
    assert before == sorted(before, reverse=True)
    heading.locator("button").click()
    assert column() == sorted(before)
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").focus()
    shown.page.keyboard.press("Enter")
    assert column() == sorted(before, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    table.locator("th", has_text="loss").locator("button").press("Space")
    assert table.locator("th[aria-sort]").count() == 1
    assert shown.complaints == []


def test_the_keyboard_reaches_the_contents_and_what_is_scrolled(shown: Opened) -> None:
    reached = set()
    for _ in range(60):
        shown.page.keyboard.press("Tab")
        reached.add(
            shown.page.evaluate("(document.activeElement.closest('nav, .wide, .lineage, .skip') ?? {}).className ?? ''")
        )
    assert {"skip", "lineage", "wide"} <= reached
    links = shown.page.eval_on_selector_all(
        "nav a, .lineage a", "links => links.map(link => link.getAttribute('href'))"
    )
    assert len(links) > 20
    assert all(shown.page.locator(link).count() == 1 for link in links)


def test_nothing_overflows_a_telephone_and_its_inks_can_be_read(narrow: Opened) -> None:
    assert narrow.page.evaluate("document.documentElement.scrollWidth") == NARROW[0]
    assert (
        narrow.page.eval_on_selector_all(
            ".wide, .panel, pre",
            "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).map(box => box.closest('section').id)",
        )
        == []
    ), "no table, figure or text is scrolled sideways"
    titles = '#coordinate-check g[class^="g-x"][class$="title"]'
    middles = narrow.page.eval_on_selector_all(
        titles,
        "titles => titles.map(title => title.getBoundingClientRect()).map(({x, width}) => Math.round(x + width / 2))",
    )
    assert len(middles) == 2
    assert len(set(middles)) == 1, "panels stand below each other"
    assert (
        narrow.page.eval_on_selector("#every-run td:nth-child(4)", "cell => getComputedStyle(cell, '::before').content")
        == '"n_tokens"'
    )
    for scheme in ("light", "dark"):
        narrow.page.emulate_media(color_scheme=scheme)
        page, ink = narrow.page.evaluate(
            "[document.body, document.querySelector('.xtick text')].map((element, i) =>"
            " getComputedStyle(element)[i ? 'fill' : 'backgroundColor'].match(/\\d+/g).slice(0, 3).map(Number))"
        )
        darker, lighter = sorted((_luminance(page), _luminance(ink)))
        assert (lighter + 0.05) / (darker + 0.05) > 4.5, "WCAG 2.2, 1.4.3"
        assert (sum(page) < 384) == (scheme == "dark")


def _luminance(colour: list[int]) -> float:
    """Relative luminance of sRGB (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("size", ["narrow", "shown"])
def test_a_short_table_is_shown_whole(request: pytest.FixtureRequest, size: str) -> None:
    opened_page: Opened = request.getfixturevalue(size)
    hidden = opened_page.page.eval_on_selector_all(
        ".wide",
        "boxes => boxes.filter(box => box.scrollHeight > box.clientHeight + 1).map(box => box.querySelector('tbody').rows.length)",
    )
    assert min(hidden) > 20, "what is scrolled within its box is long"


def test_it_prints_whole_tables_and_no_navigation(shown: Opened) -> None:
    shown.page.emulate_media(media="print")
    assert not shown.page.locator("nav").is_visible()
    assert shown.page.eval_on_selector("#every-run .wide", "box => box.scrollHeight <= box.clientHeight + 1")
    printed = shown.page.pdf()
    assert printed.startswith(b"%PDF")


def test_a_name_s_script_does_not_run(shown: Opened) -> None:
    """The last one of the page on the desk, as the page complains from now on."""
    assert shown.page.inner_text("h1") == EVIL
    assert shown.page.evaluate("window.evil") is None
    # Even a script that came through would be refused: only the page's own two run.
    shown.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.evil = 2'}))"
    )
    assert shown.page.evaluate("window.evil") is None
    assert any("script" in complaint.lower() for complaint in shown.complaints)
