"""The law of stages: branches of a ladder whose data change at one share forecast a change at another share."""

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingError, StageLaw, fit, fit_stages
from scaling.mixtures.stage_law import MISTUNED

PLANNED, SHARES = 0.4, (0.0, 0.4 / 3, 0.8 / 3)


def loss_at_planned(n_params: float, n_tokens: float) -> float:
    return float(0.5 + 40 * n_params**-0.4 + 90 * n_tokens**-0.35)


def log_ratio(n_params: float, n_tokens: float, share: float) -> float:
    """0 at the planned share; steep near none, and a little larger for larger models."""
    at_none = 0.2 + 0.01 * np.log(n_params / 1e5) + 0.005 * np.log(n_tokens / 1e6)
    return float(at_none * (1 - np.sqrt(share / PLANNED)))


def ladder(noise: float = 0.0) -> pd.DataFrame:
    generator, rows = np.random.default_rng(0), []
    for n_params in (2e4, 6e4, 2e5, 6e5):
        for n_tokens in (5e5, 1e6, 2e6):
            of_stem = noise * generator.standard_normal()
            for share in (*SHARES, PLANNED):
                end = n_tokens * (1 - PLANNED) / (1 - share)
                loss = loss_at_planned(n_params, end) * np.exp(log_ratio(n_params, end, share) + of_stem)
                stem = f"{n_params} {n_tokens}"
                rows.append({"stem": stem, "n_params": n_params, "n_tokens": end, "loss": loss, "share": share})
    return pd.DataFrame(rows)


def fitted(runs: pd.DataFrame) -> StageLaw:
    planned = runs[runs["share"] == PLANNED]
    return fit_stages(runs, fit(planned.drop(columns=["share", "stem"]), n_params_convention="total", n_bootstrap=50))


@pytest.fixture(scope="module")
def law() -> StageLaw:
    return fitted(ladder())


def test_the_planned_share_changes_nothing(law: StageLaw) -> None:
    found = law.effect(1e6, 4e6, PLANNED)
    assert found.log_ratio == pytest.approx(0, abs=1e-12)
    assert (found.half_width, found.reasons) == (0.0, ())
    assert [*law.shares, law.planned] == pytest.approx([*SHARES, PLANNED])


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.3, 0.37])
def test_a_share_between_those_trained_is_forecast_at_a_larger_size(law: StageLaw, share: float) -> None:
    found, true = law.effect(1.2e6, 4e6, share), log_ratio(1.2e6, 4e6, share)
    assert found.log_ratio == pytest.approx(true, abs=0.006)
    assert abs(found.log_ratio - true) <= found.half_width
    assert found.reasons == ()


def test_a_smaller_share_of_better_data_has_the_higher_loss(law: StageLaw) -> None:
    ratios = [law.effect(1e6, 4e6, share).log_ratio for share in np.linspace(0, PLANNED, 30)]
    assert np.all(np.diff(ratios) < 0)


def test_errors_that_a_stem_s_runs_share_cancel(law: StageLaw) -> None:
    noisy = fitted(ladder(noise=0.01))
    for share in SHARES:
        assert noisy.effect(6e5, 2e6, share).log_ratio == pytest.approx(
            law.effect(6e5, 2e6, share).log_ratio, abs=0.006
        )


def test_interval_grows_with_distance_and_level(law: StageLaw) -> None:
    near, far = law.effect(6e5, 2e6, 0.0), law.effect(2.4e6, 8e6, 0.0)
    assert far.half_width > near.half_width > 0
    assert law.effect(6e5, 2e6, 0.0, level=0.5).half_width < near.half_width


def test_what_was_not_trained_is_named(law: StageLaw) -> None:
    assert len(law.effect(6e5, 2e6, 0.5).reasons) == 1
    assert len(law.effect(6e6, 2e6, 0.2).reasons) == 1
    assert len(law.effect(6e6, 2e7, 0.2).reasons) == 2


def test_shares_close_to_each_other_stay_apart_and_a_share_of_few_stems_is_left_out(law: StageLaw) -> None:
    runs = ladder()
    close = runs.assign(share=runs["share"] / 20)
    at = close[close["share"] == PLANNED / 20]
    found = fit_stages(close, fit(at.drop(columns=["share", "stem"]), n_params_convention="total", n_bootstrap=50))
    assert found.shares == pytest.approx([share / 20 for share in SHARES])
    assert len({found.effect(1e6, 4e6, share).log_ratio for share in found.shares}) == len(SHARES)
    assert found.effect(1e6, 4e6, 1.01 * found.planned).reasons
    stems = sorted(set(runs["stem"]))
    fewer = fitted(runs[(runs["share"] > 0) | runs["stem"].isin(stems[:2])])
    assert fewer.shares == pytest.approx(SHARES[1:])
    assert fewer.effect(1e6, 4e6, 0.0).reasons


def test_the_interval_contains_what_a_shorter_branch_may_lose_by_its_tuning(law: StageLaw) -> None:
    octaves = np.log2(1 / (1 - PLANNED))
    assert law.effect(6e5, 2e6, 0.0).half_width > MISTUNED * octaves**2


def test_the_order_of_rows_does_not_matter_and_other_stems_are_ignored() -> None:
    runs = ladder()
    shuffled = pd.concat([runs, runs.iloc[:1].assign(stem="alone")]).sample(frac=1, random_state=3)
    found, wanted = (fitted(rows).effect(1e6, 4e6, 0.1) for rows in (shuffled, runs))
    assert [found.log_ratio, found.half_width] == pytest.approx([wanted.log_ratio, wanted.half_width])


@pytest.mark.parametrize("planned", [0.0, 1.0, 40.0, float("nan")])
def test_a_planned_share_that_is_no_part_of_a_run_is_refused(law: StageLaw, planned: float) -> None:
    with pytest.raises(ValueError):
        StageLaw(planned=planned, ratios=law.ratios)


def test_shares_are_read_as_numbers_and_a_share_of_all_tokens_or_below_none_is_refused() -> None:
    runs = ladder()
    at = fit(
        runs[runs["share"] == PLANNED].drop(columns=["share", "stem"]), n_params_convention="total", n_bootstrap=50
    )
    found = fit_stages(runs.astype({"share": str, "loss": str, "n_params": str, "n_tokens": str}), at)
    assert found.planned == PLANNED
    pd.testing.assert_frame_equal(found.ratios, fit_stages(runs, at).ratios)
    for shares in (runs["share"].replace(PLANNED, 1.0), 100 * runs["share"], runs["share"] - 0.1):
        with pytest.raises(ValueError):
            fit_stages(runs.assign(share=shares), at)


def test_too_few_stems_are_refused() -> None:
    runs = ladder()
    planned = runs[runs["share"] == PLANNED]
    law_of_all = fit(planned.drop(columns=["share", "stem"]), n_params_convention="total", n_bootstrap=50)
    few = runs[runs["stem"].isin(sorted(set(runs["stem"]))[:2])]
    with pytest.raises(ScalingError):
        fit_stages(few, law_of_all)
    with pytest.raises(ScalingError):
        fit_stages(planned, law_of_all)
