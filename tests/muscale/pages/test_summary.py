"""The top of the report: the forecast's fate, and how far the study came."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pandas as pd
import pytest

from muscale.pages.contents import ReportContents
from muscale.pages.sections import as_table, count, escaped
from muscale.pages.summary import conclusion, headline, lineage, ruler, tiles
from scaling import fit_verdict
from tests.muscale.pages.test_report import COLUMNS, promoted
from tests.scaling.optima.test_verdict import rows


def contents(**known: Any) -> ReportContents:
    runs = pd.DataFrame(columns=COLUMNS)
    return ReportContents(**{"name": "s", "created_at": "2026-01-02T03:04:05+00:00", "runs": runs, **known})


FORECAST = {
    "loss": 1.0,
    "low": 0.9,
    "high": 1.1,
    "level": 0.9,
    "registered_at": "2026-01-02T03:04:05+00:00",
    "reasons": [],
}


def test_without_a_forecast_nothing_is_drawn() -> None:
    assert headline(contents()) == ("no forecast yet", "none")
    assert ruler(contents()) is None
    assert tiles(contents()) == []
    assert {step.state for step in lineage(contents())} == {"open"}
    assert headline(contents(forecast=FORECAST)) == ("forecast 1.0000, not measured yet", "waiting")


def test_axes_of_experts_are_apart_from_the_verdict_that_the_gate_reads() -> None:
    drifting = rows((-6.0, -7.2, -8.4), along="sparsity", sizes=(4, 8, 16))
    verdict = fit_verdict(pd.concat([rows(), drifting]))
    assert verdict.verdict == "fail"
    found = contents(transfer=verdict)
    assert [(tile.value, tile.state) for tile in tiles(found)] == [("pass", "good"), ("fail", "")]
    (step,) = [step for step in lineage(found) if step.title == "Transfer"]
    assert (step.value, step.state) == ("pass", "done")


@pytest.mark.parametrize(("loss", "inside"), [(1.05, True), (1.5, False), (0.2, False)])
def test_all_places_lie_on_the_line_in_order(loss: float, inside: bool) -> None:
    drawn = ruler(contents(forecast=FORECAST, promotion=promoted(loss, inside=inside)))
    assert drawn is not None
    places = {name: drawn[name] for name in ("low", "forecast", "high", "measured")}
    values = {"low": 0.9, "forecast": 1.0, "high": 1.1, "measured": loss}
    assert sorted(places, key=lambda name: places[name]) == sorted(values, key=lambda name: values[name])
    assert all(0 < place < 100 for place in places.values())


def test_the_conclusion_depends_on_support_and_on_the_measured_loss() -> None:
    supported, unsupported = FORECAST, FORECAST | {"reasons": ["few runs"]}
    runs = (None, promoted(1.05, inside=True), promoted(1.5, inside=False))
    found = [
        conclusion(contents(forecast=forecast, promotion=run)) for forecast in (supported, unsupported) for run in runs
    ]
    assert len(set(found)) == 6
    assert conclusion(contents()) == ""
    assert ["0.9000 to 1.1000" in text for text in found] == [True, False, False, False, False, False]
    assert "10%" in found[2]


def test_a_forced_launch_stays_in_the_summary() -> None:
    forced = {**promoted(1.0, inside=True), "forced": True, "forced_lines": ["transfer"]}
    (tile,) = [tile for tile in tiles(contents(forecast=FORECAST, promotion=forced)) if tile.label == "gate"]
    assert (tile.value, tile.note, tile.state) == ("forced", "despite transfer", "bad")


def test_a_full_run_that_has_begun_stands_in_the_lineage_with_its_share() -> None:
    curve = pd.DataFrame({"tokens": [256, 512], "train_loss": [3.0, 2.0]})
    found = contents(forecast=FORECAST, plan={"n_tokens": 2048}, curve=curve)
    (step,) = [step for step in lineage(found) if step.title == "Full run"]
    assert (step.state, step.note) == ("open", "25% trained")


def test_a_run_outside_its_interval_and_a_bundle_stand_in_the_lineage() -> None:
    steps = {
        step.title: step
        for step in lineage(contents(forecast=FORECAST, promotion=promoted(1.5, inside=False), bundle="0123456789"))
    }
    assert (steps["Full run"].state, steps["Full run"].note) == ("failed", "outside")
    assert (steps["Bundle"].state, steps["Bundle"].note) == ("done", "01234567")
    assert steps["Corpus"].state == "open"


def test_large_numbers_are_short() -> None:
    assert [count(n) for n in (12, 999.6, 999_600, 117_056, 5_126_144, 7e9, 1.5e13, 1e16)] == [
        "12",
        "1 k",
        "1 M",
        "117 k",
        "5.13 M",
        "7 B",
        "15 T",
        "1e+16",
    ]


def test_json_can_t_end_its_element() -> None:
    text = escaped('["</script><!-- &amp;"]')
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text) == ["</script><!-- &amp;"]


def test_a_table_has_dashes_for_what_is_unknown_or_unbounded() -> None:
    table = pd.DataFrame({"stderr": [0.25, math.inf, math.nan], "n": [1_000, 2, 3], "ratio": [None, None, None]})
    markup = as_table(table)
    assert markup is not None
    assert re.findall("<td>(.*?)</td>", markup) == ["0.25", "1,000", "–", "–", "2", "–", "–", "3", "–"]
    assert as_table(pd.DataFrame()) is None


def test_counts_with_gaps_are_whole_in_a_table_and_measured_values_are_not() -> None:
    table = pd.DataFrame({"tokens": [262144.0, None], "loss": [2.0, None], "flops": [2e12, None], "rate": [0.25, 3.0]})
    cells = re.findall("<td>(.*?)</td>", as_table(table) or "")
    assert cells == ["262,144", "2", "2e+12", "0.25", "–", "–", "–", "3"]
