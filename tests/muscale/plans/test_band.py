"""The band: it covers about as often as it says, begins late enough, and is what was registered."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from muscale import StudyConfig
from muscale.layout import CURVES
from muscale.plans.band import MIN_STEMS, WINDOW, Band, make_band, register_band
from muscale.proxies.ladder_curves import read_curves
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.mixture import Mixture, MixtureStage
from tests.muscale.planted_ladder import (
    COOLDOWN,
    OFFSET,
    WARMUP,
    log_ratio,
    numerics_of,
    planted_curve,
    registered_plan,
    write_ladder,
)

MakeStudy = Callable[..., Path]
N_TOKENS = 1_000_000


def band_of(generator: np.random.Generator, *, stems: int = 10, h: float = 0.02, noise: float = 0.01) -> Band:
    return make_band(
        [planted_curve(generator, stem=str(number), noise=noise) for number in range(stems)],
        warmup_tokens=round(WARMUP * N_TOKENS),
        ends=[round((1 - COOLDOWN) * N_TOKENS), N_TOKENS],
        loss=2.0,
        low=2.0 * math.exp(-h),
        high=2.0 * math.exp(h),
        level=0.9,
    )


@pytest.mark.parametrize("stems", [4, 12])
def test_the_band_s_coverage_is_near_its_level(stems: int) -> None:
    generator = np.random.default_rng(0)
    shares = np.array([0.15, 0.3, 0.6, 0.8499, 0.95])
    inside = []
    scale = 0.02 / 1.645
    for _ in range(60):
        band = band_of(generator, stems=stems)
        for _ in range(10):
            final = math.log(2.0) + scale * generator.standard_normal()
            losses = np.exp(final + log_ratio(shares) + 0.01 * generator.standard_normal())
            limits = band.at(shares * N_TOKENS)
            inside.append((losses >= limits["low"]) & (losses <= limits["high"]))
    covered = np.mean(inside, axis=0)
    assert np.all((covered > 0.86) & (covered < 0.97)), covered


def test_the_ratio_and_the_offset_of_the_ladder_are_found() -> None:
    band = band_of(np.random.default_rng(1), stems=40, noise=0.003)
    assert band.offset == pytest.approx(OFFSET, abs=3e-3)
    shares = np.array([0.15, 0.3, 0.6, 0.85, 0.9, 0.95])
    expected = np.log(band.at(shares * N_TOKENS)["expected"] / 2.0)
    assert expected.to_numpy() == pytest.approx(log_ratio(shares), abs=6e-3)


def test_nothing_is_expected_before_warmup_and_one_window() -> None:
    band = band_of(np.random.default_rng(2))
    assert band.begins == pytest.approx(WARMUP + WINDOW)
    limits = band.at([0.09 * N_TOKENS, 0.11 * N_TOKENS])
    assert limits.iloc[0].isna().all()
    assert limits.iloc[1].notna().all()


def test_at_the_end_the_band_is_the_registered_interval_and_it_is_wider_before() -> None:
    band = band_of(np.random.default_rng(3))
    end = band.at([N_TOKENS]).iloc[0]
    assert (end["low"], end["expected"], end["high"]) == (band.low, band.loss, band.high)
    assert min(band.log_reach[:-1]) > band.log_reach[-1] == pytest.approx(0.02)
    drawn = band.to_frame()
    assert drawn["tokens"].iloc[-1] == N_TOKENS
    assert drawn.notna().all(axis=None)


def test_more_stems_give_a_narrower_band() -> None:
    few, many = (band_of(np.random.default_rng(4), stems=stems) for stems in (MIN_STEMS, 30))
    assert np.mean(few.log_reach) > 1.3 * np.mean(many.log_reach)


def test_too_few_stems_leave_the_end_alone_with_a_reason() -> None:
    band = band_of(np.random.default_rng(5), stems=MIN_STEMS - 1)
    assert "needs 3 ladder stems" in band.reason
    assert band.at([N_TOKENS // 2]).isna().all(axis=None)
    assert band.at([N_TOKENS]).iloc[0]["high"] == band.high
    assert len(band.to_frame()) == 1


def test_branches_of_one_stem_are_not_counted_as_several(ledger: Ledger) -> None:
    generator = np.random.default_rng(6)
    curves = [planted_curve(generator, stem="one") for _ in range(8)]
    band = make_band(curves, warmup_tokens=50_000, ends=[850_000, N_TOKENS], loss=2, low=1.9, high=2.1, level=0.9)
    assert (band.n_runs, band.n_stems) == (8, 1)
    assert band.reason


def test_a_ladder_on_disk_is_read_back_whole(make_study: MakeStudy, ledger: Ledger) -> None:
    config = StudyConfig.read(make_study())
    rows = write_ladder(ledger, numerics_of(config), config)
    curves = read_curves(ledger, list(rows["key"]))
    assert [len(curve.positions) for curve in curves] == [128] * 4
    assert all(np.diff(curve.positions) == pytest.approx(256) for curve in curves)
    assert [tokens for tokens, _ in curves[0].ends] == [round(128 * 0.85) * 256, 128 * 256]
    (ledger.directory / CURVES / f"{rows['key'][2]}.parquet").unlink()
    assert len(read_curves(ledger, list(rows["key"]))) == 3


def test_a_step_without_a_token_that_counts_is_left_out_of_its_curve(make_study: MakeStudy, ledger: Ledger) -> None:
    config = StudyConfig.read(make_study())
    key = next(iter(write_ladder(ledger, numerics_of(config), config)["key"]))
    (whole,) = read_curves(ledger, [key])
    path = ledger.directory / CURVES / f"{key}.parquet"
    table = pd.read_parquet(path)
    table.loc[table.index[3], "train_loss"] = 0.0
    table.to_parquet(path)
    (curve,) = read_curves(ledger, [key])
    left_out = whole.positions == table["tokens"].iloc[2]
    assert left_out.sum() == 1
    assert curve.positions.tolist() == whole.positions[~left_out].tolist()
    assert curve.train_loss.tolist() == whole.train_loss[~left_out].tolist()


def test_the_band_is_registered_once_and_before_the_run(make_study: MakeStudy, ledger: Ledger) -> None:
    path = make_study()
    config = StudyConfig.read(path)
    rows = write_ladder(ledger, numerics_of(config), config)
    plan = registered_plan(path, ledger)
    band = register_band(plan, ledger, rows, max_regret=0.01)
    assert (band.n_runs, band.reason, band.n_tokens) == (4, "", plan.n_tokens)
    assert (band.low, band.high) == (plan.forecast.low, plan.forecast.high)
    assert Band.from_dict(json.loads(json.dumps(band.to_dict()))) == band
    assert register_band(plan, ledger, rows.iloc[:1], max_regret=0.01) == band, "it is not made again"
    late = replace(plan, key="late")
    ledger.record_result(ResultKind.PROMOTION_STARTED, "late", {"at": "now"})
    assert "the run began before" in register_band(late, ledger, rows, max_regret=0.01).reason
    assert ledger.result(ResultKind.BAND, "late") is None


def test_in_a_corpus_with_stages_the_band_begins_with_the_last_and_has_only_an_end_if_stages_end_at_tokens(
    make_study: MakeStudy, ledger: Ledger
) -> None:
    path = make_study()
    config = StudyConfig.read(path)
    rows = write_ladder(ledger, numerics_of(config), config)
    plan, last = registered_plan(path, ledger), MixtureStage(weights={"a": 1, "b": 2})
    whole = register_band(plan, ledger, rows, max_regret=0.01)

    def staged(key: str, **end: Any) -> Band:
        first = MixtureStage(weights={"a": 1, "b": 1}, **end)
        named = replace(plan, key=key)
        return register_band(named, ledger, rows, max_regret=0.01, mixture=Mixture(stages=(first, last)))

    band = staged("by fraction", until_fraction=0.6)
    assert band.begins == pytest.approx(0.6 + WINDOW)
    assert band.begins > whole.begins
    tokens = np.array([0.3, 0.7, 0.9, 1.0]) * plan.n_tokens
    late = band.at(tokens)
    assert late["expected"].isna().tolist() == [True, False, False, False]
    np.testing.assert_allclose(late["expected"][1:], whole.at(tokens)["expected"][1:], rtol=0.01)
    by_tokens = staged("by tokens", until_tokens=1024)
    assert (by_tokens.begins, bool(by_tokens.reason)) == (1.0, True)
    assert ledger.result(ResultKind.BAND, "by tokens") == by_tokens.to_dict()


def test_runs_without_a_law_have_no_band(make_study: MakeStudy, ledger: Ledger) -> None:
    path = make_study()
    config = StudyConfig.read(path)
    rows = write_ladder(ledger, numerics_of(config), config, stems=5)
    rows.loc[0, "left_out"] = "of an earlier revision"
    rows.loc[1, "regret"] = 0.5
    band = register_band(registered_plan(path, ledger), ledger, rows, max_regret=0.01)
    assert band.n_runs == 3
