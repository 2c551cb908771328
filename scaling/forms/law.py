"""Forms of the loss law, the laws that they become with numbers, and the best way to spend compute under a law.

A `Form` is a frozen value without fitted numbers: formula, parameters, bounds, source, and the loss for given numbers.
`Form.law(E=…, A=…)` is the form with numbers. A custom form is a small subclass:

    class Quadratic(Form):
        name, formula, source = "mine", "E + A/N^alpha", "my notes"
        parameters = {"E": (0.5, 4), "A": (1, 1e6), "alpha": (0.05, 2)}

        def loss(self, values, rows):
            return values["E"] + values["A"] * rows["n_params"] ** -values["alpha"]

A custom form is fitted in the logarithms of its parameters, from many starts between their bounds, with exact derivatives:
`loss` is evaluated at complex numbers (Squire and Trapp 1998), so write it with numpy's analytic functions. The library's
forms implement starts and derivatives themselves, which is faster.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.checks import positive
from scaling.errors import ScalingError
from scaling.forms.problem import LogParameters, Problem, Values
from scaling.presentation import Result, counted
from scaling.serialization import JsonResult

NATS = "nats per token"
"""Default unit of losses."""
FLOPS_PER_PARAM_TOKEN = 6.0
"""C = 6·N·D: two FLOPs per parameter and token forward, four backward (Kaplan et al. 2001.08361, sec. 2.1)."""
N_SHARE = (0.05, 0.95)
"""Range of log N in which the best size is sought if there is no formula, as shares of log(C/6)."""


def compute_flops(n_params: ArrayLike, n_tokens: ArrayLike) -> NDArray[np.float64]:
    """Training compute C = 6·N·D in FLOPs, always in float64: int64 would wrap above 9.2e18.

    Args:
        n_params: parameters N, any shape.
        n_tokens: training tokens D, broadcast against `n_params`.

    Returns:
        FLOPs, of the broadcast shape (a numpy scalar for two scalars).
    """
    n_params, n_tokens = np.asarray(n_params, np.float64), np.asarray(n_tokens, np.float64)
    return np.asarray(FLOPS_PER_PARAM_TOKEN * n_params * n_tokens, np.float64)[()]


class Form(ABC):
    """A law's formula.

    Attributes:
        source: paper and section.
        parameters: lowest and highest value of each parameter, both above 0, by name.
        columns: columns of a run that the loss depends on.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    source: ClassVar[str]
    parameters: ClassVar[Mapping[str, tuple[float, float]]]
    columns: ClassVar[tuple[str, ...]] = ("n_params", "n_tokens")
    own: ClassVar[dict[str, type[Form]]] = {}
    """All defined forms by name, custom forms included; saved laws are read with these."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse, at its definition, a custom form that lacks what a fit needs.

        Raises:
            TypeError: name, formula or parameters are missing.
            ValueError: a bound is not finite and above 0, or is not below the other.
        """
        super().__init_subclass__(**options)
        if missing := [name for name in ("name", "formula", "parameters") if not hasattr(cls, name)]:
            raise TypeError(f"form {cls.__name__} must have name, formula and parameters: {', '.join(missing)} missing")
        # A form with fields may derive its parameters from them.
        for name, (low, high) in cls.parameters.items() if isinstance(cls.parameters, Mapping) else ():
            positive(f"bounds of {name} in form {cls.__name__}", [low, high])
            if not low < high:
                raise ValueError(f"bounds of {name} in form {cls.__name__} must rise, got ({low!r}, {high!r})")
        if isinstance(cls.name, str):
            Form.own[cls.name] = cls

    @property
    def tokens_only(self) -> bool:
        """True if the loss does not depend on N: a law for runs of one size, which says nothing of other sizes."""
        return "n_params" not in self.columns

    @property
    def run_columns(self) -> tuple[str, ...]:
        """N, D and the form's further columns: what a law's `loss` is given, and what a run states."""
        return (*dict.fromkeys(("n_params", "n_tokens", *self.columns)),)

    @abstractmethod
    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        """Expected loss, of the broadcast shape of the values and the columns."""

    def problem(self, rows: Mapping[str, Array], log_loss: Array) -> Problem:
        """The form bound to K runs, ready to be fitted.

        Args:
            rows: the form's columns, [K] each.
            log_loss: log loss of the runs, [K].
        """
        lower, upper = np.log(np.array(list(self.parameters.values()), np.float64)).T
        return LogParameters(loss=self.loss, names=(*self.parameters,), rows=rows, lower=lower, upper=upper)

    def powers(self, values: Values) -> tuple[Any, Any, Any, Any] | None:
        """(a, p, b, q) if the loss is an increasing function of a·N^−p + b·D^−q alone, and so least where this sum is; else None."""
        return None

    def columns_of(self, rows: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """The form's columns in float64; raises ValueError if one is missing or unknown, or a value is not finite and above 0."""
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
        return Law(form=self, parameters=values)

    def __eq__(self, other: object) -> bool:
        """Forms are values: two of one class with equal fields are equal."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.name))


def params_exponent(form: Form, values: Values) -> Any:
    """Exponent a of the optimum N ∝ C^a, q / (p + q) for terms N^−p and D^−q; None if the optimum is no power of C."""
    powers = form.powers(values)
    return powers[3] / (powers[1] + powers[3]) if powers else None


@dataclass(frozen=True, kw_only=True)
class Allocation(Result):
    """Best parameters and tokens for one compute budget, and the loss that they reach.

    Attributes:
        loss: expected loss at (N, D).
        n_params_convention, loss_unit: what N counts, and the unit of the loss, as in the law.
    """

    n_params: float
    n_tokens: float
    loss: float
    compute_flops: float
    n_params_convention: str = ""
    loss_unit: str = NATS

    @property
    def tokens_per_param(self) -> float:
        """D / N."""
        return self.n_tokens / self.n_params

    def __str__(self) -> str:
        return (
            f"{self.compute_flops:.3g} FLOPs: {self.n_params:.4g} parameters ({counted(self.n_params_convention)}), "
            f"{self.n_tokens:.4g} tokens ({self.tokens_per_param:.3g} per parameter), loss {self.loss:.4f} {self.loss_unit}"
        )


@dataclass(frozen=True, kw_only=True)
class Law(JsonResult):
    """A form with numbers, e.g. `Chinchilla().law(E=1.8, A=400, B=2000, alpha=.34, beta=.37)`.

    Attributes:
        n_params_convention: what N counts, e.g. "total" or "without embeddings"; empty if it is not stated.

    Raises:
        ValueError: a parameter is missing or unknown, negative or not finite, or (E excepted) zero.
    """

    form: Form
    parameters: Mapping[str, float]
    n_params_convention: str = ""
    loss_unit: str = NATS

    def __post_init__(self) -> None:
        if set(self.parameters) != set(self.form.parameters):
            raise ValueError(
                f"{self.form.name} has the parameters {', '.join(self.form.parameters)}, got {', '.join(self.parameters)}"
            )
        for name, value in self.parameters.items():
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "E"):
                rule = "at least 0" if name == "E" else "above 0"
                raise ValueError(f"{name} must be finite and {rule}, got {value!r}")

    def __getitem__(self, name: str) -> float:
        return self.parameters[name]

    def loss(self, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> NDArray[np.float64]:
        """Expected loss, in `loss_unit`, of the broadcast shape of the columns: N, D, and the form's further columns.

        Raises:
            ValueError: a value is not finite and above 0, or a column is missing or unknown to the form.
        """
        rows = self.form.columns_of({"n_params": n_params, "n_tokens": n_tokens, **columns})
        return np.asarray(self.form.loss(self.parameters, rows))[()]

    @property
    def params_exponent(self) -> float | None:
        """Exponent a of the optimum N ∝ C^a; None if the optimum is no power of C."""
        exponent: float | None = params_exponent(self.form, self.parameters)
        return exponent

    @property
    def tokens_exponent(self) -> float | None:
        """Exponent b of the optimum D ∝ C^b, 1 − a."""
        return None if (exponent := self.params_exponent) is None else 1 - exponent

    def allocate(self, compute_flops: float, **columns: float) -> Allocation:
        """The parameters and tokens of least loss under C = 6·N·D.

        For terms a·N^−p and b·D^−q: N = G (C/6)^(q/(p+q)), D = (C/6) / N, G = (p·a / (q·b))^(1/(p+q)) (Hoffmann et al.
        2203.15556, eq. 4). For other forms the optimum is found numerically.

        Raises:
            ValueError: the budget is not finite and positive.
            ScalingError: the law depends on tokens only.
        """
        if self.form.tokens_only:
            raise ScalingError(
                f"{self.form.name}: a law of tokens only has no best size, as it says nothing of other sizes"
            )
        product = float(positive("compute_flops", compute_flops)) / FLOPS_PER_PARAM_TOKEN
        if powers := self.form.powers(self.parameters):
            a, p, b, q = powers
            log_n = (math.log(p / q) + math.log(a) - math.log(b) + q * math.log(product)) / (p + q)
        else:
            from scipy.optimize import minimize_scalar

            bounds = tuple(share * math.log(product) for share in N_SHARE)
            log_n = minimize_scalar(
                lambda log_n: float(self.loss(math.exp(log_n), product * math.exp(-log_n), **columns)),
                bounds=bounds,
                method="bounded",
                options={"xatol": 1e-8},
            ).x
        n_params = math.exp(log_n)
        n_tokens = product / n_params
        loss = float(self.loss(n_params, n_tokens, **columns))
        return Allocation(
            n_params=n_params,
            n_tokens=n_tokens,
            loss=loss,
            compute_flops=float(compute_flops),
            n_params_convention=self.n_params_convention,
            loss_unit=self.loss_unit,
        )

    def frontier(self, compute_flops: Iterable[float], **columns: float) -> pd.DataFrame:
        """The optimum at each budget: columns compute_flops, n_params, n_tokens, loss."""
        names = ["compute_flops", "n_params", "n_tokens", "loss"]
        return pd.DataFrame([asdict(self.allocate(float(flops), **columns)) for flops in compute_flops], columns=names)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.5g}" for name, value in self.parameters.items())
        return f"L = {self.form.formula}, {self.loss_unit}: {numbers} (N: {counted(self.n_params_convention)})"
