"""What a form of the loss law is, and what the fitter needs to know of it.

A `Form` is a frozen value without fitted numbers: formula, parameters, bounds, source, and the loss for numbers given.
`Form.law(E=…, A=…)` is the form with numbers. A form of one's own is a small subclass:

    class Quadratic(Form):
        name, formula, source = "mine", "E + A/N^alpha", "my notes"
        parameters = {"E": (0.5, 4), "A": (1, 1e6), "alpha": (0.05, 2)}

        def loss(self, values, rows):
            return values["E"] + values["A"] * rows["n_params"] ** -values["alpha"]

It is fitted in the logarithms of its parameters, from many starts between their bounds, with exact derivatives: `loss` is
evaluated at complex numbers (Squire and Trapp 1998), so it is to be written in numpy's analytic functions. The forms
shipped here have starts and derivatives of their own, which are faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.checks import positive

if TYPE_CHECKING:
    from scaling.forms.law import Law

Values = Mapping[str, Any]
"""Numbers of the parameters by name, scalars or arrays that broadcast against the columns."""
N_SCREENED, N_STARTS = 512, 8
_STEP = 1e-5  # of the central differences of exact first derivatives, in log coordinates of order one
_COMPLEX_STEP = 1e-30


class Form(ABC):
    """A law's formula.

    Attributes:
        name: by which a saved fit names it.
        formula: as one would write it.
        source: paper and section.
        parameters: lowest and highest value of each, both above 0, by name.
        columns: of a run, which the loss depends on.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    source: ClassVar[str]
    parameters: ClassVar[Mapping[str, tuple[float, float]]]
    columns: ClassVar[tuple[str, ...]] = ("n_params", "n_tokens")

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a form of one's own that lacks what a fit needs, where it is written.

        Raises:
            TypeError: name, formula or parameters are missing.
            ValueError: a bound is not finite and above 0, or is not below the other.
        """
        super().__init_subclass__(**options)
        if missing := [name for name in ("name", "formula", "parameters") if not hasattr(cls, name)]:
            raise TypeError(f"form {cls.__name__} must have name, formula and parameters: {', '.join(missing)} missing")
        # A form with fields may have them tell its parameters.
        for name, (low, high) in cls.parameters.items() if isinstance(cls.parameters, Mapping) else ():
            positive(f"bounds of {name} in form {cls.__name__}", [low, high])
            if not low < high:
                raise ValueError(f"bounds of {name} in form {cls.__name__} must rise, got ({low!r}, {high!r})")

    @abstractmethod
    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        """Expected loss, of the broadcast shape of the values and the columns."""

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """The form bound to K runs, as it is fitted.

        Args:
            rows: its columns, [K] each.
            log_loss: of the runs, [K].
        """
        return LogParameters.of(self, rows)

    def powers(self, values: Values) -> tuple[Any, Any, Any, Any] | None:
        """(a, p, b, q) if the loss grows with a·N^−p + b·D^−q and depends on nothing else: it is least where that is."""
        return None

    def columns_of(self, rows: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """The form's columns in float64.

        Raises:
            ValueError: a column is missing, is none of the form's, or holds a value that is not finite and above 0.
        """
        wanted, depends = {*self.columns}, f"{self.name} depends on {', '.join(self.columns)}"
        if missing := wanted - rows.keys():
            raise ValueError(f"{depends}: {', '.join(sorted(missing))} missing")
        if unknown := rows.keys() - wanted - {"n_params", "n_tokens"}:
            raise ValueError(f"{depends}, got {', '.join(sorted(unknown))} too")
        columns = {name: positive(name, column) for name, column in rows.items()}
        return {name: columns[name] for name in self.columns}

    def stacked(self, parameters: Array) -> dict[str, Array]:
        """J parameter vectors, [J, n] in the form's order, as columns [J, 1] by name."""
        return dict(zip(self.parameters, parameters.T[:, :, None], strict=True))

    def law(self, **values: float) -> Law:
        """The form with numbers.

        Raises:
            ValueError: a parameter is missing, unknown, not finite or negative.
        """
        from scaling.forms.law import Law

        return Law(form=self, parameters=values)

    def __eq__(self, other: object) -> bool:
        """Forms are values: one class, one form, unless it has fields."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Of its class and name."""
        return hash((type(self), self.name))


class Problem(ABC):
    """A form at K points in the coordinates theta [P] in which it is fitted, for a batch of J parameter vectors at once."""

    lower: Array
    upper: Array

    @abstractmethod
    def log_loss(self, theta: Array) -> Array:
        """Log loss [J, K] for theta [J, P]."""

    @abstractmethod
    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Log loss [J, K] and its Jacobian [J, K, P]."""

    @abstractmethod
    def starts(self, log_loss: Array) -> Array:
        """Where the fit may begin, [S, P], the best of which are polished."""

    @abstractmethod
    def natural(self, theta: Array) -> Array:
        """The form's parameters, in their order, [J, n], from theta [J, P]."""

    @abstractmethod
    def part(self, rows: NDArray[np.int64]) -> Problem:
        """The same coordinates at some of the points."""

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        """Σ_k weights_k · ∂²(log L_k)/∂theta², [J, P, P], for weights [J, K]; here by differences of exact gradients."""
        hessian = np.empty((len(theta), theta.shape[1], theta.shape[1]))
        for i in range(theta.shape[1]):
            shift = np.zeros(theta.shape[1])
            shift[i] = _STEP
            change = self.linearise(theta + shift)[1] - self.linearise(theta - shift)[1]
            hessian[:, i] = (np.swapaxes(change, 1, 2) @ weights[..., None])[..., 0] / (2 * _STEP)
        return np.asarray((hessian + np.swapaxes(hessian, 1, 2)) / 2)


@dataclass(frozen=True, kw_only=True)
class LogParameters(Problem):
    """Any form in the logarithms of its parameters; derivatives by complex steps, exact to rounding.

    Attributes:
        form: the form.
        rows: its columns, [K] each.
        lower, upper: logarithms of the bounds, [P].
    """

    form: Form
    rows: Mapping[str, Array]
    lower: Array
    upper: Array

    @classmethod
    def of(cls, form: Form, rows: Mapping[str, Array]) -> LogParameters:
        """The problem of a form at K points."""
        lower, upper = np.log(np.array(list(form.parameters.values()), np.float64)).T
        return cls(form=form, rows=rows, lower=lower, upper=upper)

    def log_loss(self, theta: Array) -> Array:
        """Log loss [J, K] for theta [J, P]; infinite, far from every loss, where the form's own is not above 0."""
        loss = self._loss(theta)
        return np.asarray(np.log(loss, out=np.full(loss.shape, np.inf), where=loss > 0))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Log loss [J, K] and its Jacobian [J, K, P]."""
        value = self.log_loss(theta)
        jacobian = np.empty((*value.shape, theta.shape[1]))
        for i in range(theta.shape[1]):
            moved = theta.astype(np.complex128)
            moved[:, i] += 1j * _COMPLEX_STEP
            loss = self._loss(moved)
            slope = np.divide(loss.imag, loss.real, out=np.zeros(value.shape), where=np.isfinite(value))
            jacobian[..., i] = slope / _COMPLEX_STEP
        return value, jacobian

    def starts(self, log_loss: Array) -> Array:
        """Points of a Sobol sequence between the bounds, [N_SCREENED, P]."""
        from scipy.stats.qmc import Sobol

        cube = Sobol(len(self.lower), rng=0).random(N_SCREENED)
        return np.asarray(self.lower + (self.upper - self.lower) * cube)

    def part(self, rows: NDArray[np.int64]) -> Problem:
        """The same coordinates at some of the points."""
        return replace(self, rows={name: column[rows] for name, column in self.rows.items()})

    def natural(self, theta: Array) -> Array:
        """The parameters, [J, P]."""
        return np.asarray(np.exp(theta))

    def _loss(self, theta: NDArray[Any]) -> NDArray[Any]:
        values = dict(zip(self.form.parameters, np.exp(theta).T[:, :, None], strict=True))
        return np.asarray(self.form.loss(values, self.rows))


@dataclass(frozen=True, kw_only=True)
class Restricted(Problem):
    """A problem on an affine subspace of another's coordinates, theta = offset + basis · own: tied or fixed parameters.

    Attributes:
        whole: the other problem, with P coordinates.
        basis: [P, p].
        offset: [P].
        lower, upper: bounds of the own coordinates, [p].
        kept: indices of the whole problem's natural parameters that are this form's.
    """

    whole: Problem
    basis: Array
    offset: Array
    lower: Array
    upper: Array
    kept: tuple[int, ...]

    def log_loss(self, theta: Array) -> Array:
        """Log loss [J, K] for theta [J, p]."""
        return self.whole.log_loss(self._whole(theta))

    def linearise(self, theta: Array) -> tuple[Array, Array]:
        """Log loss [J, K] and its Jacobian [J, K, p]."""
        value, jacobian = self.whole.linearise(self._whole(theta))
        return value, jacobian @ self.basis

    def curvature(self, theta: Array, jacobian: Array, weights: Array) -> Array:
        """Σ_k weights_k · ∂²(log L_k)/∂theta², [J, p, p]."""
        whole = self._whole(theta)
        hessian = self.whole.curvature(whole, self.whole.linearise(whole)[1], weights)
        return np.asarray(self.basis.T @ hessian @ self.basis)

    def starts(self, log_loss: Array) -> Array:
        """The whole problem's, brought onto the subspace by least squares."""
        own = (self.whole.starts(log_loss) - self.offset) @ np.linalg.pinv(self.basis).T
        return np.asarray(np.clip(own, self.lower, self.upper))

    def part(self, rows: NDArray[np.int64]) -> Problem:
        """The same coordinates at some of the points."""
        return replace(self, whole=self.whole.part(rows))

    def natural(self, theta: Array) -> Array:
        """The form's parameters, [J, n]."""
        return self.whole.natural(self._whole(theta))[:, self.kept]

    def _whole(self, theta: Array) -> Array:
        return np.asarray(self.offset + theta @ self.basis.T)
