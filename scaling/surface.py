"""The loss surface L(N, D) and what follows from it in closed form."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.errors import ScalingError
from scaling.presentation import Result

FLOPS_PER_PARAM_TOKEN = 6.0
"""C = 6·N·D: two FLOPs per parameter and token forward, four backward (Kaplan et al. 2001.08361, sec. 2.1)."""


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


@dataclass(frozen=True, kw_only=True)
class Allocation(Result):
    """How one compute budget is best spent on parameters and tokens, and the loss that it buys.

    Attributes:
        n_params: parameters N, in the convention of the runs that were fitted.
        n_tokens: training tokens D.
        loss: expected loss at (N, D), nats per token.
        compute_flops: the budget C = 6·N·D.
    """

    n_params: float
    n_tokens: float
    loss: float
    compute_flops: float

    @property
    def tokens_per_param(self) -> float:
        """D / N."""
        return self.n_tokens / self.n_params

    def __str__(self) -> str:
        """One line: compute, parameters, tokens, their ratio, loss."""
        return (
            f"{self.compute_flops:.3g} FLOPs: {self.n_params:.4g} parameters, {self.n_tokens:.4g} tokens "
            f"({self.tokens_per_param:.3g} per parameter), loss {self.loss:.4f}"
        )


@dataclass(frozen=True, kw_only=True)
class LossSurface(Result):
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2203.15556, sec. 3.3 and app. D.3).

    Attributes:
        E: irreducible loss, nats per token.
        A: coefficient of the term in parameters.
        B: coefficient of the term in tokens.
        alpha: exponent of parameters.
        beta: exponent of tokens.

    Raises:
        ValueError: E is negative, or another value is not positive, or one is not finite.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "E"):
                rule = "at least 0" if name == "E" else "above 0"
                raise ValueError(f"{name} must be finite and {rule}, got {value!r}")

    def loss(self, n_params: ArrayLike, n_tokens: ArrayLike) -> NDArray[np.float64]:
        """Expected loss, nats per token, of the broadcast shape of `n_params` and `n_tokens`."""
        n_params, n_tokens = np.asarray(n_params, np.float64), np.asarray(n_tokens, np.float64)
        return np.asarray(self.E + self.A * n_params**-self.alpha + self.B * n_tokens**-self.beta)[()]

    @property
    def params_exponent(self) -> float:
        """Exponent a of the optimum N ∝ C^a, a = beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def tokens_exponent(self) -> float:
        """Exponent b of the optimum D ∝ C^b, b = alpha / (alpha + beta)."""
        return self.alpha / (self.alpha + self.beta)

    def allocate(self, compute_flops: float) -> Allocation:
        """The parameters and tokens of least loss under C = 6·N·D.

        N = G (C/6)^a and D = (C/6) / N, with G = (alpha A / (beta B))^(1 / (alpha + beta)) (Hoffmann et al., eq. 4).

        Raises:
            ValueError: the budget is not finite and positive.
        """
        if not (math.isfinite(compute_flops) and compute_flops > 0):
            raise ValueError(f"compute_flops must be finite and above 0, got {compute_flops!r}")
        product = compute_flops / FLOPS_PER_PARAM_TOKEN
        log_g = math.log(self.alpha * self.A / (self.beta * self.B)) / (self.alpha + self.beta)
        n_params = math.exp(log_g + self.params_exponent * math.log(product))
        n_tokens = product / n_params
        return Allocation(
            n_params=n_params,
            n_tokens=n_tokens,
            loss=float(self.loss(n_params, n_tokens)),
            compute_flops=float(compute_flops),
        )

    def frontier(self, compute_flops: Iterable[float]) -> pd.DataFrame:
        """The optimum at each budget: columns compute_flops, n_params, n_tokens, loss."""
        columns = ["compute_flops", "n_params", "n_tokens", "loss"]
        return pd.DataFrame([asdict(self.allocate(float(flops))) for flops in compute_flops], columns=columns)

    def n_tokens_for(self, loss: float, n_params: float) -> float:
        """Tokens with which a model of `n_params` parameters reaches `loss`.

        Raises:
            ScalingError: the model does not reach the loss with any number of tokens.
        """
        remainder = loss - self.E - self.A * n_params**-self.alpha
        if not remainder > 0:
            floor = self.E + self.A * n_params**-self.alpha
            raise ScalingError(f"{n_params:.4g} parameters tend to a loss of {floor:.4f} and never reach {loss:.4f}")
        return float((self.B / remainder) ** (1 / self.beta))

    def to_dict(self) -> dict[str, float]:
        """The five values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "LossSurface":
        """The inverse of `to_dict`."""
        return cls(**data)

    def __str__(self) -> str:
        """The equation with its numbers."""
        return f"L = {self.E:.4f} + {self.A:.5g}/N^{self.alpha:.4f} + {self.B:.5g}/D^{self.beta:.4f}"
