"""Spending of compute under a law: the best size for a budget, and the least budget for a loss, for many laws of a form at once.

A model of N parameters trained on D tokens that answers with I tokens over its life costs 6·N·D + 2·p·N·I FLOPs, p the price
of a FLOP of serving over one of training (Sardana et al. 2401.00448, sec. 2 with p = 1, sec. 3 with other p). A budget thus
fixes D for each N, and the best N is sought along this line: on a grid, which is then narrowed around its best point.
The search needs no derivative, and works for any form and for lines that end or bend (unique tokens, memory).

Under a law of experts, further experts cost no compute and lower the loss. So each N has the largest sparsity that the limits allow:
`max_sparsity`, or the memory for all parameters. If sizes state their sparsities, the sparsest of equal N is best.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scaling.arrays import Array
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN, N_SHARE, Form
from scaling.forms.problem import Values

FLOPS_PER_PARAM_SERVED = 2.0
"""FLOPs per parameter and token of a forward pass (Kaplan et al. 2001.08361, sec. 2.1)."""
QUANTITIES = ("n_params", "n_tokens", "tokens_per_param", "total_flops", "loss")
UNIQUE = "unique_tokens"
"""Column of the forms that model repeated tokens."""
SAME_SIZE = 1.25
"""Factor within which the N of mixtures count as one size: routers of many experts add to N at small widths (assumed)."""
LEAST_FLOPS, MOST_FLOPS = 1e6, 1e60
"""Bounds between which the budget for a loss is sought."""
_GRID, _FINE, _ROUNDS, _HALVINGS = 65, 9, 12, 50


@dataclass(frozen=True, kw_only=True)
class Spending:
    """Uses of compute, and their limits.

    Attributes:
        served_tokens: tokens I that the model reads and writes over its life.
        serving_price: price p of a FLOP of serving, in FLOPs of training.
        unique_tokens: unique tokens in the corpus, or infinite.
        max_tokens: most training tokens, repeats included, or infinite.
        max_params: most parameters, all experts included, or infinite.
        max_sparsity: most total over active parameters, under a law of experts whose sparsity `columns` do not fix; or infinite.
        max_training_flops: most FLOPs of the training alone, or infinite.
        max_ratio: most tokens per parameter, or infinite.
        sizes: the only N that can be chosen, [M], or None for any.
        sparsities: sparsity of each of `sizes`, [M], or None if it is decided. Of equal sizes the sparsest comes first.
        columns: the form's other columns, the same for every run.
    """

    form: Form
    served_tokens: float = 0.0
    serving_price: float = 1.0
    unique_tokens: float = math.inf
    max_tokens: float = math.inf
    max_params: float = math.inf
    max_sparsity: float = math.inf
    max_training_flops: float = math.inf
    max_ratio: float = math.inf
    sizes: Array | None = None
    sparsities: Array | None = None
    columns: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, form: Form, columns: Mapping[str, float]) -> "Spending":
        """Spending on training alone, limited only by the unique tokens, with the form's further columns."""
        further = {name: value for name, value in columns.items() if name != UNIQUE}
        return cls(form=form, unique_tokens=columns.get(UNIQUE, math.inf), columns=further)

    @property
    def served_flops_per_param(self) -> float:
        """Cost of serving per parameter, in FLOPs of training."""
        return FLOPS_PER_PARAM_SERVED * self.serving_price * self.served_tokens

    @property
    def max_active_params(self) -> float:
        """Most active parameters, at the sparsity that the columns fix, or else of a dense model."""
        return self.max_params / float(self.columns.get(SPARSITY, 1.0))

    def tokens(self, n_params: Array, budget: ArrayLike) -> Array:
        """Training tokens D of a size within the limits; zero or negative if serving alone exceeds the budget."""
        flops_per_param = np.minimum(
            np.asarray(budget) / n_params - self.served_flops_per_param, self.max_training_flops / n_params
        )
        most = np.minimum(self.max_tokens, self.max_ratio * np.asarray(n_params))
        return np.asarray(np.minimum(flops_per_param / FLOPS_PER_PARAM_TOKEN, most))

    def loss(self, values: Values, n_params: Array, n_tokens: Array, sparsity: Array | None = None) -> Array:
        """Expected loss, infinite without tokens; with the sparsity that `self.sparsity` chooses unless it is given."""
        positive = np.maximum(n_tokens, 1.0)
        rows: dict[str, Any] = {"n_params": n_params, "n_tokens": positive, **self.columns}
        if SPARSITY in self.form.columns:
            rows[SPARSITY] = self.sparsity(n_params) if sparsity is None else sparsity
        if UNIQUE in self.form.columns:
            rows[UNIQUE] = np.minimum(positive, self.unique_tokens)
        loss = np.asarray(self.form.loss(values, {name: rows[name] for name in self.form.columns}))
        return np.where(n_tokens >= 1, loss, np.inf)

    def sparsity(self, n_params: ArrayLike) -> Array:
        """Sparsity of sizes: stated by the columns or by `sparsities`, or else the largest within the limits; 1 for a dense law."""
        n_params = np.asarray(n_params, np.float64)
        if SPARSITY not in self.form.columns:
            return np.ones_like(n_params)
        if SPARSITY in self.columns:
            return np.full_like(n_params, self.columns[SPARSITY])
        if self.sizes is not None and self.sparsities is not None:
            return np.asarray(self.sparsities[np.abs(self.sizes - n_params[..., None]).argmin(axis=-1)])
        return np.asarray(np.clip(self.max_params / n_params, 1.0, self.max_sparsity))

    def at(self, values: Values, n_params: Array, budget: ArrayLike) -> Array:
        """Expected loss of a size at a budget."""
        return self.loss(values, n_params, self.tokens(n_params, budget))

    def best(self, values: Values, budget: Array) -> Array:
        """The best size N for each budget, [J], under J laws: values [J, 1] by parameter."""
        budget = budget[:, None]
        if self.sizes is not None:
            sizes = np.broadcast_to(self.sizes, (len(budget), len(self.sizes)))
            return np.asarray(sizes[0][np.argmin(self.at(values, sizes, budget), axis=1)])
        low, high = self.range(budget)
        for points in (_GRID, *[_FINE] * _ROUNDS):
            log_n = low + (high - low) * np.linspace(0, 1, points)
            best = np.argmin(self.at(values, np.exp(log_n), budget), axis=1)[:, None]
            low, high = (np.take_along_axis(log_n, np.clip(best + step, 0, points - 1), axis=1) for step in (-1, 1))
        return np.asarray(np.exp((low + high) / 2)[:, 0])

    def answers(self, values: Values, budget: Array) -> pd.DataFrame:
        """Best use of each law's budget, [J]: one row each of `QUANTITIES`, infinite where the budget is infinite."""
        # A law that never reaches a loss has an infinite budget: compute at an arbitrary one, and overwrite the row below.
        finite = np.where(np.isfinite(budget), budget, 1e20)
        n_params = self.best(values, finite)
        n_tokens = self.tokens(n_params, finite)
        found = {
            "n_params": n_params,
            "n_tokens": n_tokens,
            "tokens_per_param": n_tokens / n_params,
            "total_flops": n_params * (FLOPS_PER_PARAM_TOKEN * n_tokens + self.served_flops_per_param),
            "loss": self.loss(values, n_params[:, None], n_tokens[:, None])[:, 0],
        }
        table = pd.DataFrame(found, columns=[*QUANTITIES])
        table[~np.isfinite(budget)] = np.inf
        return table

    def at_ratio(self, tokens_per_param: float, budget: float) -> "Spending":
        """The spending with N fixed to the largest with `tokens_per_param` within the limits, or to the nearest of `sizes`.

        Of sizes with their own sparsities all stay that are as large as the nearest one.
        """
        serving, training = self.served_flops_per_param, FLOPS_PER_PARAM_TOKEN * tokens_per_param
        # training·N² + serving·N = budget
        size = (math.sqrt(serving**2 + 4 * training * budget) - serving) / (2 * training)
        of_data, of_time = self.max_tokens / tokens_per_param, math.sqrt(self.max_training_flops / training)
        size = min(size, self.max_active_params, of_data, of_time)
        if self.sizes is not None:
            nearest = self.sizes[np.abs(np.log(self.sizes / size)).argmin()]
            alike = 1.0 if self.sparsities is None else SAME_SIZE
            kept = np.abs(np.log(self.sizes / nearest)) <= math.log(alike)
            chosen = None if self.sparsities is None else self.sparsities[kept]
            return replace(self, sizes=self.sizes[kept], sparsities=chosen)
        return replace(self, sizes=np.array([size]), max_ratio=tokens_per_param)

    def range(self, budget: Array) -> tuple[Array, Array]:
        """Bounds of log N for the search of the best size."""
        log_product = np.log(budget / FLOPS_PER_PARAM_TOKEN)
        high = np.minimum(N_SHARE[1] * log_product, math.log(self.max_active_params))
        return np.minimum(N_SHARE[0] * log_product, high), high

    def least_budget(self, values: Values, loss: float, n_laws: int) -> Array:
        """Least FLOPs, serving included, with which each of J laws reaches the loss; infinite if a law never does, [J]."""

        def reached(log_budget: Array) -> NDArray[np.bool_]:
            budget = np.exp(log_budget)
            return np.asarray(self.at(values, self.best(values, budget)[:, None], budget[:, None])[:, 0] <= loss)

        low, high = np.full(n_laws, math.log(LEAST_FLOPS)), np.full(n_laws, math.log(MOST_FLOPS))
        never = ~reached(high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = reached(middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.where(never, np.inf, np.exp(high))

    def band(self, values: Values, best: float, budget: float, loss: float) -> tuple[float, float]:
        """Smallest and largest N around the best whose loss at the budget is at most `loss`; within the limits."""
        ends = []
        for end in self.range(np.asarray(budget)):
            inside, outside = math.log(best), float(end)
            if self._within(values, outside, budget, loss):
                inside = outside
            for _ in range(_HALVINGS):
                middle = (inside + outside) / 2
                within = self._within(values, middle, budget, loss)
                inside, outside = (middle, outside) if within else (inside, middle)
            ends.append(math.exp(inside))
        return ends[0], ends[1]

    def _within(self, values: Values, log_n: float, budget: float, loss: float) -> bool:
        return bool(np.all(self.at(values, np.array([[math.exp(log_n)]]), budget) <= loss))
