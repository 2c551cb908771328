"""Finalists repeated over seeds: intervals cover, probabilities are what they say, and near-ties are called so."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from scaling import Finalists, ScalingError, compare_finalists

NOISE, SEED_SPREAD, LEVEL = 0.002, 0.003, 1.2


def planted(effects: list[float], n_seeds: int = 3, *, seed: int = 0) -> pd.DataFrame:
    """Trials 0, 1, … with `effects` on log loss, over shared seeds."""
    generator = np.random.default_rng(seed)
    levels = SEED_SPREAD * generator.standard_normal(n_seeds)
    rows = [
        (trial, j, np.exp(LEVEL + effect + levels[j] + NOISE * generator.standard_normal()))
        for trial, effect in enumerate(effects)
        for j in range(n_seeds)
    ]
    return pd.DataFrame(rows, columns=["trial", "seed", "loss"])


@pytest.fixture(scope="module")
def judged() -> list[tuple[np.ndarray, Finalists]]:
    """300 sets of four trials whose spread is from a third of the noise to ten times it."""
    generator = np.random.default_rng(1)
    sets = []
    for k in range(300):
        effects = NOISE * 10 ** generator.uniform(-0.5, 1) * generator.standard_normal(4)
        sets.append((effects, compare_finalists(planted(effects.tolist(), seed=k))))
    return sets


def test_intervals_cover_at_their_level(judged: list[tuple[np.ndarray, Finalists]]) -> None:
    losses, differences = [], []
    for effects, found in judged:
        truth = np.exp(LEVEL + effects)
        table = found.trials.sort_index()
        losses += ((table["low"] <= truth) & (truth <= table["high"])).tolist()
        away = truth - truth[found.winner]
        inside = (table["difference_low"] <= away) & (away <= table["difference_high"])
        differences += inside[table.index != found.winner].tolist()
    assert 0.87 <= np.mean(differences) <= 0.95  # 900, at 90 %; the winner is picked by the same runs
    assert 0.87 <= np.mean(losses) <= 0.96  # 1200 in sets of four that share their seeds


def test_probabilities_of_being_best_are_calibrated(judged: list[tuple[np.ndarray, Finalists]]) -> None:
    claimed = np.concatenate([found.trials.sort_index()["p_best"] for _, found in judged])
    best = np.concatenate([np.arange(4) == effects.argmin() for effects, _ in judged])
    for low, high in ((0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 0.95), (0.95, 1.01)):
        here = (low <= claimed) & (claimed < high)
        mean = claimed[here].mean()
        error = np.sqrt(mean * (1 - mean) / here.sum()) + 0.01
        assert abs(best[here].mean() - mean) < 3 * error, (low, high, mean, best[here].mean(), here.sum())


def test_the_winner_and_its_near_tie_contain_the_best_at_the_level(judged: list[tuple[np.ndarray, Finalists]]) -> None:
    held = [effects.argmin() in (found.winner, *found.near_tie) for effects, found in judged]
    assert np.mean(held) >= 0.9


def test_the_winners_loss_is_not_flattered(judged: list[tuple[np.ndarray, Finalists]]) -> None:
    errors = []
    for effects, found in judged:
        table, winner = found.trials, found.winner
        truth = effects[winner] - effects.mean()
        centre = np.log(table["measured"]).mean()
        errors.append([np.log(table.loc[winner, name]) - centre - truth for name in ("loss", "measured")])
    ours, plain = np.mean(errors, axis=0)
    assert plain < -1.5e-4  # the least of the measured means is too low by a tenth of the noise and more
    assert abs(ours) < abs(plain) / 2


def test_equal_trials_are_a_near_tie_and_a_clear_winner_is_named() -> None:
    equal = [compare_finalists(planted([0.0, 0.0, 0.0], seed=k)).verdict for k in range(40)]
    assert equal.count("near-tie") >= 34
    clear = compare_finalists(planted([0.03, 0.0, 0.03]))
    assert (clear.winner, clear.near_tie, clear.verdict, clear.reasons) == (1, (), "clear", ())
    assert clear.p_best > 0.97
    assert clear.trials.loc[0, "difference_low"] > 0
    assert f"best with probability {clear.p_best:.2f}" in clear.sentence
    assert "near-tie" not in clear.sentence


def test_a_near_tie_names_those_that_may_be_best_and_no_others() -> None:
    found = compare_finalists(planted([0.0, 0.0, 0.05, 0.05]))
    assert {found.winner, *found.near_tie} == {0, 1}
    assert found.sentence.endswith(f": a near-tie with trial {found.near_tie[0]}")


def test_shared_seeds_cancel() -> None:
    rows = planted([0.0, 0.01])
    shifted = rows.assign(loss=rows["loss"] * np.exp(0.3 * rows["seed"]))
    ours, far = compare_finalists(rows), compare_finalists(shifted)
    assert far.p_best == pytest.approx(ours.p_best)
    assert far.noise == pytest.approx(ours.noise)
    assert far.interval[1] - far.interval[0] > 10 * (ours.interval[1] - ours.interval[0])


def test_missing_runs_are_allowed_for_by_the_seeds_level() -> None:
    rows = planted([0.0, 0.02])
    rows["loss"] *= np.exp(0.5 * (rows["seed"] == 0))  # a hard seed
    lacking = rows[~((rows["trial"] == 1) & (rows["seed"] == 0))]  # which the worse trial was spared
    found = compare_finalists(lacking)
    assert found.trials["measured"].idxmin() == 1
    assert found.winner == 0
    assert found.trials.loc[1, "difference"] == pytest.approx(0.02 * found.loss, rel=0.4)
    assert found.reasons == ("trial 1 has no run of 1 of 3 seeds",)


def test_trials_without_a_seed_in_common_are_refused() -> None:
    rows = planted([0.0, 0.02], 4)
    with pytest.raises(ScalingError, match="trials 0, 1 cannot be compared"):
        compare_finalists(rows[(rows["trial"] == 0) == (rows["seed"] < 2)])


def test_one_seed_reports_what_is_unknown_unless_the_noise_is_given() -> None:
    rows = planted([0.0, 0.02], 1)
    found = compare_finalists(rows)
    assert (found.winner, found.verdict, found.near_tie, found.dof) == (0, "not known", (1,), 0)
    assert found.interval == (-np.inf, np.inf)
    assert found.trials.loc[1, "difference_high"] == np.inf
    assert "not known" in found.sentence
    assert "one seed: repeat the trials over 3 fresh seeds" in str(found)
    known = compare_finalists(rows, noise=(NOISE, 20))
    assert known.verdict == "clear"
    assert 0 < known.trials.loc[1, "difference_low"] < known.trials.loc[1, "difference_high"] < np.inf
    assert known.interval == (-np.inf, np.inf)  # how far this seed is from the others is still not known
    assert known.reasons == ("one seed: the noise is only what was passed in",)
    exact = compare_finalists(rows, noise=(0.0, 20))  # runs elsewhere that ended all alike
    assert exact.verdict == "clear"
    assert exact.noise < 1e-9


def test_noise_from_elsewhere_is_pooled_by_its_degrees_of_freedom() -> None:
    rows = planted([0.0, 0.003, 0.003])
    alone, pooled = compare_finalists(rows), compare_finalists(rows, noise=(2 * NOISE, 12))
    assert pooled.dof == alone.dof + 12 == 16
    assert pooled.noise**2 == pytest.approx((4 * alone.noise**2 + 12 * 4 * NOISE**2) / 16)


def test_one_trial_has_an_interval_and_nothing_to_compare_it_with() -> None:
    rows = planted([0.0])
    found = compare_finalists(rows)
    log_loss = np.log(rows["loss"])
    assert found.interval == pytest.approx(
        np.exp(log_loss.mean() + 2.92 * log_loss.std() / 3**0.5 * np.array([-1, 1])), abs=2e-3
    )
    assert (found.p_best, found.reasons) == (1.0, ("one trial: there is nothing to compare it with",))
    assert found.verdict == "not known"


def test_a_trial_that_diverged_once_is_marked_and_cannot_win() -> None:
    rows = planted([0.0, 0.02, 0.03])
    rows.loc[0, "loss"] = np.nan
    found = compare_finalists(rows)
    assert found.winner == 1
    assert found.trials.index.tolist() == [1, 2, 0]
    assert found.trials.loc[0, ["n_diverged", "p_best"]].tolist() == [1, 0]
    assert 0 not in found.near_tie
    assert found.reasons == ("trial 0 diverged in 1 of 3 runs and can't win",)
    rest = compare_finalists(rows[rows["trial"] != 0])
    assert found.loss == rest.loss


def test_if_every_trial_diverged_once_the_survivors_are_compared() -> None:
    rows = planted([0.0, 0.03], 4)
    rows.loc[rows["seed"] == rows["trial"], "loss"] = np.nan
    found = compare_finalists(rows)
    assert found.winner == 0
    assert found.reasons[0] == "a run of every trial diverged: only the runs that survived are compared"
    with pytest.raises(ScalingError, match="all 8 runs of 2 trials diverged"):
        compare_finalists(rows.assign(loss=np.nan))


def test_the_answer_is_deterministic_and_does_not_depend_on_the_order() -> None:
    rows = planted([0.0, 0.002, 0.004])
    once, again = compare_finalists(rows), compare_finalists(rows)
    pd.testing.assert_frame_equal(once.trials, again.trials)
    shuffled = compare_finalists(rows.sample(frac=1, random_state=0))
    assert shuffled.winner == once.winner
    assert shuffled.trials.sort_index()["p_best"].to_numpy() == pytest.approx(
        once.trials.sort_index()["p_best"].to_numpy(), abs=0.02
    )


def test_equal_losses_are_a_tie_and_not_an_error() -> None:
    found = compare_finalists(planted([0.0, 0.0]).assign(loss=3.0))
    assert found.loss == pytest.approx(3.0)
    assert found.trials["p_best"].to_numpy() == pytest.approx([0.5, 0.5], abs=0.02)


@pytest.mark.parametrize(("effects", "n_seeds"), [([0.0, 0.002], 3), ([0.0, 0.002], 1)])
def test_it_round_trips_through_json_and_draws(effects: list[float], n_seeds: int) -> None:
    rows = planted(effects, n_seeds)
    rows = pd.concat([rows, pd.DataFrame([{"trial": 9, "seed": 0, "loss": np.nan}])], ignore_index=True)
    found = compare_finalists(rows)
    again = Finalists.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    pd.testing.assert_frame_equal(again.trials, found.trials)
    assert str(again) == str(found)
    assert again._repr_html_().startswith("<pre>")
    figure = found.plot()
    assert figure.data[0].name == "winner"
    assert figure.layout.yaxis.title.text == "loss (nats per token)"


def test_bad_arguments_are_refused() -> None:
    rows = planted([0.0, 0.01])
    with pytest.raises(ValueError, match="missing column seed"):
        compare_finalists(rows.drop(columns="seed"))
    with pytest.raises(ValueError, match="level .*got 90"):
        compare_finalists(rows, level=90)
    with pytest.raises(ValueError, match="noise .*got "):
        compare_finalists(rows, noise=(0.002, 0))
    with pytest.raises(ValueError, match="noise .*got "):
        compare_finalists(rows, noise=(math.nan, 2))
    with pytest.raises(ValueError, match="noise .*got "):
        compare_finalists(rows, noise=(0.002, math.inf))
    with pytest.raises(ValueError, match="row 0.*0, seed 0"):
        compare_finalists(pd.concat([rows, rows]))
