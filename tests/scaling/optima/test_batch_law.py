"""The batch law: planted exponents, what is not used, and Step Law's real grids."""

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import pytest

from scaling import BatchLaw, ScalingError, fit_batch_law, fit_horizon_law
from scaling.optima.batch_law import published_batch

BATCHES = tuple(2.0**x for x in range(15, 23))


def grid(
    exponent: float = 0.5,
    budgets: Sequence[float] = (1e9, 4e9, 16e9),
    batches: Sequence[float] = BATCHES,
    noise: float = 0.0,
    seed: int = 0,
    sizes: Sequence[float] = (0.0,),
) -> pd.DataFrame:
    """Best batch 2^(18.5 + size) at 4e9 tokens, curvature .006; best rate rises by .3 octaves with the batch's, as measured."""
    rng = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        for n_tokens in budgets:
            at = 18.5 + size + exponent * math.log2(n_tokens / 4e9)
            for batch in batches:
                off = math.log2(batch) - at
                for x in np.linspace(-10, -5, 7):
                    rate_off = x + 7.5 - 0.3 * off
                    loss = math.exp(1 + 0.003 * off**2 + 0.02 * rate_off**2 + noise * rng.standard_normal())
                    rows.append((f"size {size}", n_tokens, batch, 2.0**x, loss))
    return pd.DataFrame(rows, columns=["group", "n_tokens", "batch_tokens", "rate", "loss"])


@pytest.mark.parametrize("exponent", [0.0, 0.38, 0.6])
def test_planted_exponent_is_recovered_without_prior(exponent: float) -> None:
    law = fit_batch_law(grid(exponent), prior=None)
    assert law.exponent == law.raw_exponent == pytest.approx(exponent, abs=1e-8)
    assert law.batch_tokens(4e9) == pytest.approx(2**18.5)
    assert law.batch_tokens(4e10) == pytest.approx(2**18.5 * 10**exponent)
    assert law.curvature == pytest.approx(0.006)
    assert law.regret(2**19.5, 4e9) == pytest.approx(math.expm1(0.003))


def test_sizes_keep_their_offsets() -> None:
    law = fit_batch_law(grid(0.5, sizes=(-0.2, 0.2)), prior=None)
    assert law.offsets == pytest.approx({"size -0.2": -0.2, "size 0.2": 0.2}, abs=1e-8)


def test_interval_covers_the_planted_batch() -> None:
    """At the noise of a real grid, the exponent's 90 % interval holds the truth, and the batch's a decade on."""
    laws = [fit_batch_law(grid(0.5, noise=0.0006, seed=seed), prior=None) for seed in range(16)]
    assert np.mean([abs(law.exponent - 0.5) < 1.645 * law.stderr for law in laws]) > 0.7
    within = [low < 2**18.5 * math.sqrt(40) < high for low, high in (law.interval(1.6e11) for law in laws)]
    assert np.mean(within) > 0.7


def test_the_prior_is_weighed_by_its_precision() -> None:
    law = fit_batch_law(grid(0.9, noise=1e-4), prior=(0.5, 0.1))
    data = law.raw_stderr**-2
    assert law.exponent == pytest.approx((data * law.raw_exponent + 100 * 0.5) / (data + 100))


def test_what_has_no_best_rate_or_batch_inside_the_grid_is_listed_and_not_used() -> None:
    rows = grid(0.5, budgets=(1e9, 4e9, 16e9, 64e9))
    far = rows["n_tokens"] == 64e9
    rows.loc[far, "loss"] = np.exp(
        1 + 0.003 * (np.log2(rows["batch_tokens"]) - 25) ** 2 + 0.02 * (np.log2(rows["rate"]) + 7) ** 2
    )
    rows.loc[(rows["n_tokens"] == 1e9) & (rows["batch_tokens"] == BATCHES[0]), "loss"] = np.nan
    law = fit_batch_law(rows, prior=None)
    assert law.exponent == pytest.approx(0.5, abs=1e-8)
    assert law.n_tokens_range == (1e9, 16e9)
    assert "6.4e+10 tokens: not used: edge" in "; ".join(law.warnings)
    left_out = law.cells[~law.cells["used"]]
    assert left_out["status"].tolist() == ["fewer than three finite rates"]
    restored = BatchLaw.from_dict(json.loads(json.dumps(law.to_dict(), allow_nan=False)))
    pd.testing.assert_frame_equal(restored.cells, law.cells)
    pd.testing.assert_frame_equal(restored.optima, law.optima)
    assert restored.to_dict() == law.to_dict()
    assert str(restored) == str(law)


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        (grid(budgets=(1e9, 4e9)), "2 token budgets: at least 3"),
        (grid(budgets=(1e9, 1.5e9, 2e9)), "the token budgets span 2×: at least 4×"),
        (grid(-0.5, noise=1e-4), r"contradicts the prior 0.48 ± 0.15: is the rate tuned for each batch?"),
    ],
)
def test_warnings(rows: pd.DataFrame, warning: str) -> None:
    law = fit_batch_law(rows)
    assert law.status == "doubtful"
    assert warning in "; ".join(law.warnings)


def test_no_usable_answer() -> None:
    with pytest.raises(ScalingError, match="tested batches at two token budgets"):
        fit_batch_law(grid(budgets=(1e9,)))
    with pytest.raises(ScalingError, match="add a batch or"):
        fit_batch_law(grid(batches=(2.0**17, 2.0**18.5, 2.0**20)))
    once = grid().assign(seed=0)
    with pytest.raises(ValueError, match="row 3.*0.0, n_tokens 1e.09"):
        fit_batch_law(pd.concat([once, once.iloc[[3]]]))
    with pytest.raises(ValueError, match="missing column batch_tokens"):
        fit_batch_law(grid().drop(columns="batch_tokens"))


def test_step_law_s_grids_give_its_exponents(public_table: Callable[[str], pd.DataFrame]) -> None:
    """Step Law (2503.04715): best batch .58 D^.571 tokens; at the best batch the best rate rises as D^.307."""
    table = public_table("steplaw_dense_all_lr_bs").rename(columns={"lr": "rate"})
    table = table.assign(batch_tokens=2048 * table["bs"], group=table["n_params"].map("{:.3g}".format))
    law = fit_batch_law(table, prior=None)
    assert law.optima["used"].all()
    assert abs(law.exponent - 0.571) < 1.645 * law.stderr < 0.1
    low, high = law.interval(1e11)
    assert low < 0.58 * 1e11**0.571 < high

    tested = np.sort(table["batch_tokens"].unique())
    near = [tested[np.argmin(np.abs(np.log2(tested / law.batch_tokens(n))))] for n in table["n_tokens"]]
    horizon = fit_horizon_law(table[table["batch_tokens"] == near], prior=None)
    assert horizon.optima["used"].all()
    assert abs(-horizon.exponent - 0.307) < 1.645 * horizon.stderr < 0.1


def test_the_best_rate_rises_with_the_batch_as_planted() -> None:
    """Three budgets of eight batches weigh 126 octaves² at .25 octaves, against a prior of .2 about .5."""
    exponent, stderr = fit_batch_law(grid(0.5)).rate_exponent
    assert exponent == pytest.approx(0.3, abs=0.01)
    assert stderr < 0.03


def test_the_published_batch_is_step_laws_within_its_table() -> None:
    assert published_batch(1e10) == pytest.approx(0.58 * 10**5.71)
    assert published_batch(3e9) is published_batch(2e11) is None
