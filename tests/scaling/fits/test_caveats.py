"""Caveats of a fit: single rows far off, best sizes away from the runs', losses of more than one recipe."""

import re
from collections.abc import Callable

import numpy as np
import pandas as pd

from scaling import Law, ScalingFit, fit

Ladder = Callable[..., pd.DataFrame]


def fitted(runs: pd.DataFrame) -> ScalingFit:
    return fit(runs, n_params_convention="total", n_bootstrap=10)


def test_a_sound_ladder_gives_nothing_to_look_at(ladder: Ladder) -> None:
    for seed in range(5):
        found = fitted(ladder(noise=0.003, seed=seed))
        assert (found.caveats, found.status) == ((), "ok")


def test_a_mistyped_loss_is_named_by_its_row(ladder: Ladder) -> None:
    runs = ladder(noise=0.003)
    runs.index = pd.Index([f"run-{i}" for i in range(len(runs))])
    runs.loc["run-7", "loss"] *= 1.5
    found = fitted(runs)
    assert found.status == "look"
    assert "1 row lies far off the law" in found.caveats[0]
    assert "row run-7 (N" in found.caveats[0]
    assert "run-7" in str(found)
    assert found.forecast(1e9, 2e10).supported, "the fits are robust: it is looked at, not refused"


def test_of_many_far_rows_the_farthest_are_named_first(ladder: Ladder) -> None:
    runs = ladder(noise=0.003)
    wild = {2: 1.3, 5: 1.6, 9: 0.6, 13: 1.2, 17: 1.45}
    for row, factor in wild.items():
        runs.loc[row, "loss"] *= factor
    found = fitted(runs)
    text = next(caveat for caveat in found.caveats if "far off the law" in caveat)
    assert text.startswith("5 rows lie")
    assert re.findall(r"row (\d+)", text) == ["5", "17", "9"]
    usual = np.median(np.abs(np.expm1(found.residuals()["log_residual"])))
    assert f"half of all are within {usual:.2%}" in text


def test_runs_away_from_the_best_ratio_are_off_centre(ladder: Ladder, planted: Law) -> None:
    runs = ladder(noise=0.002).assign(n_tokens=lambda t: 60 * t["n_tokens"])
    runs["loss"] = planted.loss(runs["n_params"], runs["n_tokens"]) * (runs["loss"] / ladder()["loss"])
    assert "off-centre: the law's best D/N" in fitted(runs).caveats[0]
    short = ladder().assign(n_tokens=lambda t: t["n_tokens"] / 60)
    short["loss"] = planted.loss(short["n_params"], short["n_tokens"]) * (
        runs["loss"] / planted.loss(runs["n_params"], runs["n_tokens"])
    )
    assert "off-centre: the law's best D/N" in fitted(short).caveats[0]
    assert not fitted(ladder(noise=0.002)).caveats


def test_losses_of_several_recipes_are_not_supported(ladder: Ladder) -> None:
    """Half of the rows read in mid-schedule, 8 % high: no law of finished runs holds, and the forecast says so."""
    runs = ladder(noise=0.003)
    runs["loss"] *= np.where(np.random.default_rng(0).permutation(20) < 10, 1.08, 1.0)
    found = fitted(runs)
    assert "off the law: finished runs of one recipe" in "; ".join(found.warnings)
    assert not found.forecast(1e9, 2e10).supported
