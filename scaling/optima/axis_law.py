"""Law of the best value along an axis on which it does not transfer: a power of the size, through the optima of a transfer check.

log2 value = level − exponent · log2(size / size_ref), without a prior: no exponent is known along these axes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from scaling.checks import positive
from scaling.errors import ScalingError
from scaling.optima.horizon import OPTIMUM_SCATTER
from scaling.optima.optimum import Optimum
from scaling.optima.tokens_law import MIN_BUDGETS, MIN_SPAN, optima_table, plural, weighted_lines
from scaling.quantiles import two_sided
from scaling.serialization import JsonResult

MIN_SIGNIFICANCE = 2.0
"""Least exponent, in standard errors; a smaller one may as well be 0."""
MAX_MISFIT = 3.0
"""Largest distance of an optimum from the line, in standard errors; beyond, the optima do not follow a power (assumed)."""
MAX_BEYOND = 2.0
"""Largest factor beyond the tested sizes to which the law is followed (assumed)."""


@dataclass(frozen=True, kw_only=True)
class AxisLaw(JsonResult):
    """Best value ∝ size^(−exponent).

    Attributes:
        along, over: as in `Transfer`.
        log2_ref: log2 of the best value at `size_ref`, the geometric mean of the sizes weighted as their optima are.
        stderr: standard error of the exponent.
        sizes: smallest and largest tested size.
    """

    along: str
    over: str
    exponent: float
    stderr: float
    log2_ref: float
    size_ref: float
    sizes: tuple[float, float]

    def supports(self, size: float) -> bool:
        """Return whether the law is followed at this size."""
        return self.sizes[0] / MAX_BEYOND <= size <= self.sizes[1] * MAX_BEYOND

    def factor(self, size: float, base: float) -> float:
        """Return the best value at a size over that at another."""
        return float((positive("size", size) / positive("base", base)) ** -self.exponent)

    def interval(self, level: float = 0.9) -> tuple[float, float]:
        """Interval of the exponent, normal."""
        reach = two_sided(level) * self.stderr
        return self.exponent - reach, self.exponent + reach

    def __str__(self) -> str:
        low, high = self.interval()
        return (
            f"best {self.over} ∝ {self.along}^{-self.exponent:.2f}, 90 % within {-high:.2f} to {-low:.2f}, "
            f"measured at {self.sizes[0]:g} to {self.sizes[1]:g}"
        )


def fit_axis_law(optima: Mapping[float, Optimum], *, along: str, over: str = "rate") -> AxisLaw:
    """Fit a line through log2 of the optima, weighted by their errors with the noise pooled over the sizes.

    Args:
        optima: optimum of each size, as `Transfer.optima` has them.

    Raises:
        ScalingError: the evidence supports no law: too few sizes or too small a span of them have an optimum inside their
            tested values, the noise is unknown, the exponent is not significant, or the optima do not lie on a line.
    """
    table = optima_table({(along, size): optimum for size, optimum in optima.items()}, over)
    used = table[table["used"]]
    sizes, log2_value = used["n_tokens"].to_numpy(), used[f"log2_{over}"].to_numpy()
    if len(used) < MIN_BUDGETS or sizes.max() < MIN_SPAN * sizes.min():
        raise ScalingError(
            f"need optima inside the tested {plural(over)} at {MIN_BUDGETS} {plural(along)} that span {MIN_SPAN:g}×, got "
            f"{', '.join(f'{size:g}' for size in sizes) or 'none'}"
        )
    if not np.isfinite(used["stderr"]).all():
        raise ScalingError(f"the noise is unknown: add {plural(over)} or seeds")
    variances = used["stderr"].to_numpy() ** 2 + OPTIMUM_SCATTER**2
    octaves = np.log2(sizes)
    log2_ref = float(np.average(octaves, weights=1 / variances))
    design = np.column_stack([np.ones(len(used)), log2_ref - octaves])
    (level, exponent), covariance = weighted_lines(design, log2_value, 1 / variances, None)
    stderr = math.sqrt(covariance[1, 1])
    if abs(exponent) < MIN_SIGNIFICANCE * stderr:
        raise ScalingError(f"the exponent {-exponent:.2f} ± {stderr:.2f} may be 0")
    misfit = np.abs(log2_value - design @ [level, exponent]) / np.sqrt(variances)
    if misfit.max() > MAX_MISFIT:
        raise ScalingError(
            f"the optima do not follow a power of {along}: one lies {misfit.max():.1f} standard errors off"
        )
    return AxisLaw(
        along=along,
        over=over,
        exponent=float(exponent),
        stderr=stderr,
        log2_ref=float(level),
        size_ref=2.0**log2_ref,
        sizes=(float(sizes.min()), float(sizes.max())),
    )
