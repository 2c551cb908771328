"""The verdict over several transfers: each judgement from planted data, and whether what it says to run would decide."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from scaling import Verdict, fit_verdict
from scaling.optima.evidence import expected_half_width

OCTAVES = tuple(np.arange(-9.5, -3.6, 1.0))
WIDTHS = (32, 64, 128)


def rows(
    optima: Sequence[float] = (-6.6, -6.7, -6.65),
    *,
    along: str = "width",
    over: str = "rate",
    sizes: Sequence[float] = WIDTHS,
    seeds: Sequence[int] = (0, 1),
    noise: float = 0.003,
    gain: float = 0.05,
    octaves: Sequence[float] = OCTAVES,
    budgets: Sequence[float] = (1e6, 2e6, 4e6),
    exponent: float = 0.3,
    rng: int = 0,
) -> pd.DataFrame:
    """Optima as given at the longest horizon; shorter runs want higher values by the exponent."""
    noises = np.random.default_rng(rng)
    found = [
        (
            along,
            size,
            over,
            2.0**x,
            n_tokens,
            seed,
            math.exp(1 - gain * i + 0.02 * off**2 + noise * noises.standard_normal()),
        )
        for i, (size, at) in enumerate(zip(sizes, optima, strict=True))
        for n_tokens in budgets
        for x in octaves
        for off in [x - at - exponent * math.log2(max(budgets) / n_tokens)]
        for seed in seeds
    ]
    return pd.DataFrame(found, columns=["along", "size", "over", "value", "n_tokens", "seed", "loss"])


def depths(optima: Sequence[float] = (-6.6, -6.6, -6.6), **changed: object) -> pd.DataFrame:
    return rows(optima, along="depth", sizes=(2, 4, 8), rng=1, **changed)  # type: ignore[arg-type]


def test_all_that_was_asked_for_must_pass() -> None:
    verdict = fit_verdict(pd.concat([rows(), depths(), rows(over="init_scale", budgets=(4e6,), rng=2)]))
    assert verdict.passed
    assert verdict.reasons == ()
    assert verdict.wider_is_better
    first, *others = verdict.transfers
    assert not replace(verdict, transfers=(first, replace(others[0], larger_is_better=False))).wider_is_better
    assert verdict.next_runs.empty
    assert verdict.options == ""
    assert [(t.along, t.over) for t in verdict.transfers] == [
        ("width", "rate"),
        ("depth", "rate"),
        ("width", "init_scale"),
    ]
    assert verdict.drift_octaves == verdict.transfers[0].drift_octaves == pytest.approx(-0.05, abs=0.2)
    assert verdict.interval == verdict.transfers[0].interval
    assert verdict.horizon is not None
    assert verdict.horizon.raw_exponent == pytest.approx(0.3, abs=0.06)
    assert set(verdict.horizon.offsets) == {*(f"width {w}" for w in WIDTHS), "depth 2", "depth 4", "depth 8"}


def test_one_failure_fails_it_and_is_named() -> None:
    verdict = fit_verdict(pd.concat([rows(seeds=(0,), noise=0.02), depths((-6.0, -6.9, -7.8))]))
    assert verdict.verdict == "fail"
    assert verdict.reasons[0] == "rate along depth: the interval of the drift lies outside ±0.5 octaves"
    assert all(reason.startswith("rate along depth: ") for reason in verdict.reasons)
    assert verdict.next_runs.empty


def test_shorter_runs_enter_the_horizon_law_and_not_the_drift() -> None:
    """At the shorter horizons the optima are planted to drift by two octaves."""
    shorter = rows((-5.0, -6.0, -7.0), budgets=(1e6, 2e6))
    assert fit_verdict(pd.concat([shorter, rows(budgets=(4e6,))])).passed


def test_a_horizon_of_one_size_enters_the_horizon_law_and_no_verdict() -> None:
    smallest = rows((-7.2, -7.3, -7.25), budgets=(16e6,))[lambda table: table["size"] == min(WIDTHS)]
    alone, further = fit_verdict(rows()), fit_verdict(pd.concat([rows(), smallest]))
    assert further.table().equals(alone.table())
    assert (further.n_tokens, further.horizons) == (alone.n_tokens, alone.horizons)
    assert further.horizon is not None
    assert further.horizon.n_tokens_range[1] == 16e6
    assert further.horizon.raw_exponent == pytest.approx(0.3, abs=0.06)


def test_a_search_s_optima_steady_the_horizon_law_and_touch_no_transfer() -> None:
    octaves = np.arange(-2.0, 1.0)
    given = {"group": "sweep", "n_tokens": 4e6 * 2**octaves, "log2_rate": -6 - 0.3 * octaves, "stderr": 0.05}
    alone, informed = fit_verdict(rows()), fit_verdict(rows(), optima=pd.DataFrame(given))
    assert alone.horizon is not None
    assert informed.horizon is not None
    assert informed.horizon.raw_stderr < alone.horizon.raw_stderr
    assert informed.horizon.raw_exponent == pytest.approx(0.3, abs=0.06)
    assert float(informed.horizon.rate(4e6)) == pytest.approx(float(alone.horizon.rate(4e6)), rel=0.05)
    assert informed.table().equals(alone.table())
    restored = Verdict.from_dict(json.loads(json.dumps(informed.to_dict(), allow_nan=False)))
    assert str(restored) == str(informed)


def test_a_run_in_two_grids_is_one_run_of_the_horizon_law() -> None:
    width = rows().assign(run=lambda t: [f"run {n}" for n in range(len(t))])
    again = width[width["size"] == 64].assign(along="depth", size=2)
    others = depths()[lambda t: t["size"] != 2].assign(run=lambda t: [f"deep {n}" for n in range(len(t))])
    horizon = fit_verdict(pd.concat([width, again, others])).horizon
    assert horizon is not None
    assert "depth 2" not in horizon.offsets
    assert len(horizon.optima) == 5 * 3


def test_a_grid_that_diverged_everywhere_leaves_the_verdict_open_with_its_reason() -> None:
    broken = depths()
    broken.loc[broken["size"] == 8, "loss"] = np.nan
    verdict = fit_verdict(pd.concat([rows(), broken]))
    assert verdict.verdict == "not enough evidence"
    (reason,) = verdict.reasons
    assert reason.startswith("rate along depth: depth 8: need at least 3 distinct rates with a finite loss, got 0 of 6")
    assert reason in str(verdict)
    alone = fit_verdict(broken)
    assert alone.verdict == "not enough evidence"
    assert not alone.transfers
    assert not alone.wider_is_better


def test_one_horizon_gives_a_verdict_without_a_law_and_with_the_reason() -> None:
    verdict = fit_verdict(rows(budgets=(4e6,)))
    assert verdict.passed
    assert verdict.horizon is None
    assert "at two token budgets of one group" in verdict.missing["horizon law"]


def test_batches_give_the_batch_law() -> None:
    found = []
    for i, batch in enumerate(2.0 ** np.arange(10, 15)):
        for n_tokens in (1e6, 2e6, 4e6):
            lost = 0.003 * (10 + i - 12 - 0.5 * math.log2(n_tokens / 2e6)) ** 2
            part = rows((-6.6,), along="batch", sizes=(batch,), budgets=(n_tokens,), noise=1e-4, rng=i)
            found.append(part.assign(loss=part["loss"] * math.exp(lost)))
    verdict = fit_verdict(pd.concat([rows(), *found]))
    assert verdict.batch is not None
    assert verdict.batch.raw_exponent == pytest.approx(0.5, abs=0.1)
    assert "batch law    best batch ∝ D^0." in str(verdict)
    assert verdict.passed


DRIFTING = {"optima": (-6.3, -6.7, -7.05), "noise": 0.01, "budgets": (4e6,)}
"""A drift of .75 octaves under noise that hides, with one seed, whether it is more than .5."""


def test_the_expected_interval_is_what_added_seeds_give() -> None:
    """Medians over 40 draws, from one seed's data and from those of four."""
    expected, given = [], []
    for rng in range(40):
        (before,) = fit_verdict(rows(seeds=(0,), rng=rng, **DRIFTING)).transfers  # type: ignore[arg-type]
        (now,) = fit_verdict(rows(seeds=range(4), rng=1000 + rng, **DRIFTING)).transfers  # type: ignore[arg-type]
        expected.append(expected_half_width(before, 4))
        given.append(now.half_width)
    assert np.median(expected) == pytest.approx(np.median(given), rel=0.25)
    assert np.median(given) < 0.6 * before.half_width


def test_seeds_that_it_asks_for_decide() -> None:
    decided = []
    for rng in range(16):
        before = fit_verdict(rows(seeds=(0,), rng=rng, **DRIFTING))  # type: ignore[arg-type]
        if before.verdict != "not enough evidence":
            continue
        (asked,) = before.next_runs.to_dict("records")
        seeds = asked["settings"]["seeds"]
        assert seeds == list(range(len(seeds)))
        assert asked["new_runs"] == (len(seeds) - 1) * len(WIDTHS) * len(OCTAVES)
        assert asked["n_tokens"] == asked["new_runs"] * 4e6
        assert before.options == f"--set 'transfer.seeds=[{','.join(map(str, seeds))}]'"
        now = fit_verdict(rows(seeds=seeds, rng=1000 + rng, **DRIFTING))  # type: ignore[arg-type]
        decided.append(now.verdict != "not enough evidence")
    assert len(decided) > 5
    assert np.mean(decided) > 0.5


def test_a_curve_without_a_minimum_asks_for_as_many_seeds_again_at_least() -> None:
    verdict = fit_verdict(rows(noise=0.1, gain=0.5, budgets=(4e6,)))
    assert "(flat)" in "; ".join(verdict.reasons)
    (asked,) = verdict.next_runs.to_dict("records")
    assert len(asked["settings"]["seeds"]) >= 4
    assert "options" in str(verdict)


def test_an_optimum_beyond_the_grid_asks_for_rates_beyond_it_on_the_same_steps() -> None:
    verdict = fit_verdict(rows((-6.6, -5.5, -3.0), gain=0.5, budgets=(4e6,)))
    assert verdict.verdict == "not enough evidence"
    asked = verdict.next_runs.iloc[0]
    assert asked["settings"] == {"rates": 10, "octaves": 9.0}
    assert asked["new_runs"] == 4 * 2 * 3
    assert "--set 'transfer.rates=10' --set 'transfer.octaves=9.0'" in str(verdict)
    other = fit_verdict(rows((-6.6, -5.5, -3.0), over="init_scale", gain=0.5, budgets=(4e6,))).next_runs.iloc[0]
    beyond = other["settings"]["over.init_scale"]
    assert np.log2(beyond) == pytest.approx([*OCTAVES, -3.5, -2.5], abs=1e-3)
    assert other["new_runs"] == 2 * 2 * 3


@pytest.mark.parametrize(
    ("sizes", "widths"), [((32, 64), [32, 64, 128]), ((32, 256), [32, 64, 256]), ((64, 80, 96), [64, 80, 96, 256])]
)
def test_too_few_sizes_ask_for_doublings_of_the_smallest(sizes: tuple[int, ...], widths: list[int]) -> None:
    verdict = fit_verdict(rows((-6.6,) * len(sizes), sizes=sizes, budgets=(4e6,)))
    assert verdict.next_runs.iloc[0]["settings"] == {"widths": widths}
    assert verdict.options == f"--set 'transfer.widths=[{','.join(map(str, widths))}]'"


def test_what_several_transfers_ask_for_is_one_line_of_options() -> None:
    narrow = {"noise": 0.1, "gain": 0.5, "seeds": (0,), "budgets": (4e6,)}
    found = [rows((-6.6, -6.6), sizes=(32, 64), **narrow), depths(**narrow)]  # type: ignore[arg-type]
    options = fit_verdict(pd.concat(found)).options
    assert options.count("transfer.seeds=[0,1") == 1
    assert "transfer.widths=[32,64,128]" in options


def test_what_a_shorter_grid_asks_for_is_priced_at_its_own_horizon() -> None:
    unclear = {"noise": 0.1, "gain": 0.5, "seeds": (0,)}
    found = [
        rows((-6.6, -6.6), sizes=(32, 64), budgets=(4e6,), **unclear),  # type: ignore[arg-type]
        rows((-6.6, -6.6), sizes=(32, 64), over="init_scale", budgets=(1e6, 2e6), **unclear),  # type: ignore[arg-type]
    ]
    verdict = fit_verdict(pd.concat(found))
    assert verdict.n_tokens == 4e6
    asked = verdict.next_runs
    assert set(asked["over"]) == {"rate", "init_scale"}
    horizon = asked["over"].map({"rate": 4e6, "init_scale": 2e6})
    assert asked["n_tokens"].tolist() == (asked["new_runs"] * horizon).tolist()
    assert str(Verdict.from_dict(verdict.to_dict())) == str(verdict)


@pytest.mark.parametrize("last", [-6.6, -3.0])
def test_round_trip_and_figures(last: float) -> None:
    verdict = fit_verdict(pd.concat([rows((-6.6, -6.6, last)), depths()]))
    data = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    restored = Verdict.from_dict(data)
    assert json.loads(json.dumps(restored.to_dict())) == data
    assert str(restored) == str(verdict)
    assert "&#x27;" in verdict._repr_html_() or verdict.passed
    names = [trace.name for trace in verdict.plot().data if trace.showlegend]
    assert names == [*(f"width {w}" for w in WIDTHS), "depth 2", "depth 4", "depth 8"]
    (drifts,) = verdict.plot_drifts().data
    assert list(drifts.y) == ["rate along width", "rate along depth"]


def test_bad_tables() -> None:
    with pytest.raises(ValueError, match="missing column size"):
        fit_verdict(rows().drop(columns="size"))
    with pytest.raises(ValueError, match=r"along .*got \['batch'\]"):
        fit_verdict(rows(along="batch"))
    with pytest.raises(ValueError, match="over .* row 0 "):
        fit_verdict(rows().assign(over=lambda table: table["over"].astype(object).mask(table.index == 0)))
    with pytest.raises(ValueError, match="width .*got"):
        fit_verdict(rows((-6.6,), sizes=(32,)))


def test_sizes_may_be_text() -> None:
    grids = depths()
    assert fit_verdict(grids.assign(size=grids["size"].astype(str))).to_dict() == fit_verdict(grids).to_dict()
