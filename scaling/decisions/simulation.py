"""Simulation of a ladder before it is trained: plant a surface, draw the runs' losses, fit them, and check the forecasts.

    design = ladder_design(np.geomspace(2e7, 4e8, 5), [10, 20, 40, 80], schedule="branches")
    simulate(design, law, n_params=7e9, n_tokens=2e11)

The law is a guess at the surface, from an earlier fit or a publication. Try more than one law, and one whose form differs from the
forecast's to see the effect of misfit. A log loss is drawn as log L(N, D) + stem noise + seed noise, both normal. Runs of one stem
share the stem noise, like branches of one training run.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

from scaling.checks import numbers, require_columns
from scaling.decisions.accelerators import require_positive
from scaling.fits.fitting import fit
from scaling.fits.support import unsupported
from scaling.forms.expert_law import SPARSITY, MixtureOfExperts
from scaling.forms.law import Law, compute_flops
from scaling.presentation import Result, counted, lines

COOLDOWN = 0.2
"""Share of a run's tokens in its cooldown (assumed, as Hägele et al. 2405.18392 find 10–20 % enough)."""
Schedule = Literal["runs", "branches"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation(Result):
    """Forecasts from a design, over many draws of its losses.

    Attributes:
        design: the runs, with `cost_flops`.
        law: the planted surface; it states what N counts, and the unit of the loss.
        truth: loss of this surface at the target.
        noise, stem_noise: standard deviations of log losses, by run and by stem.
        trials: a row for each draw: loss (forecast), error (log forecast − log truth), width (full, over the forecast), held
            (True if the interval holds the truth), supported, size_error (error of the best size's log N at the target's compute).
        reasons: why the forecasts are unsupported, the most frequent reason first.
    """

    design: pd.DataFrame = field(repr=False)
    n_params: float
    n_tokens: float
    law: Law
    truth: float
    noise: float
    stem_noise: float
    level: float
    trials: pd.DataFrame = field(repr=False)
    reasons: tuple[str, ...]

    @property
    def cost_flops(self) -> float:
        return float(self.design["cost_flops"].sum())

    @property
    def target_flops(self) -> float:
        """6·N·D of the target."""
        return float(compute_flops(self.n_params, self.n_tokens))

    @property
    def rms_error(self) -> float:
        """Root mean square of the error of log loss."""
        return float(np.sqrt((self.trials["error"] ** 2).mean()))

    @property
    def bias(self) -> float:
        """Mean error of log loss."""
        return float(self.trials["error"].mean())

    @property
    def width(self) -> float:
        """Median full width of the interval, over the forecast."""
        return float(self.trials["width"].median())

    @property
    def coverage(self) -> float:
        """Share of the intervals that hold the truth."""
        return float(self.trials["held"].mean())

    @property
    def size_error(self) -> float:
        """Root mean square of the error of the best size's logarithm, at the target's compute."""
        return float(np.sqrt((self.trials["size_error"] ** 2).mean()))

    def __str__(self) -> str:
        low, high = self.trials["error"].quantile([0.05, 0.95])
        return lines(
            {
                "ladder": f"{len(self.design)} runs, {self.design['stem'].nunique()} independent, {self.cost_flops:.3g} FLOPs "
                f"({self.cost_flops / self.target_flops:.2%} of the target's {self.target_flops:.3g})",
                "target": f"{self.n_params:.4g} parameters ({counted(self.law.n_params_convention)}), {self.n_tokens:.4g} tokens, "
                f"planted loss {self.truth:.4f} {self.law.loss_unit}",
                "noise": f"{self.noise:.3%} a run, {self.stem_noise:.3%} a stem",
                "error": f"rms {self.rms_error:.2%}, bias {self.bias:+.2%}, 90% of {len(self.trials)} draws {low:+.2%} to {high:+.2%}",
                "interval": f"{self.level:.0%}: median full width {self.width:.2%} of the loss, holds the truth in "
                f"{self.coverage:.0%}",
                "best size": f"at the target's compute within a factor {math.exp(self.size_error):.3g} (rms)",
                "supported": f"{self.trials['supported'].mean():.0%} of the forecasts"
                + (": " + "; ".join(self.reasons) if self.reasons else ""),
            }
        )


def simulate(
    design: pd.DataFrame,
    law: Law,
    *,
    n_params: float,
    n_tokens: float,
    noise: float = 0.003,
    stem_noise: float = 0.0,
    level: float = 0.9,
    n_trials: int = 40,
    seed: int = 0,
    **columns: float,
) -> Simulation:
    """Draw the losses of a design many times, and forecast the target from each.

    Args:
        design: a row per run: `n_params`, `n_tokens`, under a law of experts `sparsity`; optional `stem` (runs branched from one
            training share it) and `cost_flops` (6·N·D otherwise).
        law: the planted surface, of any form in N and D, or of experts.
        noise: standard deviation of a run's log loss from seed to seed; large runs have .00015–.0006, small runs more.
        stem_noise: standard deviation of the noise in log loss that the runs of a stem share.
        n_trials: number of draws; each takes as long as a fit and a forecast.
        columns: the target's sparsity, under a law of experts.

    Raises:
        ValueError: an argument breaks its rule, or the design can't be fitted.
    """
    require_columns(design, ("n_params", "n_tokens"))
    size, tokens = numbers(design, "n_params"), numbers(design, "n_tokens")
    cost = numbers(design, "cost_flops") if "cost_flops" in design else compute_flops(size, tokens)
    require_positive("n_params", n_params)
    require_positive("n_tokens", n_tokens)
    for name, value in (("noise", noise), ("stem_noise", stem_noise)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
    if n_trials < 2:
        raise ValueError(f"n_trials must be at least 2, got {n_trials}")
    further = _further_columns(law, design, columns)
    of_runs = {name: numbers(design, name) for name in further}
    runs = pd.DataFrame({"n_params": size, "n_tokens": tokens, **of_runs}).assign(
        stem=design["stem"].to_numpy() if "stem" in design else np.arange(len(design)), cost_flops=cost
    )
    stems = pd.factorize(runs["stem"])[0]
    flops = float(compute_flops(n_params, n_tokens))
    best_size = law.allocate(flops, **columns).n_params
    expected, truth = np.log(law.loss(size, tokens, **of_runs)), float(law.loss(n_params, n_tokens, **columns))
    form = MixtureOfExperts() if further else None
    generator = np.random.default_rng(seed)
    records: list[dict[str, float]] = []
    reasons: dict[str, list[str]] = {}  # by their short names
    for _ in range(n_trials):
        shared = stem_noise * generator.standard_normal(stems.max() + 1)[stems]
        drawn = runs.assign(loss=np.exp(expected + shared + noise * generator.standard_normal(len(runs))))
        # Few draws suffice: the forecast's fits are drawn separately, and the law's draws are not used.
        fitted = fit(drawn, n_params_convention="as planned", n_bootstrap=20, form=form)
        forecast = fitted.forecast(n_params, n_tokens, level, **columns)
        records.append(
            {
                "loss": forecast.loss,
                "error": math.log(forecast.loss / truth),
                "width": (forecast.high - forecast.low) / forecast.loss,
                "held": forecast.low <= truth <= forecast.high,
                "supported": forecast.supported,
                "size_error": math.log(fitted.best_law.allocate(flops, **columns).n_params / best_size),
            }
        )
        for name, sentence in unsupported(fitted.rows, fitted.ensemble, n_params, n_tokens, **columns).items():
            reasons.setdefault(name, []).append(sentence)
    return Simulation(
        design=runs,
        n_params=float(n_params),
        n_tokens=float(n_tokens),
        law=law,
        truth=truth,
        noise=noise,
        stem_noise=stem_noise,
        level=level,
        trials=pd.DataFrame(records),
        reasons=tuple(sentences[0] for sentences in sorted(reasons.values(), key=len, reverse=True)),
    )


def _further_columns(law: Law, design: pd.DataFrame, target: Mapping[str, float]) -> tuple[str, ...]:
    """Return the law's columns after N and D; raise ValueError unless design and target have them, and there is a fit for them."""
    further = law.form.columns[2:]
    if law.form.columns[:2] != ("n_params", "n_tokens") or further not in ((), (SPARSITY,)):
        raise ValueError(
            f"law must be a function of n_params and n_tokens, or of these and sparsity, got {law.form.name} of "
            f"{', '.join(law.form.columns)}"
        )
    if {*target} != {*further} or (SPARSITY in design) != bool(further):
        needed = "the law's sparsity" if further else "no sparsity, as the law has none"
        raise ValueError(
            f"design and target must have {needed}, got {', '.join(design.columns)} and {target or 'none'}"
        )
    require_columns(design, further)
    return further


def ladder_design(
    n_params: Iterable[float],
    tokens_per_param: Iterable[float],
    *,
    schedule: Schedule = "runs",
    cooldown: float = COOLDOWN,
    max_flops: float | None = None,
) -> pd.DataFrame:
    """Design with every size at every D/N, either as separate runs or as branches of one training per size.

    Under "branches" a size is trained once at a constant rate to (1 − cooldown) of its longest D. Each D is a branch that
    starts at (1 − cooldown)·D and takes cooldown·D further tokens. So a size costs (1 − c)·D_max + c·ΣD tokens instead of
    ΣD, and its losses share a stem.

    Args:
        schedule: "runs" or "branches".
        cooldown: share of a run's tokens, above 0, below 1.
        max_flops: most 6·N·D of a run; larger runs are left out.

    Returns:
        Columns n_params, n_tokens, stem, cost_flops (cost of a run in addition to earlier runs), by size and ratio.

    Raises:
        ValueError: an argument breaks its rule, or nothing is left.
    """
    if schedule not in ("runs", "branches"):
        raise ValueError(f"schedule must be 'runs' or 'branches', got {schedule!r}")
    if not 0 < cooldown < 1:
        raise ValueError(f"cooldown must lie between 0 and 1, got {cooldown!r}")
    sizes, ratios = (
        sorted({require_positive(name, float(v)) for v in values})
        for name, values in (("n_params", n_params), ("tokens_per_param", tokens_per_param))
    )
    records: list[dict[str, float]] = []
    for i, size in enumerate(sizes):
        trained = 0.0
        for ratio in ratios:
            tokens = size * ratio
            if max_flops is not None and compute_flops(size, tokens) > max_flops:
                continue
            added, stem = tokens, len(records)
            if schedule == "branches":
                added, stem = tokens - trained, i
                trained = (1 - cooldown) * tokens
            records.append(
                {"n_params": size, "n_tokens": tokens, "stem": stem, "cost_flops": float(compute_flops(size, added))}
            )
    if not records:
        raise ValueError(f"no run of {len(sizes)} sizes and {len(ratios)} ratios is within max_flops={max_flops!r}")
    return pd.DataFrame(records)


def isoflop_design(
    compute: Iterable[float], n_sizes: int, *, spread: float = 10.0, tokens_per_param: float = 20.0
) -> pd.DataFrame:
    """Design of `n_sizes` sizes at each compute, spread evenly in log N around the size of the given D/N.

    Args:
        compute: FLOPs of each curve.
        n_sizes: number of sizes on a curve, at least 2.
        spread: largest over smallest size of a curve.
        tokens_per_param: D/N of the curve's middle.

    Returns:
        Columns n_params, n_tokens, stem, cost_flops.

    Raises:
        ValueError: an argument breaks its rule.
    """
    if n_sizes < 2:
        raise ValueError(f"n_sizes must be at least 2, got {n_sizes}")
    if not spread > 1:
        raise ValueError(f"spread must be above 1, got {spread!r}")
    require_positive("tokens_per_param", tokens_per_param)
    flops = np.array([require_positive("compute", float(c)) for c in compute])
    middle = np.sqrt(flops / compute_flops(1.0, tokens_per_param))
    size = np.outer(middle, np.geomspace(spread**-0.5, spread**0.5, n_sizes)).ravel()
    cost = np.repeat(flops, n_sizes)
    tokens = cost / compute_flops(size, 1.0)
    return pd.DataFrame({"n_params": size, "n_tokens": tokens, "stem": np.arange(len(size)), "cost_flops": cost})
