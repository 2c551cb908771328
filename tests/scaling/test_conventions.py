"""What N counts and what the loss is in: every result says it, and keeps it through JSON."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scaling import (
    Backtest,
    Chinchilla,
    ComputePowers,
    Forecast,
    Law,
    NextRuns,
    Profile,
    ScalingFit,
    backtest,
    decide,
    fit,
    fit_envelope,
    fit_isoflops,
    fit_two_step,
    ladder_design,
    next_runs,
    simulate,
)

COUNTS = "all but the embeddings"
UNIT = "bits per byte"
STATED: dict[str, Any] = {"n_params_convention": COUNTS, "loss_unit": UNIT}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """One of each kind, of a ladder of five budgets with six sizes each."""
    law = Law(form=Chinchilla(), parameters={"E": 1.8, "A": 400.0, "B": 2000.0, "alpha": 0.34, "beta": 0.37}, **STATED)
    flops = np.repeat(np.geomspace(1e18, 1e20, 5), 6)
    sizes = np.concatenate([law.allocate(c).n_params * 2.0 ** np.arange(-2.5, 3) for c in flops[::6]])
    runs = pd.DataFrame({"n_params": sizes, "n_tokens": flops / 6 / sizes})
    runs["loss"] = law.loss(runs["n_params"], runs["n_tokens"]) * np.exp(
        0.002 * np.random.default_rng(0).standard_normal(30)
    )
    curves = pd.concat([runs.assign(run=runs.index, n_tokens=part * runs["n_tokens"]) for part in (0.1, 0.3, 1.0)])
    curves["loss"] = law.loss(curves["n_params"], curves["n_tokens"])
    tasks = runs.rename(columns={"loss": "task_loss"}).assign(accuracy=lambda t: 1 / (1 + np.exp(t["task_loss"] - 3)))
    fitted = fit(runs, n_bootstrap=10, **STATED)
    two_step = fit_two_step(tasks, n_bootstrap=10, **STATED)
    return {
        "law": law,
        "allocation": law.allocate(1e21),
        "fit": fitted,
        "variant": next(iter(fitted.ensemble.variants.values())),
        "forecast": fitted.forecast(2e9, 4e10),
        "decision": decide(fitted, 1e21),
        "decision of a law": decide(law, 1e21),
        "next runs": next_runs(fitted, 2e9, 4e10, affordable_flops=2e20, n_runs=2),
        "backtest": backtest(runs, cuts=[4], forms=[Chinchilla()], **STATED),
        "isoflops": fit_isoflops(runs, n_bootstrap=10, **STATED),
        "envelope": fit_envelope(curves, n_bootstrap=10, **STATED),
        "profile": fitted.profile("loss", at={"n_params": 2e9, "n_tokens": 4e10}),
        "two steps": two_step,
        "task forecast": two_step.forecast(2e9, 4e10),
        "simulation": simulate(
            ladder_design([1e7, 3e7, 1e8], [10, 20, 40]), law, n_params=1e9, n_tokens=2e10, n_trials=2
        ),
    }


def test_every_result_states_what_n_counts(results: dict[str, Any]) -> None:
    assert [name for name, result in results.items() if COUNTS not in str(result)] == []


def test_every_result_with_losses_states_their_unit(results: dict[str, Any]) -> None:
    texts = {name: str(result) for name, result in results.items() if name not in ("isoflops", "envelope")}
    assert [name for name, text in texts.items() if UNIT not in text or "nats" in text] == []
    assert results["isoflops"].loss_unit == results["envelope"].loss_unit == UNIT


def test_every_figure_with_losses_states_their_unit(results: dict[str, Any]) -> None:
    fitted, target = results["fit"], results["forecast"]
    figures = {
        "fit": fitted.plot(),
        "frontier": fitted.plot_frontier(target),
        "contours": fitted.plot_contours(target),
        "sizes": fitted.plot_sizes([1e19, 1e20]),
        "parameters": fitted.plot_parameters(),
        "variants": fitted.plot_variants(target),
        "isoflops": results["isoflops"].plot(),
        "envelope": results["envelope"].plot(),
        "profile": results["profile"].plot(),
    }
    texts = {name: figure.to_json() for name, figure in figures.items()}
    assert [name for name, text in texts.items() if UNIT not in text or "nats" in text] == []


def test_every_dictionary_keeps_both(results: dict[str, Any]) -> None:
    dicts = {name: result.to_dict() for name, result in results.items() if hasattr(result, "to_dict")}
    assert len(dicts) >= 11
    dumped = {name: json.dumps(data, allow_nan=False) for name, data in dicts.items()}
    assert [name for name, text in dumped.items() if COUNTS not in text or UNIT not in text] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fit", ScalingFit),
        ("forecast", Forecast),
        ("next runs", NextRuns),
        ("backtest", Backtest),
        ("isoflops", ComputePowers),
        ("envelope", ComputePowers),
        ("profile", Profile),
    ],
)
def test_round_trip(results: dict[str, Any], name: str, kind: Any) -> None:
    result = results[name]
    restored = kind.from_dict(json.loads(json.dumps(result.to_dict())))
    assert restored.to_dict() == result.to_dict()
    assert str(restored) == str(result)


def test_a_law_by_hand_does_not_pretend() -> None:
    law = Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37)
    for stated in (law, law.allocate(1e21), decide(law, 1e21)):
        assert "convention of N not given" in str(stated)


@pytest.mark.parametrize("verb", [fit, backtest, fit_isoflops, fit_envelope])
def test_a_convention_must_be_stated(verb: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="n_params_convention .*got"):
        verb(pd.DataFrame(), n_params_convention=" ")
