"""Losses per domain over mixture weights: planted laws, limits, the next runs, the public runs of RegMix, bad tables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scaling import BestMixture, MixtureFit, NextMixtures, ScalingError, fit_mixture

DOMAINS = ("books", "code", "papers", "web")
VALUE = np.array([[0.9, 0.05, 0.1, 0.3], [0.02, 1.0, 0.1, 0.1], [0.3, 0.1, 0.4, 0.9]])
"""Of each domain's data for each target: books, code, web."""
TARGETS = ("books", "code", "web")


def losses(weights: np.ndarray, n_params: float = 1e7) -> np.ndarray:
    """The planted law: a power of the data that is worth something to the target, over a floor that falls with size."""
    return np.asarray(1.6 + (weights @ VALUE.T + 0.03) ** -0.3 * (n_params / 1e7) ** -0.15)


def table(n: int = 60, *, seed: int = 0, noise: float = 2e-3, sizes: tuple[float, ...] = ()) -> pd.DataFrame:
    """Runs of n drawn mixtures, at each size if there are several."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(len(DOMAINS), 0.7), size=n)
    parts = []
    for size in sizes or (1e7,):
        measured = losses(weights, size) * np.exp(noise * rng.standard_normal((n, len(TARGETS))))
        part = pd.DataFrame(np.column_stack([weights, measured]))
        part.columns = [*(f"weight_{name}" for name in DOMAINS), *(f"loss_{name}" for name in TARGETS)]
        parts.append(part.assign(n_params=size, n_tokens=20 * size) if sizes else part)
    return pd.concat(parts, ignore_index=True)


@pytest.fixture(scope="module")
def law() -> MixtureFit:
    return fit_mixture(table())


def predicted(fit: MixtureFit, weights: np.ndarray, **scale: float) -> np.ndarray:
    found = fit.predict(weights, **scale)
    return np.asarray(found.pivot_table(index="mixture", columns="domain", values="loss")[list(TARGETS)])


def test_a_planted_law_is_recovered(law: MixtureFit) -> None:
    new = np.random.default_rng(1).dirichlet(np.full(4, 0.7), size=200)
    error = np.log(predicted(law, new) / losses(new))
    assert np.sqrt((error**2).mean()) < 0.004, "a run's noise is .002, and the losses' spread .07"
    assert law.status == "ok"
    assert law.effects.loc["code"].idxmin() == "code"
    assert law.effects.loc["web"].idxmin() == "web"


def test_intervals_cover() -> None:
    held = []
    for seed in range(6):
        fit = fit_mixture(table(40, seed=seed, noise=1e-2))
        new = table(60, seed=100 + seed, noise=1e-2)
        for level in (0.5, 0.9):
            found = fit.predict(new, level=level)
            truth = new[[f"loss_{name}" for name in TARGETS]].to_numpy().ravel()
            held.append((level, found["low"].lt(truth) & found["high"].gt(truth)))
    shares = {level: np.mean([inside.mean() for each, inside in held if each == level]) for level in (0.5, 0.9)}
    assert 0.83 <= shares[0.9] <= 0.97
    assert 0.4 <= shares[0.5] <= 0.65


def test_the_best_mixture_is_near_the_planted_one_and_within_its_limits(law: MixtureFit) -> None:
    grid = (
        np.array([[a, b, c, 20 - a - b - c] for a in range(21) for b in range(21 - a) for c in range(21 - a - b)]) / 20
    )
    wanted = {"books": 1.0, "code": 0.5, "web": 2.0}
    true = losses(grid) @ list(wanted.values())
    free = law.best(wanted)
    found = np.array([free.weights[name] for name in DOMAINS])
    assert float((losses(found[None]) @ list(wanted.values()))[0]) < true.min() + 0.03 * (np.median(true) - true.min())
    assert found.sum() == pytest.approx(1, abs=1e-6)
    assert (free.table["low"] <= free.table["weight"]).all()
    assert (free.table["high"] >= free.table["weight"]).all()
    assert free.low < float((losses(found[None]) @ list(wanted.values()))[0]) < free.high

    bound = law.best(
        wanted, bounds={"code": (0.3, 1.0)}, available_tokens={"web": 1e9}, n_tokens=2e10, max_epochs=4
    ).weights
    assert bound["code"] >= 0.3 - 1e-9
    assert bound["web"] <= 0.2 + 1e-9
    assert sum(bound.values()) == pytest.approx(1, abs=1e-6)
    assert free.value <= law.best(wanted, bounds={"code": (0.6, 1.0)}).value


def test_the_best_run_has_the_name_of_its_row(law: MixtureFit) -> None:
    found = law.best(seed=0)
    runs = table().set_axis([f"run {i}" for i in range(60)])
    runs.loc[["run 0", "run 1"], f"loss_{TARGETS[0]}"] = np.nan
    assert found.best_run == str(int(found.best_run))
    best = fit_mixture(runs).best(seed=0)
    assert best.best_run == repr(f"run {found.best_run}")


def test_columns_of_hyperparameters_are_neither_domains_nor_targets(law: MixtureFit) -> None:
    found = fit_mixture(table().assign(weight_decay=0.001, loss_scale=65536.0))
    assert (found.domains, found.targets) == (law.domains, law.targets)


def test_a_table_of_mixtures_may_have_any_prefix(law: MixtureFit) -> None:
    mixtures = table(4, seed=5).filter(like="weight_")
    other = mixtures.rename(columns=lambda name: name.replace("weight_", "p_"))
    pd.testing.assert_frame_equal(law.predict(other), law.predict(mixtures))


def test_the_columns_of_weights_are_those_of_the_fitted_table_whatever_stands_before_them(law: MixtureFit) -> None:
    mixtures = table(4, seed=5).filter(like="weight_")
    others = pd.DataFrame({f"tokens_{name}": np.full(4, 0.25) for name in DOMAINS})
    pd.testing.assert_frame_equal(law.predict(pd.concat([others, mixtures], axis=1)), law.predict(mixtures))
    shares = mixtures.rename(columns=lambda name: name.replace("weight_", "p_"))
    with pytest.raises(ValueError, match=f"tokens_{law.domains[0]}, p_{law.domains[0]}"):
        law.predict(pd.concat([others, shares], axis=1))
    runs = table().rename(columns=lambda name: name.replace("weight_", "p_"))
    of_shares = fit_mixture(runs, weight_prefix="p_")
    assert MixtureFit.from_dict(of_shares.to_dict()).weight_prefix == "p_"
    found = of_shares.predict(pd.concat([others, shares], axis=1))
    pd.testing.assert_frame_equal(found, of_shares.predict(mixtures))


def test_the_documented_search_for_a_mixture_uses_the_runs_it_trains() -> None:
    page = (Path(__file__).parents[3] / "docs/mixtures.md").read_text()
    (loop,) = (block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "while (" in block)
    one_step = loop.replace("while (", "if (").replace("pile_cc", TARGETS[0]).replace("> 0.001", "> 0")

    def train(mixture: dict[str, float]) -> dict[str, float]:
        weights = np.array([mixture[f"weight_{name}"] for name in DOMAINS])
        measured = losses(weights[None], mixture.get("n_params", 1e7))[0]
        return {f"loss_{name}": float(value) for name, value in zip(TARGETS, measured, strict=True)}

    for runs in (table(12), table(12, sizes=(1e7, 1e8)), table(12).assign(n_params=1e7, n_tokens=2e8)):
        names = {"runs": runs, "train": train, "pd": pd}
        exec(one_step, names)
        assert len(fit_mixture(names["runs"]).weights) == len(runs) + 4


def test_a_repeated_row_is_refused_and_the_next_runs_have_the_table_s_names() -> None:
    runs = table(20)
    with pytest.raises(ValueError, match="row 20 repeats"):
        fit_mixture(pd.concat([runs, runs], ignore_index=True))
    losses = [name for name in runs if name.startswith("loss_")]
    crashed = pd.concat([runs, *[runs.iloc[:1].assign(**dict.fromkeys(losses, np.nan))] * 2], ignore_index=True)
    assert len(fit_mixture(crashed).weights) == 20, "what has no loss repeats nothing"
    shares = runs.rename(columns=lambda name: name.replace("weight_", "p_"))
    following = fit_mixture(shares, weight_prefix="p_").next_mixtures(2)
    assert [*following.weights] == [f"p_{name}" for name in DOMAINS]
    assert "p_" not in str(following)


def test_a_single_target_wants_its_own_data(law: MixtureFit) -> None:
    assert law.best("code").weights["code"] > 0.9
    assert law.best("code").p_better > 0.4


def test_size_is_part_of_the_law_where_the_runs_differ_in_it() -> None:
    fit = fit_mixture(table(30, sizes=(1e7, 4e7, 1.6e8)))
    assert fit.varying == ("n_params", "n_tokens")
    new = np.random.default_rng(1).dirichlet(np.full(4, 0.7), size=50)
    error = np.log(predicted(fit, new, n_params=6.4e8, n_tokens=20 * 6.4e8) / losses(new, 6.4e8))
    assert np.sqrt((error**2).mean()) < 0.02
    default = predicted(fit, new)
    assert default.tolist() == predicted(fit, new, n_params=1.6e8, n_tokens=20 * 1.6e8).tolist()
    runs = fit.next_mixtures(2, "web").runs
    assert set(runs["n_params"]) <= {1e7, 4e7, 1.6e8}
    assert (runs["flops"] == 6 * runs["n_params"] * runs["n_tokens"]).all()


def test_the_next_runs_narrow_the_objective_and_keep_the_limits() -> None:
    rows = table(12, noise=1e-2)
    fit = fit_mixture(rows)
    found = fit.next_mixtures(3, "web", bounds={"papers": (0.0, 0.2)})
    weights = found.runs[[f"weight_{name}" for name in DOMAINS]].to_numpy()
    assert weights.sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-6)
    assert (weights[:, DOMAINS.index("papers")] <= 0.2 + 1e-9).all()
    assert (found.runs["gain"] >= 0).all()
    assert [found.spread, *found.runs["spread"]] == sorted([found.spread, *found.runs["spread"]], reverse=True)


def test_the_order_of_domains_and_the_unit_of_losses_change_nothing(law: MixtureFit) -> None:
    rows = table()
    shuffled = rows[rows.columns[::-1]].assign(**{f"loss_{name}": rows[f"loss_{name}"] / np.log(2) for name in TARGETS})
    again = fit_mixture(shuffled)
    assert predicted(again, rows.iloc[:5, :4]) == pytest.approx(predicted(law, rows.iloc[:5, :4]) / np.log(2), rel=1e-6)
    assert again.best("web").weights == pytest.approx(law.best("web").weights, abs=2e-3)


def test_rounded_weights_are_read_as_shares(law: MixtureFit) -> None:
    by_name = law.predict({"code": 0.5, "web": 0.503})
    shares = law.predict(np.array([[0, 0.5 / 1.003, 0, 0.503 / 1.003]]))
    assert by_name["loss"].tolist() == pytest.approx(shares["loss"].tolist(), rel=1e-9)


def test_results_are_kept_as_json_and_drawn(law: MixtureFit, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    table().to_csv(path, index=False)
    best, following = fit_mixture(path).best("web", bounds={"web": (0.0, 0.5)}), law.next_mixtures(2, "web")
    again = MixtureFit.from_dict(law.to_dict())
    assert str(again) == str(law)
    assert again.predict({"web": 1.0})["low"].tolist() == law.predict({"web": 1.0})["low"].tolist()
    assert str(BestMixture.from_dict(best.to_dict())) == str(best)
    assert str(NextMixtures.from_dict(following.to_dict())) == str(following)
    assert law.plot().data[0]["z"].shape == (len(TARGETS), len(DOMAINS))
    assert [trace.name for trace in best.plot().data] == ["weight, 90% interval", "limit", "limit"]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda rows: rows.drop(columns=[f"weight_{name}" for name in DOMAINS]), ("weight_",)),
        (lambda rows: rows.drop(columns=[f"loss_{name}" for name in TARGETS]), ("loss_",)),
        (lambda rows: rows.assign(weight_web=rows["weight_web"] + 0.1), ("weight_web", "1.1", "row 0")),
        (
            lambda rows: rows.assign(weight_web=rows["weight_web"].where(rows.index != 3, -0.1)),
            ("weight_web", "-0.1", "3"),
        ),
        (lambda rows: rows.assign(loss_code=rows["loss_code"].where(rows.index > 4)), ("loss_code", "5 of 8", "row 0")),
        (lambda rows: rows.assign(loss_code=0.0), ("loss_code", "0")),
        (lambda rows: rows.assign(n_params=-1.0), ("n_params", "-1")),
        (lambda rows: rows.head(3), ("3",)),
        (lambda rows: rows.assign(loss_code=2.0), ("loss_code", "8")),
        (lambda rows: rows.assign(**rows.loc[0, rows.columns[:4]].to_dict()), ("mixture", "8")),
    ],
)
def test_a_bad_table_is_named(
    change: Callable[[pd.DataFrame], pd.DataFrame], parts: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "runs.csv"
    change(table(8)).to_csv(path, index=False)
    with pytest.raises(ValueError, match="runs.csv") as raised:
        fit_mixture(path)
    assert all(part in str(raised.value) for part in parts)


@pytest.mark.parametrize(
    ("ask", "error", "parts"),
    [
        (lambda fit: fit.predict({"prose": 1.0}), ValueError, ("prose", "papers")),
        (lambda fit: fit.predict({"web": 0.5}), ValueError, ("0.5",)),
        (lambda fit: fit.predict(np.ones((1, 3)) / 3), ValueError, ("[1, 3]",)),
        (lambda fit: fit.predict({"web": 1.0}, n_params=1e9), ValueError, ("n_params", "1e+09")),
        (lambda fit: fit.predict({"web": 1.0}, level=1.0), ValueError, ("level", "1.0")),
        (lambda fit: fit.best({"prose": 1.0}), ValueError, ("objective", "prose")),
        (lambda fit: fit.best({"web": -1.0}), ValueError, ("objective", "-1")),
        (lambda fit: fit.best(bounds={"web": (0.5, 0.2)}), ValueError, ("web", "0.5")),
        (lambda fit: fit.best(bounds={"web": 0.5}), ValueError, ("web", "0.5")),
        (lambda fit: fit.best(bounds={"web": ("0.1", "0.5")}), ValueError, ("web", "0.5")),
        (lambda fit: fit.best(bound={"web": (0.1, 0.5)}), TypeError, ("bound", "bounds")),
        (lambda fit: fit.next_mixtures(bound={"web": (0.1, 0.5)}), TypeError, ("bound", "bounds")),
        (lambda fit: fit.best(available_tokens={"web": 1e9}, n_tokens=0), ValueError, ("n_tokens", "0")),
        (lambda fit: fit.best(level=1.5), ValueError, ("level", "1.5")),
        (lambda fit: fit.best(available_tokens={"web": 1e9}), ValueError, ("n_tokens",)),
        (lambda fit: fit.best(bounds=dict.fromkeys(DOMAINS, (0.0, 0.2))), ScalingError, ("0.8",)),
        (lambda fit: fit.best(bounds=dict.fromkeys(DOMAINS, (0.4, 1.0))), ScalingError, ("1.6",)),
        (lambda fit: fit.next_mixtures(0), ValueError, ("n ", "0")),
    ],
)
def test_a_bad_question_is_named(
    law: MixtureFit, ask: Callable[[MixtureFit], object], error: type[Exception], parts: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        ask(law)
    assert all(part in str(raised.value) for part in parts)


def test_few_runs_of_noise_are_doubtful() -> None:
    rows = table(7)
    rows[[f"loss_{name}" for name in TARGETS]] = np.random.default_rng(0).uniform(2, 3, (7, 3))
    fit = fit_mixture(rows)
    assert fit.status == "doubtful"
    assert "7 runs for 4 domains" in fit.warnings[0]


def test_regmix_mixtures_are_put_in_order_at_their_size_and_sixty_times_it(
    public_table: Callable[[str], pd.DataFrame],
) -> None:
    small, large = public_table("regmix_1m"), public_table("regmix_60m_ids1to128")
    targets = ["loss_pile_cc", "loss_hackernews"]
    others = [name for name in small if name.startswith("loss_") and name not in targets]
    fit = fit_mixture(small[small["split"] == "train"].drop(columns=others))
    test = small[small["split"] == "test"]
    for runs, least in ((test, (0.99, 0.99)), (large, (0.985, 0.98))):
        found = fit.predict(runs)
        for target, bound in zip(targets, least, strict=True):
            own = found[found["domain"] == target.removeprefix("loss_")].set_index(runs.index)
            assert own["loss"].corr(runs[target], method="spearman") > bound
            if runs is test:
                assert 0.85 < ((own["low"] < runs[target]) & (runs[target] < own["high"])).mean() < 0.99


def test_a_weight_below_or_above_those_of_every_run_is_no_supported_one() -> None:
    """The loss rises steeply below c = .05, where there is no run."""
    rng = np.random.default_rng(0)
    c, part = rng.uniform(0.1, 0.3, 24), rng.uniform(0.05, 0.95, 24)
    weights = pd.DataFrame({"weight_a": (1 - c) * part, "weight_b": (1 - c) * (1 - part), "weight_c": c})
    true = 2 + 0.5 * c + 1.5 * np.exp(-c / 0.02) + 0.3 * (weights["weight_a"] - 0.5) ** 2
    fit = fit_mixture(weights.assign(loss_x=true * np.exp(0.001 * rng.standard_normal(24))))
    best = fit.best()
    assert best.weights["c"] < 0.09
    assert (best.status, len(best.caveats)) == ("look", 1)
    assert "c" in best.caveats[0].split()
    assert fit.best(bounds={"c": (0.12, 1.0)}).status == "ok"
    assert fit.best(bounds={"c": (0.4, 1.0)}).status == "look"
    asked = pd.DataFrame({"c": [best.weights["c"], 0.4, 0.1, 0.2, 0.29]}).assign(a=lambda rows: (1 - rows["c"]) / 2)
    found = fit.predict(asked.assign(b=asked["a"]))
    assert found["unsupported"].ne("").tolist() == [True, True, False, False, False]
    assert fit.predict(weights)["unsupported"].eq("").all()
    saved = best.to_dict()
    assert BestMixture.from_dict(saved).caveats == best.caveats
    for row in saved["table"]:
        del row["tried_least"]  # as earlier versions saved it
    assert BestMixture.from_dict(saved).weights == best.weights
    assert BestMixture.from_dict(saved).status == "ok"


def test_beyond_the_runs_sizes_intervals_are_not_supported() -> None:
    rows = table(20, sizes=(1e7, 4e7))
    fit = fit_mixture(rows)
    inside, beyond = {"n_params": 4e7, "n_tokens": 8e8}, {"n_params": 1e8, "n_tokens": 2e9}
    assert [len(fit.unsupported(scale)) for scale in (inside, beyond)] == [0, 2]
    assert "2.5" in fit.unsupported(beyond)[0]
    assert fit.predict(rows.iloc[:2])["unsupported"].eq("").all()
    few = fit_mixture(rows.iloc[:24])
    assert len(few.unsupported(inside)) == 2, "four runs are too few at a size"
    assert (fit.best(n_params=4e7).status == "not supported", fit.best(n_params=1e9).status) == (False, "not supported")


def test_each_mixture_is_predicted_at_its_own_size() -> None:
    rows = table(20, sizes=(1e7, 4e7, 1.6e8))
    fit = fit_mixture(rows)
    one = rows.iloc[[0] * 4].assign(n_params=[1e7, 4e7, 1e8, 1e9], n_tokens=2e9)
    found = fit.predict(one)
    for number, row in enumerate(one.to_dict("records")):
        weights = {name: row[f"weight_{name}"] for name in DOMAINS}
        alone = fit.predict(weights, row["n_params"], row["n_tokens"])
        own = found[found["mixture"] == number]
        assert own["loss"].tolist() == pytest.approx(alone["loss"].tolist())
        assert own["unsupported"].tolist() == alone["unsupported"].tolist()
    with pytest.raises(ValueError):
        fit.predict(one, n_params=1e8)
    with pytest.raises(ValueError):
        fit_mixture(table(20)).predict(one)


@pytest.mark.parametrize("form", ["{}_loss", "loss/{}", "{}/loss"])
def test_losses_may_be_named_the_other_way_round(form: str) -> None:
    rows = table(20)
    other = rows.rename(columns={f"loss_{name}": form.format(name) for name in TARGETS})
    fit = fit_mixture(other)
    assert fit.targets == TARGETS
    assert fit.losses.tolist() == fit_mixture(rows).losses.tolist()
    assert len(fit.notes) == 1


@pytest.mark.parametrize("renamed", [str.capitalize, str.upper])
def test_capitals_of_a_prefix_change_nothing(renamed: Callable[[str], str]) -> None:
    """A target `Loss_web` next to `loss_code` was left out of the objective without a note."""
    rows = table(20)
    wanted = fit_mixture(rows)
    for chosen in ([*rows.columns], ["loss_web"], ["weight_web", "loss_web"]):
        names = {name: renamed(prefix := name.split("_")[0]) + name.removeprefix(prefix) for name in chosen}
        found = fit_mixture(rows.rename(columns=names).assign(Weight_Decay=0.1, Loss_Scale=2.0))
        assert (found.domains, found.targets) == (wanted.domains, wanted.targets)
        assert (found.losses == wanted.losses).all()
        assert found.notes


def test_a_column_that_splits_the_losses_is_named() -> None:
    rows = table(20, sizes=(1e7, 4e7))
    sizes = rows["n_params"].map({1e7: "10M", 4e7: "40M"})
    with pytest.raises(ValueError) as raised:
        fit_mixture(rows.drop(columns=["n_params", "n_tokens"]).assign(size=sizes))
    assert "size" in str(raised.value)
    largest = rows.filter(like="weight_").idxmax(axis=1)
    harmless = fit_mixture(rows.assign(size=sizes, largest=largest, half=np.arange(len(rows)) % 2))
    assert harmless.losses.tolist() == fit_mixture(rows).losses.tolist()


def test_a_repeated_mixture_does_not_make_the_error_seem_smaller() -> None:
    """The run left out has a twin, from which it would be known but for the noise."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet([1, 1, 1], 14)

    def table(seed: int) -> pd.DataFrame:
        noise = 0.002 * np.random.default_rng(seed).standard_normal((14, 3))
        losses = (1.8 + 1.2 * np.exp(-1.5 * weights - 0.3 * weights[:, :1])) * np.exp(noise)
        names = ("web", "code", "books")
        columns = {f"weight_{name}": weights[:, k] for k, name in enumerate(names)}
        return pd.DataFrame(columns | {f"loss_{name}": losses[:, k] for k, name in enumerate(names)})

    once, twice = fit_mixture(table(1)), fit_mixture(pd.concat([table(1), table(2)], ignore_index=True))
    assert twice.quality["error"].mean() > 0.58 * once.quality["error"].mean()
