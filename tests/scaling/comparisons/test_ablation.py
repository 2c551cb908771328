"""Components held against the model as it is: pairs of seeds, pooled noise, intervals that cover."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from scaling import Ablation, ScalingError, compare_ablations

WORTH = {("norm", "layernorm"): 0.001, ("positions", "none"): 0.05, ("tied", "True"): -0.004}


def rows(seed: int = 0, n_seeds: int = 3, noise: float = 0.002, between: float = 0.02) -> pd.DataFrame:
    """Losses of a model and three swaps; what a seed does to all of them is ten times what is left of a pair."""
    rng = np.random.default_rng(seed)
    shared = between * rng.standard_normal(n_seeds)
    records = []
    for (component, value), change in {("", ""): 0.0, **WORTH}.items():
        for i in range(n_seeds):
            loss = 3.0 * math.exp(change + shared[i] + noise / math.sqrt(2) * rng.standard_normal())
            records.append({"component": component, "value": value, "n_params": 1000, "seed": i, "loss": loss})
    return pd.DataFrame(records)


def test_changes_are_those_planted_whatever_the_seeds_share() -> None:
    found = compare_ablations(rows(noise=1e-9))
    for _, row in found.table.iterrows():
        assert row["change"] == pytest.approx(WORTH[row["component"], row["value"]], abs=1e-7)
    assert found.table["component"].tolist() == ["positions", "norm", "tied"]
    means = rows(noise=1e-9).groupby("component")["loss"].mean()
    assert found.table["loss"].tolist() == pytest.approx(means[found.table["component"]].tolist())


def test_intervals_cover_at_their_level() -> None:
    held = []
    for seed in range(150):
        table = compare_ablations(rows(seed), level=0.9).table
        truth = [WORTH[key] for key in zip(table["component"], table["value"], strict=True)]
        held += (table["low"].lt(truth) & table["high"].gt(truth)).tolist()
    assert 0.86 <= np.mean(held) <= 0.94


def test_the_noise_is_pooled_over_variants() -> None:
    found = compare_ablations(rows(n_seeds=200))
    assert found.noise == pytest.approx(0.002, rel=0.1)
    assert found.dof == 3 * 199


def test_a_diverged_run_is_counted_and_left_out_of_the_mean() -> None:
    table = rows(noise=1e-9)
    table.loc[(table["component"] == "norm") & (table["seed"] == 1), "loss"] = math.nan
    norm = compare_ablations(table).table.set_index("component").loc["norm"]
    assert (norm["seeds"], norm["diverged"]) == (2, 1)
    assert norm["change"] == pytest.approx(0.001, abs=1e-6)
    table.loc[table["component"] == "norm", "loss"] = math.nan
    gone = compare_ablations(table)
    assert gone.table["component"].iloc[0] == "norm", "the dearest stands first"
    assert math.isnan(gone.table["change"].iloc[0])
    assert Ablation.from_dict(json.loads(json.dumps(gone.to_dict()))).table.equals(gone.table)


def test_one_seed_gives_no_interval() -> None:
    found = compare_ablations(rows(n_seeds=1))
    assert np.isinf(found.table["high"]).all()
    assert "unknown from one seed" in str(found)
    assert len(found.plot().data) == 1


def test_the_figure_shows_the_table() -> None:
    found = compare_ablations(rows())
    (trace,) = found.plot().data
    assert list(trace.y) == ["tied True", "norm layernorm", "positions none"]
    np.testing.assert_allclose(trace.x, 100 * np.expm1(found.table["change"].iloc[::-1]))


def test_a_comparison_without_two_sides_is_refused() -> None:
    table = rows()
    with pytest.raises(ScalingError, match="model as it is .*got none"):
        compare_ablations(table[table["component"] != ""])
    with pytest.raises(ScalingError, match="variant .*got none"):
        compare_ablations(table[table["component"] == ""])
    with pytest.raises(ValueError, match="the runs as they are, got 0 twice"):
        compare_ablations(pd.concat([table, table]))
    with pytest.raises(ValueError, match="norm layernorm, got 0 twice"):
        compare_ablations(pd.concat([table, table[table["component"] != ""]]))
