"""Choice of the next point: expected improvement over the best run so far, maximised over draws from a narrowing neighbourhood."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from scaling.arrays import Array
from scaling.search.search_box import SearchBox

DRAWS = 512
ROUNDS = 5
WIDEST, NARROWING = 0.2, 0.4
"""Points drawn over the whole box, then rounds of half as many about the best point so far, with narrowing spread."""
SWITCH = 0.1
"""Probability that a draw about a point changes each of its categories."""

Score = Callable[[Array], Array]


def log_expected_improvement(mean: Array, std: Array, incumbent: float) -> Array:
    """Logarithm of E[max(0, incumbent − w)] for normal w, [m], with full precision also for tiny chances of improvement.

    Jones, Schonlau and Welch (1998), eq. 15, in the logarithmic form of Ament et al. (2310.20708).
    """
    from scipy.special import erfcx

    z = (incumbent - mean) / std
    log_density = -(z**2) / 2 - math.log(2 * math.pi) / 2
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mills = math.sqrt(math.pi / 2) * erfcx(-z / math.sqrt(2))  # Φ(z) / φ(z)
        near = np.where(z < 20, np.log1p(z * mills), 0.0) + log_density
        tail = log_density - 2 * np.log(-z)
        certain = np.log(z)
    return np.asarray(np.log(std) + np.select([z < -1e3, z > 20], [tail, certain], near))


def minimise(score: Score, box: SearchBox, generator: np.random.Generator, start: Array) -> Array:
    """Return the encoded point [q] of least score among the drawn points and `start` [n, q]."""
    best = np.concatenate([start, box.place(generator.random((DRAWS, len(box.names))))])
    values = score(best)
    point, least = best[np.argmin(values)], float(values.min())
    for number in range(ROUNDS):
        drawn = around(point, WIDEST * NARROWING**number, box, generator, DRAWS // 2)
        values = score(drawn)
        if values.min() < least:
            point, least = drawn[np.argmin(values)], float(values.min())
    return np.asarray(point)


def around(point: Array, spread: float, box: SearchBox, generator: np.random.Generator, n: int) -> Array:
    """Draw encoded points [n, q] about `point`; each differs in only a part of the coordinates."""
    d = len(box.bounds)
    moved = generator.random((n, d)) < max(0.5, 2 / max(d, 1))
    out = np.tile(point, (n, 1))
    out[:, :d] = np.clip(point[:d] + spread * moved * generator.standard_normal((n, d)), 0, 1)
    first = d
    for values in box.choices.values():
        switched = generator.random(n) < SWITCH
        anew = math.sqrt(0.5) * np.eye(len(values))[generator.integers(len(values), size=n)]
        out[:, first : first + len(values)] = np.where(switched[:, None], anew, out[:, first : first + len(values)])
        first += len(values)
    return out


def latin_hypercube(n: int, n_dimensions: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Points of the unit cube [n, n_dimensions], one in each of n slices of every coordinate."""
    slices = np.column_stack([generator.permutation(n) for _ in range(n_dimensions)])
    return np.asarray((slices + generator.random((n, n_dimensions))) / n)
