"""Our own searcher in a sweep: which results it observes, and which it must not confuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pandas as pd
import pytest

from muscale.search.across_scales import AcrossScales, expected_drift
from muscale.search.protocols import Observation
from search_spaces import Choice, Condition, Config, Constraint, Fixed, LogUniform, Ordinal, Prior, Space, Uniform

RATE = LogUniform(low=1e-3, high=1e-1)


@dataclass(frozen=True)
class Trials:
    """What is known, given as it is."""

    observations: list[Observation]
    pending: list[Config] = field(default_factory=list)
    space: Space = field(default_factory=lambda: Space({"learning_rate": RATE}))


def searcher(space: Space, known: pd.DataFrame | None = None) -> AcrossScales:
    empty = pd.DataFrame(columns=[*space.searched, "n_params", "n_tokens", "loss"])
    prior_runs = empty if known is None else known
    return AcrossScales(space=space, seed=0, n_params=1000, n_tokens=8000, prior_runs=lambda: prior_runs)


def known_runs(best: float) -> pd.DataFrame:
    """A parabola in log rate at two smaller scales."""
    return pd.DataFrame(
        [
            {"learning_rate": rate, "n_params": n, "n_tokens": 8000, "loss": 3 + 0.05 * math.log2(rate / best) ** 2}
            for n in (250, 500)
            for rate in (0.002, 0.004, 0.008, 0.016, 0.032)
        ]
    )


def test_the_first_suggestion_is_where_smaller_scales_have_their_optimum() -> None:
    space = Space({"learning_rate": RATE})
    config = searcher(space, known_runs(0.006)).propose(0, Trials([]))
    assert abs(math.log2(cast(float, config["learning_rate"]) / 0.006)) < 0.3


def test_runs_outside_a_narrowed_space_are_ignored() -> None:
    wide = [
        Observation(config={"learning_rate": 0.01, "optimizer": "lion", "batch_tokens": 512}, loss=1.0),
        Observation(config={"learning_rate": 0.01, "optimizer": "adamw", "batch_tokens": 4096}, loss=1.0),
        Observation(config={"learning_rate": 0.2, "optimizer": "adamw", "batch_tokens": 512}, loss=3.0),
    ]
    narrow = Space(
        {"learning_rate": RATE, "optimizer": Fixed(value="adamw"), "batch_tokens": Ordinal(values=(256, 512, 1024))}
    )
    left = searcher(narrow).propose(3, Trials(wide))
    assert left == searcher(narrow).propose(3, Trials(wide[2:])), "lion's loss is not taken for adamw's"
    assert narrow.contains(left)
    choices = Space({"learning_rate": RATE, "optimizer": Choice(values=("adamw", "muon"))})
    known = [Observation(config={"learning_rate": 0.01, "optimizer": name}, loss=2.0) for name in ("lion", "adamw")]
    assert choices.contains(searcher(choices).propose(2, Trials(known)))


def test_what_is_expected_of_rate_and_batch_is_in_the_units_of_the_box() -> None:
    assert expected_drift(Space({"learning_rate": RATE})) == {"learning_rate": {"n_tokens": (-0.1, 0.2)}}
    sizes = Ordinal(values=(2**14, 2**16, 2**18))
    both = expected_drift(Space({"learning_rate": RATE, "batch_tokens": sizes}))
    assert both == {"batch_tokens": {"n_tokens": (0.24, 0.075)}}, "two octaves a rank; the rate is left open"
    assert expected_drift(Space({"dropout": Uniform(low=0.0, high=0.3)})) == {}


def test_a_longer_run_is_first_tried_at_a_lower_rate() -> None:
    """One length is known; the horizon law's prior says what four times its tokens do to the best rate."""
    known = known_runs(0.02).query("n_params == 500").assign(n_params=1000, n_tokens=2000)
    config = searcher(Space({"learning_rate": RATE}), known).propose(0, Trials([]))
    assert abs(math.log2(cast(float, config["learning_rate"]) / 0.02) + 0.2) < 0.15


def test_a_better_choice_that_no_prior_run_has_is_found() -> None:
    """Muon is 3 % better, all known runs are adamw's: it is among the first trials and the search ends within .5 % of its best."""
    space = Space(
        {
            "learning_rate": RATE,
            "init_scale": LogUniform(low=1 / 8, high=8),
            "optimizer": Choice(values=("adamw", "muon")),
        }
    )

    def excess(config: Config) -> float:
        rate, scale = (math.log2(cast(float, config[name])) for name in ("learning_rate", "init_scale"))
        best, worse = (-5.6, 0.0) if config["optimizer"] == "muon" else (-6.6, 0.03)
        return worse + 0.01 * (rate - best) ** 2 + 0.0033 * scale**2

    drawn = [space.draw(1, number) | {"optimizer": "adamw"} for number in range(16)]
    known = [
        {**c, "n_params": 250 + 250 * (i % 2), "n_tokens": 8000, "loss": 3.2 * math.exp(excess(c))}
        for i, c in enumerate(drawn)
    ]
    search, trials = searcher(space, pd.DataFrame(known)), Trials([])
    for number in range(8):
        config = search.propose(number, trials)
        trials.observations.append(Observation(config=config, loss=3 * math.exp(excess(config))))
    assert "muon" in [seen.config["optimizer"] for seen in trials.observations[:2]]
    assert min(excess(seen.config) for seen in trials.observations) < 0.005


def test_a_source_whose_optimum_lies_elsewhere_is_named() -> None:
    """Both studies are known at two smaller sizes; the other's best rate is four times as high."""
    other = known_runs(0.024).assign(source="../moe")
    together = pd.concat([known_runs(0.006).assign(source=""), other], ignore_index=True)
    search = searcher(Space({"learning_rate": RATE}), together)
    assert abs(math.log2(cast(float, search.propose(0, Trials([]))["learning_rate"]) / 0.006)) < 0.3
    (message,) = search.describe_disagreements(Trials([]))
    assert message.startswith("../moe has its optimum elsewhere")
    assert "learning_rate × 4" in message or "learning_rate × 3." in message
    assert searcher(Space({"learning_rate": RATE}), known_runs(0.006)).describe_disagreements(Trials([])) == []


@pytest.mark.parametrize("missing", [math.nan, None])
def test_known_runs_without_an_inactive_value_count(missing: float | None) -> None:
    """As a table has them; the better optimizer has no such value."""
    tau = LogUniform(low=0.05, high=5.0, when=Condition.from_dict({"optimizer": ["adamw"]}))
    space = Space({"optimizer": Choice(values=("adamw", "lion")), "learning_rate": RATE, "weight_decay_tau": tau})
    known = known_runs(0.006)
    rows = [
        {**row, "optimizer": name, "weight_decay_tau": value, "loss": row["loss"] + loss}
        for name, value, loss in (("adamw", 1.0, 0.5), ("lion", missing, 0.0))
        for row in known.to_dict("records")
    ]
    config = searcher(space, pd.DataFrame(rows)).propose(0, Trials([], space=space))
    assert config["optimizer"] == "lion"
    assert abs(math.log2(cast(float, config["learning_rate"]) / 0.006)) < 0.5


SIZES = Ordinal(values=tuple(2**k for k in range(10, 16)))
BETA2 = Ordinal(values=(0.9, 0.95, 0.98, 0.99, 0.995, 0.999))


def search_for(space: Space, excess: Callable[[Config], float], n_trials: int) -> list[Observation]:
    search, trials = searcher(space), Trials([], space=space)
    for number in range(n_trials):
        config = search.propose(number, trials)
        trials.observations.append(Observation(config=config, loss=3 * math.exp(excess(config))))
    return trials.observations


def test_a_grid_of_ordinals_is_not_tried_twice() -> None:
    """The best point of the surface rounds to the same configuration again and again; every trial would be the same run."""
    space = Space({"batch_tokens": SIZES, "beta2": BETA2})

    def excess(config: Config) -> float:
        batch, beta2 = (cast(float, config[name]) for name in ("batch_tokens", "beta2"))
        return 0.01 * ((math.log2(batch) - 13.6) ** 2 + (math.log2(1 - beta2) + 6) ** 2)

    seen = search_for(space, excess, 20)
    assert len({(s.config["batch_tokens"], s.config["beta2"]) for s in seen}) == 20
    best = min(excess({"batch_tokens": b, "beta2": x}) for b in SIZES.values for x in BETA2.values)
    assert min(excess(s.config) for s in seen) == pytest.approx(best)


def test_a_value_that_another_choice_excludes_does_not_keep_the_search() -> None:
    """beta1 matters to adamw alone, which is far better at its best beta1."""
    space = Space(
        {
            "optimizer": Choice(values=("adamw", "lion")),
            "learning_rate": RATE,
            "beta1": Uniform(low=0.0, high=1.0, when=Condition.from_dict({"optimizer": ["adamw"]})),
        }
    )

    def excess(config: Config) -> float:
        rate = 0.02 * math.log2(cast(float, config["learning_rate"]) / 0.01) ** 2
        return rate + (0.4 * (cast(float, config["beta1"]) - 0.9) ** 2 if config["optimizer"] == "adamw" else 0.5)

    seen = search_for(space, excess, 30)
    assert sum(s.config["optimizer"] == "lion" for s in seen[15:]) < 3
    assert min(excess(s.config) for s in seen) < 0.005


def test_an_optimum_on_the_border_of_a_constraint_is_found_there() -> None:
    """The best of the box is not allowed; the fall to a random draw would lose what is known."""
    space = Space(
        {"learning_rate": LogUniform(low=2e-3, high=6e-2), "embedding_rate": LogUniform(low=0.25, high=4.0)},
        {"product": Constraint(rule="product_at_most", names=("learning_rate", "embedding_rate"), bound=0.02)},
    )

    def excess(config: Config) -> float:
        rate, embedding = (cast(float, config[name]) for name in ("learning_rate", "embedding_rate"))
        return 0.01 * (math.log2(rate / 0.03) ** 2 + math.log2(embedding / 2) ** 2)

    seen = search_for(space, excess, 16)
    assert all(space.contains(s.config) for s in seen)
    border = min(
        excess({"learning_rate": rate, "embedding_rate": 0.02 / rate}) for rate in (2e-3 * 1.01**k for k in range(340))
    )
    assert min(excess(s.config) for s in seen) < border + 0.002


@pytest.mark.parametrize("prior", [None, Prior(centre=0.98, spread=1.0)])
@pytest.mark.parametrize("known", [False, True])
def test_no_configuration_is_tried_twice_from_the_first_trial_on(prior: Prior | None, known: bool) -> None:
    space = Space(
        {"beta2": Ordinal(values=BETA2.values, prior=prior), "optimizer": Choice(values=("adamw", "lion", "muon"))}
    )
    rows = [
        {
            "beta2": beta2,
            "optimizer": "adamw",
            "n_params": n,
            "n_tokens": 8000,
            "loss": 3.0 + cast(float, beta2) + n / 1e5,
        }
        for n in range(100, 400, 5)
        for beta2 in BETA2.values
    ]
    search, trials = searcher(space, pd.DataFrame(rows) if known else None), Trials([], space=space)
    for number in range(18):
        trials.observations.append(Observation(config=search.propose(number, trials), loss=3.0))
    assert len({tuple(seen.config.values()) for seen in trials.observations}) == 18


def test_choices_alone_are_not_tried_twice() -> None:
    space = Space({name: Choice(values=("a", "b", "c")) for name in ("first", "second")})
    search, trials = searcher(space), Trials([], space=space)
    for number in range(9):
        trials.observations.append(Observation(config=search.propose(number, trials), loss=3.0))
    assert len({tuple(seen.config.values()) for seen in trials.observations}) == 9
