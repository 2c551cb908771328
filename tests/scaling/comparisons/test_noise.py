"""The noise between seeds: planted spreads are recovered, and noise that settings share is separated from their own."""

import numpy as np
import pandas as pd
import pytest

from scaling import ScalingError, SeedNoise, seed_noise

SD, SHARED = 0.002, 0.006


def grid(seed: int = 0, n_seeds: int = 4) -> pd.DataFrame:
    """Widths × rates × seeds: a parabola in the rate, a level of each (width, seed), errors; diverging at the top rate."""
    generator = np.random.default_rng(seed)
    rows = []
    for width in (32, 64, 128):
        shared = SHARED * generator.standard_normal(n_seeds)
        for octaves in range(-3, 5):
            noise = SD * (30 if octaves == 3 else 1)
            log_loss = 1.2 + 0.004 * octaves**2 + 0.2 * (octaves == 3) + shared
            losses = np.exp(log_loss + noise * generator.standard_normal(n_seeds))
            rows += [(width, octaves, j, np.nan if octaves == 4 and j else losses[j]) for j in range(n_seeds)]
    return pd.DataFrame(rows, columns=["width", "octaves", "seed", "loss"])


def test_planted_noise_is_recovered_near_the_best() -> None:
    found = [seed_noise(grid(seed), ["octaves"], blocks=["width"]) for seed in range(40)]
    paired = np.sqrt(np.mean([noise.sd**2 for noise in found]))
    total = np.sqrt(np.mean([noise.total**2 for noise in found]))
    assert paired == pytest.approx(SD, rel=0.05)  # the noisy rate on the wall is no part of it
    assert total == pytest.approx(np.hypot(SD, SHARED), rel=0.1)
    assert found[0].dof == 3 * (6 - 1) * (4 - 1)
    assert found[0].total_dof == 3 * 6 * (4 - 1)
    assert found[0].prior == (found[0].sd, found[0].dof)


def test_the_wall_is_noisier_and_is_used_only_on_demand() -> None:
    assert seed_noise(grid(), ["octaves"], blocks=["width"], max_excess=1.0).sd > 5 * SD


def test_one_block_for_all_takes_the_levels_of_each_width_for_noise() -> None:
    assert seed_noise(grid(), ["octaves", "width"]).sd > 1.5 * SD


def test_seeds_that_are_not_shared_give_the_total_only() -> None:
    rows = pd.DataFrame({"rate": [1, 1, 2, 2], "seed": [0, 1, 2, 3], "loss": np.exp([1.0, 1.002, 1.0, 0.996])})
    noise = seed_noise(rows, ["rate"])
    assert np.isnan(noise.sd)
    assert noise.total == pytest.approx(np.sqrt((2 * 0.001**2 + 2 * 0.002**2) / 2))
    assert noise.prior == (noise.total, 2)
    assert "not known: no shared seeds" in str(noise)
    again = SeedNoise.from_dict(noise.to_dict())
    assert np.isnan(again.sd)
    assert again.prior == noise.prior


def test_it_prints_and_round_trips() -> None:
    noise = seed_noise(grid(), ["octaves"], blocks=["width"])
    assert "72 runs of 18 settings" in str(noise)
    assert SeedNoise.from_dict(noise.to_dict()) == noise


def test_single_runs_and_doubled_runs_are_refused() -> None:
    rows = grid()
    with pytest.raises(ScalingError, match="none of 24 settings .*0.05"):
        seed_noise(rows[rows["seed"] == 0], ["octaves"], blocks=["width"])
    with pytest.raises(ValueError, match="row .* is another of"):
        seed_noise(rows, ["octaves"])
    with pytest.raises(ValueError, match="settings .*got none"):
        seed_noise(rows, [])
