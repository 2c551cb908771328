"""The gallery: every checkpoint's texts and scores on one page, escaped, and readable without scripts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import escape, unescape
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import Browser

from muscale import StageError, Study
from muscale.findings import findings
from muscale.full_runs.checkpoints.evaluated_checkpoints import evaluated_checkpoints
from muscale.layout import GALLERY
from muscale.pages.contents import gather
from muscale.pages.gallery import open_gallery, run_names
from muscale.pages.live_page import LivePage
from muscale.pages.score_sections import _ablation, _rounded, score_sections
from muscale.plans.score_forecasts import ScoreForecasts
from muscale.store.evaluations import record
from tests.muscale.browsers import NARROW, WIDE, Opened, chromium, opened
from tests.muscale.command_lines import muscale
from tests.muscale.conftest import MICRO, write_text
from tests.muscale.pages.test_browser_live import serving
from tests.muscale.planted_evaluations import CHECKPOINTS, EVIL, PROMPTS, PlantedEvaluations, Taken, measured

N_CHECKPOINTS = CHECKPOINTS + 1 + 2 * 4


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedEvaluations]:
    folder = tmp_path_factory.mktemp("study")
    write_text(folder / "text", documents=2)
    (folder / "study.toml").write_text(MICRO)
    planted = PlantedEvaluations(folder / "study.toml")
    yield planted
    planted.ledger.close()


@pytest.fixture(scope="module")
def study(planted: PlantedEvaluations) -> Iterator[Study]:
    study = Study.open(planted.study, quiet=True)
    yield study
    study.ledger.close()


@pytest.fixture(scope="module")
def written(study: Study) -> Path:
    return study.gallery()


def test_checkpoints_come_from_the_ledger_and_from_the_full_run_s_folder(planted: PlantedEvaluations) -> None:
    found = evaluated_checkpoints(planted.ledger)
    assert len(found) == N_CHECKPOINTS
    full = [one for one in found if one.is_full]
    assert {one.run for one in full} == {planted.plan.key}
    assert [one.tokens for one in full] == sorted(one.tokens for one in full)
    assert [one.anneals for one in full] == [False] * CHECKPOINTS + [True]
    assert (full[0].val_loss, full[0].n_params) == (3.95, planted.plan.model.n_params)
    assert [one.anneals for one in found[:8]] == 2 * [False, False, False, True]
    assert {one.run for one in found[:8]} == {chain.stem for chain in planted.ladder}


def test_scores_of_earlier_settings_are_left_out(make_study: Callable[[], Path]) -> None:
    planted = PlantedEvaluations(make_study())
    chain = planted.ladder[0]
    record(planted.ledger, chain, Taken("tasks", "with more items"), measured(1.0, 1e6)["tasks"], seconds=1.0)
    of_ladder = [one for one in evaluated_checkpoints(planted.ledger) if not one.is_full]
    tasks = [one for one in of_ladder if any(score.measure == "tasks" for score in one.scores)]
    assert [(one.run, one.tokens) for one in tasks] == [(chain.stem, chain.last.end)]
    assert all(one.samples for one in of_ladder)
    planted.ledger.close()


def test_a_run_s_name_tells_it_from_every_other_run(planted: PlantedEvaluations) -> None:
    one = evaluated_checkpoints(planted.ledger)[0]
    runs = {"a" * 8: (10_000, 0), "b" * 8: (10_000, 1), "c" * 8: (10_000, 1), "d" * 8: (1_310_000, 0)}
    found = [replace(one, run=run, n_params=n_params, seed=seed) for run, (n_params, seed) in runs.items()]
    names = list(run_names(found).values())
    assert names == ["10k-seed0", "10k-seed1 bbbbbb", "10k-seed1 cccccc", "1.31M"]
    full = [replace(one, run=run, is_full=True) for run in ("plan", "other")]
    assert list(run_names(full).values()) == ["full run plan", "full run other"]
    assert run_names(full[:1]) == {"plan": "full run"}


def test_every_text_is_on_the_page_escaped_and_readable_without_scripts(written: Path) -> None:
    text = written.read_text()
    assert EVIL not in text
    listed = re.findall(r'<li data-checkpoint="(\d+)"><details><summary>.*?</summary><p>(.*?)</p></details></li>', text)
    assert len(listed) == N_CHECKPOINTS * len(PROMPTS)
    prompts = re.findall(r'<h3 class="prompt">(.*?)</h3>', text, re.DOTALL)
    assert [unescape(prompt) for prompt in prompts] == list(PROMPTS)
    assert escape(EVIL) in text
    assert not re.findall(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)\s*=""", text)


def test_the_page_has_every_score(written: Path, planted: PlantedEvaluations) -> None:
    text = written.read_text()
    table = text.partition('id="every-score"')[2]
    assert table.count("<td>bits_per_byte</td>") == 2 * N_CHECKPOINTS
    (data,) = re.findall(r'id="checkpoints">(.*?)</script>', text)
    values = json.loads(data)
    assert values["columns"][:3] == ["loss", "copying bits_per_byte", "copying accuracy"]
    column = values["columns"].index("copying accuracy")
    last = measured(1.0, planted.plan.model.n_params)["tasks"].scores[1]
    assert values["checkpoints"][-1]["scores"][column] == [last.value, last.standard_error]
    assert text.count('aria-label="copying: accuracy over tokens"') == 1
    assert "chance over tokens" not in text


def test_runs_and_compared_checkpoints_are_chosen_by_name(study: Study, tmp_path: Path) -> None:
    gallery = open_gallery(study.contents)
    small, large, full = gallery.runs
    assert full == "full run"
    tokens = gallery.checkpoints[1].tokens
    path = study.gallery(tmp_path / "g.html", runs=[small, full], compare=(f"{small}@{tokens}", full))
    values = json.loads(re.findall(r'id="checkpoints">(.*?)</script>', path.read_text())[0])
    assert values["compared"] == [1, CHECKPOINTS + 4]
    assert {one["run"] for one in values["checkpoints"]} == {small, full}
    for wrong in ({"runs": ["none"]}, {"compare": (full, "none")}, {"compare": (full, f"{large}@1")}):
        with pytest.raises(StageError):
            study.gallery(tmp_path / "none.html", **wrong)
    assert not (tmp_path / "none.html").exists()


def test_the_command_writes_the_page_and_refuses_a_study_without_evaluations(
    planted: PlantedEvaluations, make_study: Callable[[], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    given = ["--html", str(page), "--compare", "full run", "full run", "--run", "full run"]
    assert muscale(capsys, "gallery", str(planted.study), *given).code == 0
    assert page.exists()
    refused = muscale(capsys, "gallery", str(make_study()))
    assert refused.code == 2
    assert "[scores]" in refused.err


def test_the_report_has_the_scores_and_leads_to_the_gallery(
    study: Study, written: Path, planted: PlantedEvaluations
) -> None:
    contents = gather(study.contents, findings(study.contents))
    assert contents.gallery == GALLERY == written.name
    sections = {
        section.title: section
        for section in score_sections(contents.checkpoints, contents.score_forecasts, contents.gallery)
    }
    assert list(sections) == ["Scores", "Memorisation", "Loss after rounding the weights", "Ablation"]
    measured_accuracy = measured(1.0, planted.plan.model.n_params)["tasks"].scores[1].value
    row = next(row for row in (sections["Scores"].table or "").split("<tr>") if "copying" in row)
    for value in ("0.7", "0.6", "0.8", "direct", "9", f"{measured_accuracy:.4g}", "0.03", "inside"):
        assert f"<td>{value}</td>" in row
    assert f'href="{GALLERY}"' in sections["Scores"].markup
    assert re.findall(r"layer \d", sections["Ablation"].table or "") == ["layer 1", "layer 0"]
    assert (sections["Loss after rounding the weights"].table or "").count("<td>int4</td>") == 3
    assert (sections["Memorisation"].table or "").count("<td>20,8") == 2
    assert Path(study.report()).read_text().count('id="memorisation"') == 1


def test_samples_alone_lead_to_the_gallery_without_a_table_of_forecasts() -> None:
    nothing = ScoreForecasts(plan="p", level=0.9, scores=())
    assert score_sections([], nothing, None) == []
    (section,) = score_sections([], nothing, GALLERY)
    assert (section.table, GALLERY in section.markup) == (None, True)


def test_a_study_without_scores_has_no_section_on_them(make_study: Callable[[], Path]) -> None:
    with_none = Study.open(make_study(), quiet=True)
    contents = gather(with_none.contents, findings(with_none.contents))
    assert score_sections(contents.checkpoints, contents.score_forecasts, contents.gallery) == []
    with_none.ledger.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def test_the_live_page_serves_it_apart(browser: Browser, study: Study, written: Path) -> None:
    with (
        serving(LivePage(study=study.contents)) as address,
        opened(browser, f"{address}{written.name}") as shown,
    ):
        assert shown.page.evaluate("window.origin") == "null"
        assert len(visible_texts(shown)) == 3 * len(PROMPTS)
        assert shown.complaints == []


def visible_texts(page: Opened) -> list[str]:
    return page.page.locator(".samples li:visible p").all_inner_texts()


@pytest.mark.parametrize(("size", "at_once"), [(WIDE, 3), (NARROW, 1)])
def test_checkpoints_are_chosen_and_compared(
    browser: Browser, written: Path, size: tuple[int, int], at_once: int
) -> None:
    with opened(browser, written.as_uri(), size=size) as shown:
        page = shown.page
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert len(visible_texts(shown)) == at_once * len(PROMPTS)
        assert visible_texts(shown)[at_once - 1].endswith("100"), "the end of the full run"
        page.get_by_label("Previous checkpoint").click()
        assert visible_texts(shown)[at_once - 1].endswith("96")
        page.get_by_label("Next checkpoint").click()
        assert page.get_by_label("Next checkpoint").is_disabled()
        slider = page.get_by_label("Checkpoint", exact=True)
        slider.focus()
        page.keyboard.press("Home")
        assert visible_texts(shown)[0].endswith("4")
        page.get_by_role("button", name="the ends of all runs").click()
        assert len(visible_texts(shown)) == at_once * len(PROMPTS)
        tops = page.eval_on_selector_all(
            ".samples li:not([hidden])", "items => items.map(item => Math.round(item.getBoundingClientRect().top))"
        )
        assert len(set(tops[:at_once])) == 1, "side by side"

        first, second = page.locator("#compared select").all()
        first.select_option(index=8)
        second.select_option(index=9)
        marked = [mark.strip() for mark in page.locator("#compared .texts mark").all_inner_texts() if mark.strip()]
        assert {"4", "8"} <= set(marked), "the numbers at the ends of the texts differ"
        rows = {
            row.locator("td").first.inner_text(): row.locator("td").all_inner_texts()[1:]
            for row in page.locator("#compared tbody tr").all()
        }
        a, b, difference, error = (float(cell.replace("−", "-")) for cell in rows["copying accuracy"])
        assert difference == pytest.approx(b - a, abs=2e-4)
        assert error == pytest.approx(0.03 * 2**0.5, rel=1e-3)
        first.select_option(index=9)
        assert page.locator("#compared .texts mark").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.evaluate("window.evil") is None
        assert page.locator(".small-figures .main-svg").count() >= 5
        assert shown.complaints == []


def test_two_seeds_of_one_size_share_a_row_of_rounded_weights() -> None:
    about = {"run": "a", "is_full": False, "n_params": 1000, "tokens": 64, "anneals": True, "measure": "quantised_loss"}
    rows = [
        about | {"run": run, "name": "int8", "metric": metric, "value": value, "standard_error": 0.1, "n": 1}
        for run, shift in (("a", 0.0), ("b", 0.2))
        for metric, value in (("loss", 2.0 + shift), ("loss_increase", 0.1 + shift), ("memory_bytes", 10.0))
    ]
    section = _rounded(pd.DataFrame(rows))
    assert section.table is not None
    assert section.table.count("<tr") == 2
    assert "2.1" in section.table
    ablated = [row | {"measure": "ablation", "name": "layer 0"} for row in rows if row["metric"] == "loss_increase"]
    ranked = _ablation(pd.DataFrame(ablated)).table
    assert ranked is not None
    assert ranked.count("<tr") == 2, "one run's parts are ranked"
