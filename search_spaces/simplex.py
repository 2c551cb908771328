"""The simplex: weights of named parts that sum to 1, for example of the sources of a data mixture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from search_spaces.base import Distribution, Value
from search_spaces.errors import SpaceError, unknown
from search_spaces.prior import BetaStick, Density, Prior, is_finite
from search_spaces.weights import Weights

SUM_TOLERANCE = 1e-5
"""Largest difference of a sum of weights from 1, so that a table may round the weights."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, repr=False)
class Simplex(Distribution):
    """Weights that sum to 1, uniform over the simplex; one dimension fewer than parts.

    The map from the cube breaks a stick of length 1: with r parts after it, a part takes the share v = 1 - (1 - u)^(1/r)
    of the rest. A uniform u gives v ~ Beta(1, r), the shares of Dirichlet(1, …, 1), which is uniform on the simplex
    (Devroye, Non-Uniform Random Variate Generation, 1986, chapter XI.4; Ferguson 1973). Lower bounds shrink the simplex.

    Attributes:
        parts: Names of the parts, at least two.
        low: Smallest weight of a part, by name; 0 for omitted parts.
    """

    kind: ClassVar[str] = "simplex"
    takes_points: ClassVar[bool] = True
    parts: tuple[str, ...]
    low: Weights = Weights()  # noqa: RUF009 - immutable

    def _check(self) -> None:
        if not isinstance(self.parts, list | tuple) or not all(isinstance(part, str) and part for part in self.parts):
            raise SpaceError(f"simplex needs a list of names as parts, got {self.parts!r}")
        object.__setattr__(self, "parts", tuple(self.parts))
        if len(self.parts) < 2 or len(set(self.parts)) < len(self.parts):
            raise SpaceError(f"simplex needs at least two parts that differ, got {list(self.parts)!r}")
        if not isinstance(self.low, Mapping):
            raise SpaceError(f"simplex needs a table from parts to least weights as low, got {self.low!r}")
        for part, least in self.low.items():
            if part not in self.parts:
                raise SpaceError(unknown("part in the low of a simplex", part, self.parts))
            if not is_finite(least) or least < 0:
                raise SpaceError(f"simplex needs low.{part} >= 0, got {least!r}")
        object.__setattr__(self, "low", Weights({part: float(least) for part, least in self.low.items() if least > 0}))
        if (total := sum(self.low.values())) >= 1 - SUM_TOLERANCE:
            raise SpaceError(
                f"simplex needs a low that sums to less than 1 by more than {SUM_TOLERANCE:g}, got {total:g}"
            )

    @property
    def dimensions(self) -> int:
        """Number of parts minus one."""
        return len(self.parts) - 1

    def contains(self, value: object) -> bool:
        if not isinstance(value, Mapping) or set(value) != set(self.parts):
            return False
        if not all(
            is_finite(value[part]) and value[part] >= self.low.get(part, 0.0) - _ROUNDING for part in self.parts
        ):
            return False
        return abs(math.fsum(value.values()) - 1) <= SUM_TOLERANCE

    def _encode(self, value: Mapping[str, float]) -> tuple[float, ...]:
        left = self._left(self._free(value))
        # If nothing is left, all places are equivalent, so the middle is returned.
        return tuple(
            1 - (left[j + 1] / left[j]) ** (self.dimensions - j) if left[j] > 0 else 0.5 for j in range(self.dimensions)
        )

    def _decode(self, places: Sequence[float]) -> Weights:
        left, free = 1.0, []
        for j, u in enumerate(places):
            rest = left * (1 - u) ** (1 / (self.dimensions - j))
            free.append(left - rest)
            left = rest
        return self._weights([*free, left])

    def _grid(self, n: int) -> list[Value]:
        """Return all mixtures with weights in steps of 1/(n - 1) of the rest above the bounds; equal shares for n = 1."""
        if n == 1:
            return [self._weights([1 / len(self.parts)] * len(self.parts))]
        return [self._weights([k / (n - 1) for k in counts]) for counts in _compositions(n - 1, len(self.parts))]

    def _densities(self, prior: Prior) -> tuple[Density, ...]:
        if not isinstance(prior.centre, Weights):
            raise SpaceError(f"the centre of a simplex's prior needs a weight for each part, got {prior.centre!r}")
        if prior.spread >= 1:
            raise SpaceError(f"the spread of a simplex's prior lies below 1, got {prior.spread:g}")
        free = self._free(prior.centre)
        if min(free) <= 0:
            raise SpaceError(f"the centre of a simplex's prior must lie above every lower bound, got {prior.centre}")
        alphas = [(1 / prior.spread**2 - 1) * share for share in free]
        behind = self._left(alphas)
        return tuple(BetaStick(a=alphas[j], b=behind[j + 1], left=self.dimensions - j) for j in range(self.dimensions))

    def _free(self, value: Mapping[str, float]) -> list[float]:
        """Return the share of each part in the rest above the lower bounds; they sum to 1."""
        free = [max(value[part] - self.low.get(part, 0.0), 0.0) for part in self.parts]
        total = math.fsum(free)
        return [share / total for share in free]

    def _weights(self, free: Sequence[float]) -> Weights:
        room = 1 - math.fsum(self.low.values())
        shares = zip(self.parts, free, strict=True)
        return Weights({part: self.low.get(part, 0.0) + room * share for part, share in shares})

    @staticmethod
    def _left(shares: Sequence[float]) -> list[float]:
        """Return the sum from each part on; sums start at the end, to keep the digits of small parts."""
        return list(accumulate(reversed(shares)))[::-1]

    def _support(self) -> str:
        return " + ".join(f"{part}{f' >= {self.low[part]:g}' if part in self.low else ''}" for part in self.parts)


def _compositions(total: int, parts: int) -> Iterator[list[int]]:
    """Yield every list of `parts` whole numbers from 0 that sum to `total`."""
    if parts == 1:
        yield [total]
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield [first, *rest]
