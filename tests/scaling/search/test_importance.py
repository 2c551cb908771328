"""Importance: planted shares of the variance are recovered, and what means nothing lies within the noise."""

import json

import numpy as np
import pandas as pd
import pytest

from scaling import Importance, ScalingError, hyperparameter_importance

BOX = dict.fromkeys(("rate", "init", "decay", "idle", "idler"), (-1.0, 1.0))
SLOPE = {"rate": 0.06, "init": 0.03, "decay": 0.0}
BEND = {"rate": 0.10, "init": 0.05, "decay": 0.05}
RELU = 0.04
NOISE = 0.01


def planted(n_trials: int = 80, *, noise: float = NOISE, seed: int = 0) -> pd.DataFrame:
    """Random search: three hyperparameters and a choice that matter, two that don't."""
    generator = np.random.default_rng(seed)
    rows = pd.DataFrame({name: generator.uniform(-1, 1, n_trials) for name in BOX})
    rows["activation"] = generator.choice(["gelu", "relu", "silu"], n_trials)
    log_loss = 1 + RELU * (rows["activation"] == "relu") + noise * generator.standard_normal(n_trials)
    for name in SLOPE:
        log_loss += SLOPE[name] * rows[name] + BEND[name] * rows[name] ** 2
    return rows.assign(loss=np.exp(log_loss))


def planted_shares(noise: float = NOISE) -> pd.Series:
    """By sums over a fine grid of the box, not by the formula of the library."""
    u = np.linspace(-1, 1, 200_001)
    variance = {name: float(np.var(SLOPE[name] * u + BEND[name] * u**2)) for name in SLOPE}
    variance |= {"idle": 0.0, "idler": 0.0, "activation": float(np.var([0, RELU, 0]))}
    return pd.Series(variance) / (sum(variance.values()) + noise**2)


def importance(rows: pd.DataFrame, within: float = 1.0, n_bootstrap: int = 100) -> Importance:
    return hyperparameter_importance(rows, list(BOX), ["activation"], n_bootstrap, box=BOX, within=within)


@pytest.fixture(scope="module")
def found() -> list[Importance]:
    return [importance(planted(seed=seed)) for seed in range(40)]


def test_planted_shares_are_recovered_without_bias(found: list[Importance]) -> None:
    truth = planted_shares()
    mean = pd.concat([one.table["share"] for one in found], axis=1).mean(axis=1)
    for name in truth.index:
        assert mean[name] == pytest.approx(truth[name], abs=0.015), name
    assert np.mean([one.rest for one in found]) == pytest.approx(1 - truth.sum(), abs=0.01)
    for one in found:
        assert one.table["share"].sum() + one.rest == pytest.approx(1)


def test_intervals_cover_the_planted_shares(found: list[Importance]) -> None:
    truth = planted_shares()[["rate", "init", "decay", "activation"]]
    tables = [one.table.loc[truth.index] for one in found]
    inside = [(table["low"] <= truth) & (truth <= table["high"]) for table in tables]
    # 160 at 90 %; a bootstrap of 80 trials with 14 coefficients is a little short
    assert 0.78 <= np.mean(inside) <= 0.97


def test_an_irrelevant_hyperparameter_is_not_significant(found: list[Importance]) -> None:
    assert all({"rate", "init", "activation"} <= set(one.significant) for one in found)
    assert sum("idle" in one.significant or "idler" in one.significant for one in found) <= 2
    one = found[0]
    assert one.table.index[0] == "rate"
    assert "within noise" in one.status
    assert f"idle{' ' * 8}" in str(one)


def test_losses_of_noise_alone_make_nothing_significant() -> None:
    significant = []
    for seed in range(15):
        rows = planted(60, seed=seed)
        luck = np.exp(1 + 0.01 * np.random.default_rng([seed, 9]).standard_normal(60))
        significant += importance(rows.assign(loss=luck)).significant
    assert len(significant) <= 3  # of 90


def test_a_wall_dominates_the_whole_variance_and_not_the_good_region() -> None:
    rows = planted(120, noise=0.002)
    wall = np.exp(1.5 * np.maximum(rows["decay"] - 0.7, 0) / 0.3)
    rows["loss"] *= wall
    plain, near = importance(rows), importance(rows, within=0.5)
    assert plain.table.index[0] == "decay"
    assert plain.table.loc["rate", "share"] < 0.1
    assert near.table.loc["rate", "share"] > 3 * plain.table.loc["rate", "share"]
    assert plain.significant == ["decay"]
    # the wall is real, and no longer all there is
    assert set(near.significant) == {
        "decay",
        "rate",
        "init",
        "activation",
    }


def test_beyond_the_best_half_a_loss_counts_by_what_a_hyperbola_leaves_of_it() -> None:
    """The same table from losses compressed by hand, of which none is to be compressed any more."""
    rows = planted(120)
    excess = np.log(rows["loss"]) - np.log(rows["loss"]).min()
    knee = np.quantile(excess, 0.5)
    compressed = rows.assign(loss=np.exp(np.where(excess <= knee, excess, 2 * knee - knee**2 / excess)))
    table = importance(rows, within=0.5).table
    np.testing.assert_allclose(table[["share", "noise"]], importance(compressed).table[["share", "noise"]], atol=1e-9)


def test_it_agrees_with_ped_anova_on_what_matters_most() -> None:
    optuna = pytest.importorskip("optuna")
    rows = planted(300, noise=0.003)
    space = {name: optuna.distributions.FloatDistribution(-1, 1) for name in BOX}
    space["activation"] = optuna.distributions.CategoricalDistribution(["gelu", "relu", "silu"])
    study = optuna.create_study()
    for row in rows.to_dict("records"):
        loss = row.pop("loss")
        study.add_trial(optuna.trial.create_trial(params=row, distributions=space, value=loss))
    theirs = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    ours = importance(rows, within=0.5).table["share"]
    assert max(theirs, key=theirs.__getitem__) == ours.index[0] == "rate"
    matter = ["rate", "init", "activation"]
    assert min(theirs[name] for name in matter) > max(theirs[name] for name in ("idle", "idler"))
    assert ours[matter].min() > ours[["idle", "idler"]].max()


def test_diverged_runs_are_left_out_and_repeats_of_a_trial_count_once() -> None:
    rows = planted()
    extra = rows.head(3).assign(loss=[np.nan, np.inf, None])
    with_extra = importance(pd.concat([rows, extra], ignore_index=True))
    assert (with_extra.n_trials, with_extra.n_diverged) == (80, 3)
    pd.testing.assert_frame_equal(with_extra.table, importance(rows).table)
    twice = pd.concat([rows, rows], ignore_index=True).assign(trial=[*range(80), *range(80)])
    once = importance(rows).table.loc["rate"]
    repeated = importance(twice).table.loc["rate"]
    assert importance(twice).n_trials == 80
    assert repeated["high"] - repeated["low"] == pytest.approx(once["high"] - once["low"], rel=0.3)


def test_units_do_not_matter_and_the_box_may_be_the_trials_own() -> None:
    rows = planted()
    moved = rows.assign(rate=5 - 3 * rows["rate"])
    ours = hyperparameter_importance(rows, list(BOX), ["activation"])
    theirs = hyperparameter_importance(moved, list(BOX), ["activation"])
    np.testing.assert_allclose(ours.table["share"], theirs.table["share"], rtol=1e-6)


def test_too_little_evidence_is_refused() -> None:
    with pytest.raises(ScalingError, match="25 finished trials .* 13 coefficients of rate, .*: need 26"):
        importance(planted(25))
    with pytest.raises(ScalingError, match="always move together"):
        importance(planted().assign(idle=lambda rows: rows["rate"]))
    with pytest.raises(ScalingError, match="all 80 losses are equal"):
        importance(planted().assign(loss=3.0))


def test_bad_arguments_are_refused() -> None:
    rows = planted()
    with pytest.raises(ValueError, match="missing column swiglu"):
        hyperparameter_importance(rows, ["swiglu"])
    with pytest.raises(ValueError, match="name each column once"):
        hyperparameter_importance(rows, ["rate", "rate"])
    with pytest.raises(ValueError, match="need 0 < within ≤ 1"):
        hyperparameter_importance(rows, ["rate"], within=0)
    with pytest.raises(ValueError, match="rate .*got 2: make it categorical"):
        hyperparameter_importance(rows.assign(rate=[0, 1] * 40), ["rate"])
    with pytest.raises(ValueError, match="activation .*got 1"):
        hyperparameter_importance(rows.assign(activation="gelu"), ["rate"], ["activation"])
    with pytest.raises(ValueError, match="rate .*got -0"):
        hyperparameter_importance(rows, ["rate"], box={"rate": (0, 1)})
    with pytest.raises(ValueError, match="box .*got activation"):
        hyperparameter_importance(rows, ["rate"], ["activation"], box={"activation": (0, 1)})
    with pytest.raises(ValueError, match="trial .* row 0"):
        hyperparameter_importance(rows.assign(trial=np.nan), ["rate"])


@pytest.mark.parametrize("seed", range(5))
def test_shuffles_that_make_two_choices_one_are_left_out(seed: int) -> None:
    first, second = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 0, 1, 0, 1])
    loss = 2 + 0.1 * first + 0.01 * np.random.default_rng(seed).standard_normal(6)
    rows = pd.DataFrame({"norm": first, "tied": second, "loss": loss})
    table = hyperparameter_importance(rows, [], ["norm", "tied"], seed=seed).table
    assert table["noise"].between(0, 1).all()
    assert table.loc["norm", "share"] > table.loc["tied", "share"]


def test_it_round_trips_through_json_and_draws(found: list[Importance]) -> None:
    one = found[0]
    again = Importance.from_dict(json.loads(json.dumps(one.to_dict(), allow_nan=False)))
    pd.testing.assert_frame_equal(again.table, one.table)
    assert str(again) == str(one)
    assert again._repr_html_().startswith("<pre>")
    figure = one.plot()
    assert {trace.name for trace in figure.data} == {"significant", "within noise", "a shuffled column's"}
    assert figure.layout.xaxis.title.text == "share of the variance of log loss"
    assert figure.layout.yaxis.categoryarray[-1] == one.table.index[0]
