"""Every form: derivatives against differences, planted numbers recovered, its best allocation, and a form of one's own."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize_scalar

from scaling import Chinchilla, Form, Joint, Kaplan, Law, ScalingError, TiedChinchilla, decide, fit
from scaling.arrays import Array
from scaling.fits.ensemble import MeanOf, mean_of
from scaling.forms import FORMS
from scaling.forms.powers import GRID
from scaling.forms.problem import Problem

Ladder = Callable[..., pd.DataFrame]


class Own(Form):
    """A form that a user might write: two powers and a product term."""

    name, formula, source = "own", "E + A/N^alpha + B/D^alpha + F/(N·D)^alpha", "this test"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        "E": (0.1, 5),
        "A": (1, 1e5),
        "B": (1, 1e5),
        "F": (1, 1e8),
        "alpha": (0.05, 1.5),
    }

    def loss(self, values: Mapping[str, Any], rows: Mapping[str, Any]) -> Any:
        n, d, alpha = rows["n_params"], rows["n_tokens"], values["alpha"]
        return values["E"] + values["A"] * n**-alpha + values["B"] * d**-alpha + values["F"] * (n * d) ** -alpha


PLANTED = [
    Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=0.34, beta=0.37),
    TiedChinchilla().law(E=1.6, A=300.0, B=1500.0, alpha=0.36),
    Joint().law(E=1.5, A=200.0, B=900.0, alpha=0.33, beta=0.35, g=0.6),
    Kaplan().law(A=1.5e13**0.076, B=1.8e13**0.095, alpha=0.076, beta=0.095),
    Own().law(E=1.7, A=300.0, B=1200.0, F=3e5, alpha=0.35),
]
by_form = pytest.mark.parametrize("law", PLANTED, ids=lambda law: law.form.name)


def runs_of(law: Law, ladder: Ladder, noise: float = 0.0) -> pd.DataFrame:
    runs = ladder()
    error = noise * np.random.default_rng(0).standard_normal(len(runs))
    return runs.assign(loss=law.loss(runs["n_params"], runs["n_tokens"]) * np.exp(error))


def problem_of(law: Law, ladder: Ladder) -> tuple[Problem, Array]:
    runs = runs_of(law, ladder, noise=0.01)
    log_loss = np.log(runs["loss"].to_numpy())
    problem = law.form.problem({name: runs[name].to_numpy() for name in law.form.columns}, log_loss)
    return problem, problem.starts(log_loss)[[7, 100]] * 0.9


def differences(function: Callable[[Array], Array], theta: Array, step: float = 1e-5) -> Array:
    """Central differences of a batched function in each parameter, on a new last axis."""
    shifts = step * np.eye(theta.shape[1])
    return np.stack([(function(theta + s) - function(theta - s)) / (2 * step) for s in shifts], axis=-1)


def test_every_form_of_the_library_is_planted() -> None:
    assert {law.form.name for law in PLANTED} == {*FORMS, "own"}


@by_form
def test_jacobian_and_curvature(law: Law, ladder: Ladder) -> None:
    problem, theta = problem_of(law, ladder)
    predicted, jacobian = problem.linearise(theta)
    np.testing.assert_allclose(predicted, problem.log_loss(theta), rtol=1e-13)
    np.testing.assert_allclose(jacobian, differences(problem.log_loss, theta), atol=1e-8)
    weights = np.random.default_rng(0).standard_normal(predicted.shape)
    gradient = differences(lambda t: np.einsum("jk,jkp->jp", weights, problem.linearise(t)[1]), theta)
    np.testing.assert_allclose(problem.curvature(theta, jacobian, weights), gradient, atol=1e-6, rtol=1e-5)


@by_form
def test_coordinates_and_parameters_say_the_same(law: Law, ladder: Ladder) -> None:
    problem, theta = problem_of(law, ladder)
    runs = ladder()
    values = dict(zip(law.form.parameters, problem.natural(theta).T[:, :, None], strict=True))
    rows = {name: runs[name].to_numpy() for name in law.form.columns}
    np.testing.assert_allclose(np.log(law.form.loss(values, rows)), problem.log_loss(theta), rtol=1e-10)


@by_form
def test_planted_numbers_are_recovered(law: Law, ladder: Ladder) -> None:
    result = fit(runs_of(law, ladder), n_params_convention="total", form=law.form, n_bootstrap=2)
    assert result.objective < 1e-18
    np.testing.assert_allclose([*result.law.parameters.values()], [*law.parameters.values()], rtol=1e-3)
    assert result.law.form == law.form


@by_form
@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_among_the_runs_the_law_lies_closer_than_their_noise(law: Law, ladder: Ladder, noise: float) -> None:
    result = fit(runs_of(law, ladder, noise), n_params_convention="total", form=law.form, n_bootstrap=2)
    off = np.log(result.predict(1e8, 2e9) / law.loss(1e8, 2e9))
    assert abs(off) < noise


@by_form
@pytest.mark.parametrize("budget", [1e18, 1e24])
def test_allocation_is_the_minimum_found_numerically(law: Law, budget: float) -> None:
    best = minimize_scalar(
        lambda log_n: float(law.loss(np.exp(log_n), budget / 6 / np.exp(log_n))),
        bounds=(5, 45),
        options={"xatol": 1e-10},
    )
    allocation = law.allocate(budget)
    assert allocation.loss == pytest.approx(best.fun, rel=1e-10)
    assert allocation.n_params == pytest.approx(np.exp(best.x), rel=1e-3)
    assert decide(law, loss=allocation.loss).total_flops == pytest.approx(budget, rel=1e-6)


@pytest.mark.parametrize("law", [PLANTED[0], PLANTED[2]], ids=["chinchilla", "joint"])
def test_a_fit_seeks_its_terms_about_the_losses_of_the_runs(law: Law, ladder: Ladder) -> None:
    """E from a thousandth of the least to e^.1 above it, terms from e^-12 of it to e^3 of the greatest, exponents from .01 to 3."""
    runs = runs_of(law, ladder)
    log_loss = np.log(runs["loss"].to_numpy())
    problem = law.form.problem({name: runs[name].to_numpy() for name in law.form.columns}, log_loss)
    least, greatest = runs["loss"].min(), runs["loss"].max()
    lower = [least / 1e3, *2 * [least * math.exp(-12)], 0.01, 0.01, 0.2]
    upper = [least * math.exp(0.1), *2 * [greatest * math.exp(3)], 3.0, 3.0, 5.0]
    for bound, expected in ((problem.lower, lower), (problem.upper, upper)):
        found = np.exp(bound)
        if law.form == Chinchilla():  # its exponents are no logarithms
            found[3:] = bound[3:]
        np.testing.assert_allclose(found, expected[: len(found)])


def test_where_the_exponents_are_on_the_grid_a_search_begins_at_the_planted_law(ladder: Ladder) -> None:
    """E, A and B are then what relative least squares makes of them, whose residuals are nothing."""
    runs = runs_of(Chinchilla().law(E=1.8, A=400.0, B=2000.0, alpha=GRID[12], beta=GRID[13]), ladder)
    log_loss = np.log(runs["loss"].to_numpy())
    problem = Chinchilla().problem({name: runs[name].to_numpy() for name in Chinchilla.columns}, log_loss)
    off = np.abs(problem.log_loss(problem.starts(log_loss)) - log_loss).max(axis=1)
    assert off.min() < 1e-6
    assert np.sort(off)[1] > 1e-4  # none of the other 575 does


def test_the_mean_of_laws_has_the_mean_of_their_log_losses() -> None:
    laws = [Chinchilla().law(E=e, A=400.0, B=2000.0, alpha=0.34, beta=0.37) for e in (1.0, 1.2, 3.0)]
    each = [float(law.loss(1e9, 2e10)) for law in laws]
    assert float(mean_of(laws).loss(1e9, 2e10)) == pytest.approx(math.prod(each) ** (1 / 3), rel=1e-12)


def test_forms_with_fields_are_one_where_their_fields_agree() -> None:
    assert MeanOf(Joint(), 2) == MeanOf(Joint(), 2)
    assert MeanOf(Joint(), 2) != MeanOf(Joint(), 3)
    assert MeanOf(Joint(), 2) != MeanOf(Chinchilla(), 2)
    assert Joint() != Chinchilla()


@pytest.mark.parametrize("column", ["n_params", "n_tokens"])
def test_a_form_of_one_column_leaves_the_other_of_the_two_aside(column: str) -> None:
    form = type("Single", (Own,), {"columns": (column,)})()
    given = {"n_params": [1e8], "n_tokens": [2e9]}
    assert form.columns_of(given).keys() == {column}
    with pytest.raises(ValueError, match=f"own depends on {column}, got width too"):
        form.columns_of({**given, "width": [64]})


def test_the_search_for_a_form_of_ones_own_begins_everywhere_between_its_bounds(ladder: Ladder) -> None:
    law = PLANTED[-1]
    runs = runs_of(law, ladder)
    problem = law.form.problem({name: runs[name].to_numpy() for name in law.form.columns}, np.log(runs["loss"]))
    share = (problem.starts(np.log(runs["loss"].to_numpy())) - problem.lower) / (problem.upper - problem.lower)
    for ends, reached in (([0.0, 1.0], (share.min(), share.max())), ([0.5], [share.mean()])):
        assert [*reached] == pytest.approx(ends, abs=0.01)
    assert (np.ptp(share, axis=0) > 0.98).all()
    np.testing.assert_allclose(np.exp([problem.lower, problem.upper]).T, [*law.form.parameters.values()])


def test_a_saved_form_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Form.own, "own", Own)
    saved = PLANTED[-1].to_dict()
    assert Law.from_dict(saved) == PLANTED[-1]
    with pytest.raises(ValueError, match="got 'other'"):
        Law.from_dict(saved | {"form": "other"})


def test_a_law_wants_exactly_its_parameters() -> None:
    with pytest.raises(ValueError, match="tied has the parameters E, A, B, alpha, got E, A"):
        TiedChinchilla().law(E=1.0, A=2.0)


def test_terms_of_a_joint_form_with_a_small_shape_are_those_of_the_larger_one() -> None:
    law = Joint().law(E=1.5, A=2e6, B=900.0, alpha=0.6, beta=0.35, g=0.01)  # A^(1/g) is beyond float64
    assert law.loss(1e9, 1e11) == pytest.approx(1.5 + max(2e6 / 1e9**0.6, 900.0 / 1e11**0.35), rel=0.01)


def test_the_joint_form_is_chinchillas_at_one() -> None:
    numbers = {"E": 1.8, "A": 400.0, "B": 2000.0, "alpha": 0.34, "beta": 0.37}
    one, sum_of_powers = Joint().law(**numbers, g=1.0), Chinchilla().law(**numbers)
    assert one.loss(1e9, 2e10) == pytest.approx(float(sum_of_powers.loss(1e9, 2e10)), rel=1e-12)
    assert one.allocate(1e21).n_params == pytest.approx(sum_of_powers.allocate(1e21).n_params, rel=1e-12)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, 4), "bounds of E in form Wrong .*got 0"),
        ((1, np.inf), "bounds of E in form Wrong .*got inf"),
        ((4, 0.5), r"bounds of E in form Wrong .*got \(4, 0\.5\)"),
    ],
)
def test_bounds_of_a_form_of_ones_own_are_held_to_their_rule(bounds: tuple[float, float], message: str) -> None:
    """They are logarithms in a fit, which answered "E must be ... got nan"."""
    with pytest.raises(ValueError, match=message):
        type("Wrong", (Own,), {"parameters": {**Own.parameters, "E": bounds}})


def test_a_custom_form_describes_itself() -> None:
    with pytest.raises(TypeError, match="form Half .*formula missing"):
        type("Half", (Form,), {"name": "half", "parameters": Own.parameters, "loss": Own.loss})


class Falling(Own):
    """A form that is no loss in most of the room between its bounds."""

    name = "falling"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {
        name: Own.parameters[name] for name in ("E", "A", "alpha")
    }

    def loss(self, values: Mapping[str, Any], rows: Mapping[str, Any]) -> Any:
        return values["E"] - values["A"] * rows["n_params"] ** -values["alpha"]


class Negative(Own):
    """A form that is none anywhere."""

    name = "negative"

    def loss(self, values: Mapping[str, Any], rows: Mapping[str, Any]) -> Any:
        return -super().loss(values, rows)


@pytest.mark.parametrize("method", ["newton", "multistart"])
def test_where_a_form_is_no_loss_a_fit_does_not_go(ladder: Ladder, method: str) -> None:
    law = Falling().law(E=3.0, A=50.0, alpha=0.3)
    result = fit(
        runs_of(law, ladder),
        n_params_convention="total",
        form=Falling(),
        method=method,  # type: ignore[arg-type]
        n_bootstrap=2,
    )
    assert [*result.law.parameters.values()] == pytest.approx([3.0, 50.0, 0.3], rel=1e-3)
    with pytest.raises(ScalingError, match="loss above 0 .*got none"):
        fit(
            runs_of(law, ladder),
            n_params_convention="total",
            form=Negative(),
            method=method,  # type: ignore[arg-type]
        )
