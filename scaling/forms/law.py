"""A loss law with its numbers, and the best way to spend compute under it. Fits live elsewhere."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.checks import positive
from scaling.presentation import Result, counted

if TYPE_CHECKING:
    from scaling.forms.form import Form, Values

NATS = "nats per token"
"""The unit of losses where none is stated."""
FLOPS_PER_PARAM_TOKEN = 6.0
"""C = 6·N·D: two FLOPs per parameter and token forward, four backward (Kaplan et al. 2001.08361, sec. 2.1)."""
_N_SHARE = (0.05, 0.95)
"""Of log(C/6) between which log N of the best size is sought where no formula tells it."""


def compute_flops(n_params: ArrayLike, n_tokens: ArrayLike) -> NDArray[np.float64]:
    """Training compute C = 6·N·D in FLOPs, always in float64: in int64 it wraps above 9.2e18.

    Args:
        n_params: parameters N, any shape.
        n_tokens: training tokens D, broadcast against `n_params`.

    Returns:
        FLOPs, of the broadcast shape (a numpy scalar for two scalars).
    """
    n_params, n_tokens = np.asarray(n_params, np.float64), np.asarray(n_tokens, np.float64)
    return np.asarray(FLOPS_PER_PARAM_TOKEN * n_params * n_tokens, np.float64)[()]


def params_exponent(form: "Form", values: "Values") -> Any:
    """Exponent a of the optimum N ∝ C^a, q / (p + q) for terms N^−p and D^−q; None where it is no power of C."""
    powers = form.powers(values)
    return powers[3] / (powers[1] + powers[3]) if powers else None


@dataclass(frozen=True, kw_only=True)
class Allocation(Result):
    """How one compute budget is best spent on parameters and tokens, and the loss that it buys.

    Attributes:
        n_params: parameters N.
        n_tokens: training tokens D.
        loss: expected loss at (N, D).
        compute_flops: the budget C = 6·N·D.
        n_params_convention, loss_unit: what N counts and the loss is in, as in the law.
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
        """One line: compute, parameters, tokens, their ratio, loss."""
        return (
            f"{self.compute_flops:.3g} FLOPs: {self.n_params:.4g} parameters ({counted(self.n_params_convention)}), "
            f"{self.n_tokens:.4g} tokens ({self.tokens_per_param:.3g} per parameter), loss {self.loss:.4f} {self.loss_unit}"
        )


@dataclass(frozen=True, kw_only=True)
class Law(Result):
    """A form with numbers, e.g. `Chinchilla().law(E=1.8, A=400, B=2000, alpha=.34, beta=.37)`.

    Attributes:
        form: its formula.
        parameters: their numbers by name.
        n_params_convention: what N counts, e.g. "total" or "without embeddings"; empty if it is not stated.
        loss_unit: what the loss is in.

    Raises:
        ValueError: a parameter is missing or unknown, negative or not finite, or (E excepted) zero.
    """

    form: "Form"
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
        """One parameter's number."""
        return self.parameters[name]

    def loss(self, n_params: ArrayLike, n_tokens: ArrayLike, **columns: ArrayLike) -> NDArray[np.float64]:
        """Expected loss, in `loss_unit`, of the broadcast shape of the columns: N, D, and what else the form depends on.

        Raises:
            ValueError: a value is not finite and above 0, or a column is missing or none of the form's.
        """
        rows = self.form.columns_of({"n_params": n_params, "n_tokens": n_tokens, **columns})
        return np.asarray(self.form.loss(self.parameters, rows))[()]

    @property
    def params_exponent(self) -> float | None:
        """Exponent a of the optimum N ∝ C^a; None where it is no power of C."""
        exponent: float | None = params_exponent(self.form, self.parameters)
        return exponent

    @property
    def tokens_exponent(self) -> float | None:
        """Exponent b of the optimum D ∝ C^b, 1 − a."""
        return None if (exponent := self.params_exponent) is None else 1 - exponent

    def allocate(self, compute_flops: float, **columns: float) -> Allocation:
        """The parameters and tokens of least loss under C = 6·N·D.

        For terms a·N^−p and b·D^−q: N = G (C/6)^(q/(p+q)), D = (C/6) / N, G = (p·a / (q·b))^(1/(p+q)) (Hoffmann et al.
        2203.15556, eq. 4); for other forms it is found numerically.

        Raises:
            ValueError: the budget is not finite and positive.
        """
        product = float(positive("compute_flops", compute_flops)) / FLOPS_PER_PARAM_TOKEN
        if powers := self.form.powers(self.parameters):
            a, p, b, q = powers
            log_n = (math.log(p / q) + math.log(a) - math.log(b) + q * math.log(product)) / (p + q)
        else:
            from scipy.optimize import minimize_scalar

            share_low, share_high = _N_SHARE
            bounds = (share_low * math.log(product), share_high * math.log(product))
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

    def to_dict(self) -> dict[str, Any]:
        """The form's name, the numbers and their units."""
        plain = {"n_params_convention": self.n_params_convention, "loss_unit": self.loss_unit}
        return {"form": self.form.name, "parameters": dict(self.parameters), **plain}

    @classmethod
    def from_dict(cls, data: dict[str, Any], form: "Form") -> "Law":
        """The inverse of `to_dict`; `forms.form_named` knows the library's forms."""
        return cls(**(data | {"form": form}))

    def __str__(self) -> str:
        """The equation, its numbers, the loss's unit and what N counts."""
        numbers = ", ".join(f"{name} {value:.5g}" for name, value in self.parameters.items())
        return f"L = {self.form.formula}, {self.loss_unit}: {numbers} (N: {counted(self.n_params_convention)})"
