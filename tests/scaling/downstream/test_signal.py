"""Signal and noise of planted scores, by seeds and by checkpoints."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingError, SignalToNoise, signal_to_noise


def scores(noise: float, *, seeds: int = 1, checkpoints: int = 0, sizes: int = 6, rng_seed: int = 0) -> pd.DataFrame:
    """Runs whose score rises by .1 from size to size and along each run; the end lies .05 above the line of its checkpoints."""
    rng = np.random.default_rng(rng_seed)
    rows = []
    for size in range(sizes):
        for seed in range(seeds):
            final = 0.3 + 0.1 * size
            of = {"n_params": 1e7 * 2**size, "n_tokens": 1e9, "seed": seed}
            for back in range(checkpoints, 0, -1):
                score = final - 0.05 - 0.02 * back + noise * rng.standard_normal()
                rows.append({**of, "tokens": 1e9 * math.exp(-0.1 * back), "accuracy": score})
            rows.append({**of, "tokens": 1e9, "accuracy": final + noise * rng.standard_normal()})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("seeds", "checkpoints"), [(40, 0), (1, 5)])
def test_the_planted_ratio_is_found(seeds: int, checkpoints: int) -> None:
    """Finals from .3 to 2.2 with noise .01, so 190; with 60 degrees of freedom a deviation errs by a tenth."""
    table = scores(0.01, seeds=seeds, checkpoints=checkpoints, sizes=20)
    found = signal_to_noise(table)
    assert found.ratio == pytest.approx(190, rel=0.3)
    assert found.signal == pytest.approx(1.9 / 1.25, rel=0.05)
    assert (found.n_points, found.n_seeds, found.n_checkpoints) == (20, 20 * (seeds - 1), 20 * checkpoints)


def test_a_trend_along_a_run_is_no_noise() -> None:
    assert signal_to_noise(scores(0.0, checkpoints=5)).noise == pytest.approx(0, abs=1e-9)
    assert signal_to_noise(scores(0.0, seeds=2)).ratio == math.inf


def test_the_larger_noise_counts_and_far_checkpoints_do_not() -> None:
    table = scores(0.0, seeds=2, checkpoints=8)
    apart = table.assign(accuracy=table["accuracy"] + 0.02 * table["seed"])
    found = signal_to_noise(apart)
    assert found.noise * 0.56 == pytest.approx(0.02 / math.sqrt(2))
    early = table["tokens"] < 1e9 * math.exp(-0.55)
    assert signal_to_noise(apart.assign(accuracy=apart["accuracy"] + 0.3 * early)).noise == pytest.approx(found.noise)


def test_noise_alone_is_below_the_ratio_of_a_forecast() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for seed in range(20):
        table = scores(0.0, seeds=4, sizes=10, rng_seed=seed)
        ratios.append(signal_to_noise(table.assign(accuracy=0.25 + 0.01 * rng.standard_normal(len(table)))).ratio)
    assert max(ratios) < 5


def test_a_score_of_zero_everywhere_has_neither() -> None:
    assert signal_to_noise(scores(0.0, seeds=2).assign(accuracy=0.0)).ratio == 0


def test_runs_are_told_apart_by_name_and_a_result_survives_json() -> None:
    table = scores(0.01, seeds=2, checkpoints=4)
    named = table.assign(run=[f"r{seed}" for seed in table["seed"]]).drop(columns="seed")
    found = signal_to_noise(named)
    assert found.to_dict() == signal_to_noise(table).to_dict()
    assert SignalToNoise.from_dict(json.loads(json.dumps(found.to_dict()))).ratio == found.ratio


def test_a_table_merged_twice_is_refused() -> None:
    """Its rows would count as seeds without any noise."""
    once = scores(0.01, checkpoints=4).drop(columns="seed")
    signal_to_noise(once)
    for twice in (pd.concat([once, once]), pd.concat([once, once.tail(1)], ignore_index=True)):
        with pytest.raises(ValueError, match="row .* repeats"):
            signal_to_noise(twice)


def test_scores_as_text_are_numbers() -> None:
    table = scores(0.01, seeds=2, checkpoints=4)
    assert signal_to_noise(table.astype({"accuracy": str})).to_dict() == signal_to_noise(table).to_dict()


def test_an_infinite_ratio_is_shown_as_such() -> None:
    assert "inf" in str(signal_to_noise(scores(0.0, seeds=2)))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"tokens": 2e9}, "tokens .*2e\\+09 in row"), ({"accuracy": -1.0}, "accuracy"), ({"n_params": 0.0}, "n_params")],
)
def test_bad_input_is_named(change: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        signal_to_noise(scores(0.01, seeds=2).assign(**change))


def test_nothing_that_shows_noise_or_signal_is_an_error() -> None:
    with pytest.raises(ScalingError, match="6 runs and 12 checkpoints"):
        signal_to_noise(scores(0.01, checkpoints=2))
    with pytest.raises(ScalingError, match="got 1"):
        signal_to_noise(scores(0.01, seeds=3, sizes=1))
    with pytest.raises(ValueError, match="another of"):
        signal_to_noise(pd.concat([scores(0.01, seeds=2), scores(0.02, seeds=2)], ignore_index=True))
