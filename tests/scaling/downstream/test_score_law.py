"""Scores of models of several families: planted laws, their intervals, families that were not seen, and public tables."""

import json
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from scaling import ScalingError, ScoreLaw, fit_score

SLOPES = (0.4, 0.3)


def planted(
    n_families: int = 8, each: int = 4, spread: float = 0.8, noise: float = 0.01, seed: int = 0, middle: float = 1e9
) -> pd.DataFrame:
    """Models about a size at which a score is half-way from .25 to 1, at 30 to 300 tokens per parameter."""
    rng = np.random.default_rng(seed)
    offsets = spread * rng.standard_normal(n_families)
    n_params = np.exp(rng.uniform(math.log(1e8), math.log(1e10), (n_families, each)))
    n_tokens = n_params * np.exp(rng.uniform(math.log(30), math.log(300), (n_families, 1)))
    eta = SLOPES[0] * np.log(n_params / middle) + SLOPES[1] * np.log(n_tokens / (100 * middle)) + offsets[:, None]
    score = 0.25 + 0.75 * expit(eta) + noise * rng.standard_normal(eta.shape)
    rows = {"family": np.repeat([f"f{i}" for i in range(n_families)], each)}
    columns = {"n_params": n_params, "n_tokens": n_tokens, "accuracy": np.clip(score, 0, 1)}
    return pd.DataFrame(rows | {name: values.ravel() for name, values in columns.items()})


@pytest.fixture(scope="module")
def law() -> ScoreLaw:
    return fit_score(planted(n_families=12, each=5), chance=0.25)


def test_planted_numbers_lie_in_their_intervals(law: ScoreLaw) -> None:
    low, high = np.quantile(law.draws, [0.01, 0.99], axis=0)
    for i, value in ((3, SLOPES[0]), (4, SLOPES[1]), (5, 0.8)):
        assert low[i] < value < high[i]
    assert np.ptp(law.draws[:, 0]) == 0
    assert law.draws[0, :2] == pytest.approx([0.25, 1.0])
    assert law.status == "ok"


def test_intervals_hold_for_seen_and_unseen_families() -> None:
    """20 forecasts of each kind: nine in ten, within three standard errors (.07)."""
    seen: list[bool] = []
    unseen: list[bool] = []
    for seed in range(4):
        rows = planted(n_families=15, each=5, seed=seed)
        tested = rows["family"].isin([f"f{i}" for i in range(5)])
        later = ~tested & (rows.groupby("family").cumcount() == 4)
        found = fit_score(rows[~tested & ~later], chance=0.25)
        for out, which in ((seen, later), (unseen, tested)):
            for row in rows[which].iloc[:5].to_dict("records"):
                ahead = found.forecast(row["n_params"], row["n_tokens"], row["family"])
                assert (ahead.family is None) == (out is unseen)
                out.append(ahead.low <= row["accuracy"] <= ahead.high)
    assert np.mean(seen) > 0.69
    assert np.mean(unseen) > 0.69


def test_an_unseen_family_is_less_certain(law: ScoreLaw) -> None:
    known, new = law.forecast(1e10, 1e12, "f0"), law.forecast(1e10, 1e12)
    assert known.high - known.low < 0.5 * (new.high - new.low)
    assert law.forecast(1e10, 1e12, "another").to_dict() == new.to_dict()


def test_rows_without_families_are_one() -> None:
    rows = planted(n_families=1, each=20, spread=0).drop(columns="family")
    found = fit_score(rows, chance=0.25)
    assert found.families == ("",)
    assert found.forecast(1e9, 1e11, "any").to_dict() == found.forecast(1e9, 1e11).to_dict()
    expected = 0.25 + 0.75 * 0.5
    assert found.forecast(1e9, 1e11).value == pytest.approx(expected, abs=0.02)


def test_percentages_are_shares_times_a_hundred() -> None:
    shares = planted()
    percent = shares.assign(accuracy=100 * shares["accuracy"])
    one, other = fit_score(shares, chance=0.25), fit_score(percent, chance=25, most=100)
    assert other.forecast(1e10, 1e12).value == pytest.approx(100 * one.forecast(1e10, 1e12).value, rel=1e-6)


def test_a_known_standard_error_counts_less() -> None:
    """Rows with a large standard error hardly move the forecast."""
    rows = planted(n_families=1, each=12, spread=0).drop(columns="family")
    off = pd.DataFrame({"n_params": [2e10] * 6, "n_tokens": [2e12] * 6, "accuracy": [0.3] * 6})
    both = pd.concat([rows, off], ignore_index=True)
    trusted = fit_score(both, chance=0.25)
    doubted = fit_score(both.assign(standard_error=[0.0] * 12 + [0.5] * 6), chance=0.25)
    alone = fit_score(rows, chance=0.25)
    assert doubted.forecast(2e10, 2e12).value == pytest.approx(alone.forecast(2e10, 2e12).value, abs=0.03)
    assert trusted.forecast(2e10, 2e12).value < doubted.forecast(2e10, 2e12).value - 0.05


def test_a_score_at_chance_says_where_it_is_expected_to_leave_it() -> None:
    """The score is half-way at 1e13 parameters, so all rows are at chance; the interval is wide, and contains the planted size."""
    rows = planted(n_families=6, each=5, middle=1e13, spread=0.1, noise=0.005)
    found = fit_score(rows, chance=0.25)
    ahead = found.emergence(100.0)
    planted_size = 1e13 * math.exp(math.log(0.1 / 0.9) / sum(SLOPES))
    assert not ahead.seen
    assert found.warnings
    assert ahead.low < planted_size < ahead.high
    assert ahead.n_tokens == pytest.approx(100 * ahead.n_params)


def test_emergence_of_a_seen_score_is_the_planted_size() -> None:
    rows = planted(n_families=1, each=40, spread=0, middle=5e9).drop(columns="family")
    found = fit_score(rows, chance=0.25).emergence(100.0)
    planted_size = 5e9 * math.exp(math.log(0.1 / 0.9) / sum(SLOPES))
    assert found.seen
    assert found.low < planted_size < found.high
    assert found.high / found.low < 2.5


def test_a_result_survives_json(law: ScoreLaw) -> None:
    again = ScoreLaw.from_dict(json.loads(json.dumps(law.to_dict())))
    assert again.forecast(1e10, 1e12, "f3").to_dict() == law.forecast(1e10, 1e12, "f3").to_dict()


def test_a_falling_score_is_doubtful() -> None:
    rows = planted(n_families=1, each=20, spread=0).drop(columns="family")
    found = fit_score(rows.assign(accuracy=1 - rows["accuracy"]))
    assert found.forecast(1e9, 1e11).reasons


def test_far_beyond_the_rows_is_doubtful(law: ScoreLaw) -> None:
    assert not law.forecast(1e10, 1e12, "f0").reasons
    assert law.forecast(1e12, 1e14, "f0").reasons


@pytest.mark.parametrize(("ratio", "n_reasons"), [(1, 1), (20, 0), (200, 1), (200_000, 3)])
def test_another_ratio_than_the_rows_have_is_doubtful(ratio: float, n_reasons: int) -> None:
    n_params = np.geomspace(2e7, 3e8, 10)
    rows = pd.DataFrame({"n_params": n_params, "n_tokens": 20 * n_params})
    rows["accuracy"] = 0.25 + 0.75 * expit(0.4 * np.log(n_params / 1e8))
    assert len(fit_score(rows, chance=0.25).forecast(1e8, ratio * 1e8).reasons) == n_reasons


@pytest.mark.parametrize("size", [(3.0, 60.0), (1e7, 1e9), (2e9, 2e11), (1e8, 5e9)])
def test_far_from_the_rows_in_any_direction_is_doubtful(size: tuple[float, float]) -> None:
    """Lengths of a factor of 100 at one size, so that the ratio alone tells little of the others."""
    rows = pd.DataFrame({"n_params": 1e8, "n_tokens": np.geomspace(1e9, 1e11, 10)})
    rows["accuracy"] = 0.25 + 0.75 * expit(0.3 * np.log(rows["n_tokens"] / 1e10))
    assert bool(fit_score(rows, chance=0.25).forecast(*size).reasons) == (size != (1e8, 5e9))


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        ({}, {"metric": "mmlu"}, "mmlu"),
        ({"accuracy": -0.1}, {}, "accuracy"),
        ({"accuracy": 2.0}, {}, "accuracy"),
        ({"n_params": 0.0}, {}, "n_params"),
        ({"standard_error": math.nan}, {}, "standard_error"),
        ({}, {"chance": 25}, "25"),
        ({}, {"chance": 0.5, "ceiling": 0.4}, "0.4"),
        ({}, {"chance": 0.25, "most": 100.0}, "chance"),  # a share while the score is a percentage
    ],
)
def test_bad_input_is_named(change: dict[str, float], options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit_score(planted().assign(**change), **options)  # type: ignore[arg-type]


def test_few_rows_are_refused() -> None:
    with pytest.raises(ScalingError, match="8"):
        fit_score(planted().iloc[:7])


def test_families_left_out_of_a_public_table_lie_inside(public_table: Callable[[str], pd.DataFrame]) -> None:
    """Families of which no model was fitted, of three scores; all scores and tables are in tests/benchmarks/scores.py."""
    table = public_table("obsscaling_base_upto8.4e22")
    table = table.assign(n_params=1e9 * table["n_params_b"], n_tokens=1e12 * table["n_tokens_t"])
    left_out = table["family"].isin(["Pythia", "Llama", "Qwen1.5", "OPT", "Falcon", "MPT", "BLOOM"])
    inside = []
    for metric in ("ARC-C", "HellaSwag", "Winograd"):
        found = fit_score(table[~left_out], metric=metric)
        for row in table[left_out].to_dict("records"):
            ahead = found.forecast(row["n_params"], row["n_tokens"], row["family"])
            inside.append(ahead.low <= row[metric] <= ahead.high)
    assert 0.85 <= np.mean(inside) <= 1.0


def test_a_family_that_no_row_has_is_doubtful_if_few_families_are_known() -> None:
    rows = planted(n_families=1, each=20, spread=0).assign(family="mine")
    found = fit_score(rows, chance=0.25)
    assert found.forecast(1e9, 1e11, "mine").reasons == ()
    assert len(found.forecast(1e9, 1e11).reasons) == len(found.forecast(1e9, 1e11, "another").reasons) == 1
