"""Response of the loss to hyperparameters across scales: forecasts of larger runs from smaller ones, and the next point to try.

Losses enter as clipped log loss above the best of their scale (`excess`). `basin` describes the fitted surface, `process` the fit,
and `acquisition` the choice of the next point.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.arrays import Array, Integers
from scaling.checks import losses, require_columns
from scaling.drawing import Figure
from scaling.presentation import Result, lines
from scaling.quantiles import tails
from scaling.search.acquisition import around, latin_hypercube, log_expected_improvement, minimise
from scaling.search.excess import clipped_excess, most_informative
from scaling.search.gaussian_process import GaussianProcess, Observations
from scaling.search.search_box import APART, Point, Region, SearchBox, is_within, moved_into, untried
from scaling.search.search_figures import draw_response, response_data
from scaling.threads import single_threaded

NEAR, FAR = 0.01, 2.0
"""Excess of log loss over the surface's minimum from which a point counts as far, and the penalty of far points in the logarithm of
expected improvement.

Of .005, .01, .02 and no limit, .01 was chosen on Step Law's grid (tests/benchmarks/search_replay.py). FAR is assumed: there 2, 4
and a ban on far points need the same warm evaluations."""
PRIOR_WEIGHT = 10.0
"""Strength of a user's prior: after n runs of the scale, its logarithm has the weight PRIOR_WEIGHT / (n + 1) (the decay of piBO,
2204.11051; ten is assumed)."""
N_DRAWS, N_FUNCTIONS, N_CANDIDATES = 24, 16, 256
"""Draws of the hyperparameters for an optimum's interval, functions drawn for each, points at which each function is evaluated."""

MIN_OWN = 5
"""Fewest runs of the searched family that can reject a source (assumed)."""

LogPrior = Callable[[pd.DataFrame], NDArray[np.float64]]
Trials = Callable[[pd.DataFrame], tuple[pd.DataFrame, NDArray[np.bool_]]]
REPEATED = 1e6
"""Penalty of a point that was tried: larger than any promise of another, smaller than that of a point that is not allowed."""


@dataclass(frozen=True, kw_only=True)
class ResponseOptimum(Result):
    """The best point at one scale, according to the surface.

    Attributes:
        point: a value for each coordinate.
        intervals: equal-tailed interval of each numeric coordinate of the optimum, over posterior draws of the surface.
        choice_probabilities: for each category, the share of these draws in which each value was the best.
        at_edge: numeric coordinates whose optimum lies on the box's bound: the box should be wider there.
        n_here: number of finite runs at this scale; 0 means that all is extrapolated.
    """

    point: Point
    intervals: dict[str, tuple[float, float]]
    level: float
    choice_probabilities: dict[str, dict[Any, float]]
    at_edge: tuple[str, ...]
    n_here: int

    def __str__(self) -> str:
        shown = {}
        for name, value in self.point.items():
            if name in self.intervals:
                low, high = self.intervals[name]
                shown[name] = f"{value:.4g}, {self.level:.0%} interval [{low:.4g}, {high:.4g}]"
            else:
                shown[name] = f"{value} ({self.choice_probabilities[name][value]:.0%})"
        edge = f", at the box's edge in {', '.join(self.at_edge)}" if self.at_edge else ""
        return lines(shown | {"runs at this scale": f"{self.n_here}{edge}"})


@dataclass(frozen=True, kw_only=True, eq=False)
class ResponseSurface(Result):
    """Log loss over the box and over scales, fitted to all runs at once by `fit_response`.

    Attributes:
        u: encoded coordinates of all runs, diverged runs included, [n, q].
        cell: number of each run's scale, [n].
        centre: mean log2 of the scales, [k].
        cells: scales [C, k], log2, in the order of the process's cell numbers.
        n_finite: number of finite runs of each scale.
        left_out: sources that the surface was not fitted to, because the family's runs are less likely with them.
    """

    box: SearchBox
    u: Array
    cell: Integers
    process: GaussianProcess
    centre: Array
    cells: Array
    n_finite: tuple[int, ...]
    left_out: tuple[str, ...] = ()

    @property
    def n_runs(self) -> int:
        """Number of all runs, diverged runs included."""
        return len(self.u)

    @property
    def noise(self) -> float:
        """Standard deviation of log loss from run to run."""
        return self.process.shape.noise

    @property
    def drift(self) -> pd.DataFrame:
        """Drift of the optimum per doubling of each scale: numeric coordinates × scales, in the coordinates' units."""
        return self._drift.iloc[:, : len(self.box.scales)]

    @property
    def offsets(self) -> pd.DataFrame:
        """Distance of each source's optimum from the family's at the same scale: coordinates × sources, in the coordinates' units."""
        return self._drift.iloc[:, len(self.box.scales) :] * APART

    @property
    def _drift(self) -> pd.DataFrame:
        widths = np.array([high - low for low, high in self.box.bounds.values()])
        moved = self.process.shape.drift[: len(widths)] * widths[:, None]
        return pd.DataFrame(moved, index=list(self.box.bounds), columns=[*self.box.scales, *self.box.sources])

    @single_threaded
    def predict(self, points: pd.DataFrame) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation, [n] each, of log loss above the best run of the same scale, without noise.

        The mean is clipped smoothly at 5 % (`excess`), and below 0 if better losses are expected. Without runs at a scale its
        level is unknown, which the deviation includes: only differences between points of such a scale mean something.

        Args:
            points: the box's coordinates and scales.

        Raises:
            ValueError: a column is missing or a value breaks its rule.
        """
        s = self.box.octaves(points)
        return self.process.predict(self.box.encode(points), s - self.centre, self._cells_of(s))

    @single_threaded
    def optimum(self, scale: Mapping[str, float] | None = None, *, level: float = 0.9) -> ResponseOptimum:
        """Find the best point at a scale, with or without runs there, with an interval over the surface's uncertainty.

        The interval includes the uncertainty of the drift, the basin's shape and the noise, and the stray of a cell's optimum
        from a straight drift (`basin.STRAY`), but not a bend of the drift. On Step Law's grid, 90 % intervals held 15
        of 16 optima for the rate and 13 of 16 for the batch, fitted to all smaller cells; 15 of 17 for either, fitted to all other
        cells. `STRAY` was not fitted to this, but its size was known from the same table.

        Raises:
            ValueError: a scale is missing or not above 0, or the level is not between 0 and 1.
        """
        ends = tails(level)
        s, cell = self._at(scale)
        generator = np.random.default_rng(self.n_runs)
        best = self._lowest(self.process, s, cell, generator)
        drawn = self._drawn_optima(best, s, cell, generator)
        d, names = len(self.box.bounds), list(self.box.bounds)
        low, high = self.box.decode(np.quantile(drawn, ends, axis=0))[names].to_numpy(np.float64)
        choices = self.box.decode(drawn)
        return ResponseOptimum(
            point=self._point(best),
            intervals={name: (float(low[i]), float(high[i])) for i, name in enumerate(names)},
            level=level,
            choice_probabilities={
                name: {value: float(np.mean([one == value for one in choices[name]])) for value in values}
                for name, values in self.box.choices.items()
            },
            at_edge=tuple(name for i, name in enumerate(names) if min(best[:d][i], 1 - best[:d][i]) < 1e-3),
            n_here=self.n_finite[cell] if cell >= 0 else 0,
        )

    def plot_contours(
        self,
        scale: Mapping[str, float] | None = None,
        over: tuple[str, str] | None = None,
        titles: Mapping[str, str] | None = None,
    ) -> Figure:
        """Draw contours of the loss over two numeric coordinates at a scale, with its runs and its optimum."""
        return draw_response(self.contours(scale, over), titles)

    def contours(
        self, scale: Mapping[str, float] | None = None, over: tuple[str, str] | None = None, level: float = 0.9
    ) -> pd.DataFrame:
        """Table that `plot_contours` draws, see `figures.response_data`.

        Raises:
            ValueError: `over` does not name two numeric coordinates of the box, or a scale is missing.
        """
        best, here = self.optimum(scale, level=level), dict(scale or {})
        octaves = self.box.octaves(pd.DataFrame([here]))[0]
        data = self.process.data
        own = np.flatnonzero([np.allclose(octaves, self.cells[c], rtol=0, atol=1e-8) for c in data.cell])
        runs = self.box.decode(data.u[own]).assign(above=data.w[own])
        return response_data(
            self.box, self.predict, best.point, best.intervals, runs, scale=here, over=over, level=level
        )

    @single_threaded
    def suggest(
        self,
        scale: Mapping[str, float] | None = None,
        *,
        pending: pd.DataFrame | None = None,
        prior: LogPrior | None = None,
        trials: Trials | None = None,
        seed: int = 0,
    ) -> Point:
        """Suggest the next point at a scale; the same arguments give the same point.

        The first points come from a Latin hypercube drawn by `seed`, or from the prior, until the finished and pending runs are two
        more than the coordinates. Later points have the largest expected improvement on the best point tried at this scale; if none
        was tried, the point is the surface's minimum. Points more than `NEAR` above this minimum get the penalty `FAR`. If runs of
        other scales leave categories or ends of ranges untried (`untried`), every second point lies there, until each was tried.

        Args:
            scale: the searched scale; may be left out if the box has none.
            pending: running points, with the scales as columns; they are assumed to finish with their expected losses.
            prior: log density of points (a DataFrame of the coordinates), up to a constant; its weight decays.
            trials: the points at which trials of given points would be, such as rounded ones, and which of them are allowed.
                Points are judged there, and one that was tried is not suggested again while others are left.

        Raises:
            ValueError: a scale or column is missing, or a value breaks its rule.
        """
        if pending is None or pending.empty:
            pending = pd.DataFrame(columns=[*self.box.names, *self.box.scales], dtype=np.float64)
        under_way = self.box.octaves(pending)
        octaves = np.concatenate([self.box.octaves(pd.DataFrame([dict(scale or {})])), under_way])
        s, cells = octaves - self.centre, self._cells_of(octaves)
        u = self.box.encode(pending)
        process = self.process.and_exactly(u, s[1:], cells[1:])
        s, cell, n = s[0], cells[0], self.n_runs + len(pending)
        here = np.concatenate([self.u[self.cell == cell], u[cells[1:] == cell]])
        generator = np.random.default_rng([seed, n])
        if n < (start := len(self.box.names) + 2):
            drawn = self.box.place(generator.random((512, len(self.box.names))))
            if prior is not None:
                order = drawn[
                    np.argsort(-(self._logs(prior, drawn) + generator.gumbel(size=len(drawn))), kind="stable")
                ]
            else:
                design = latin_hypercube(start, len(self.box.names), np.random.default_rng(seed))
                order = np.concatenate([self.box.place(design)[n : n + 1], drawn])
            new = order[~self._unwanted(order, here, trials)] if trials else order
            return self._point((new if len(new) else order)[0])
        regions = self._to_explore(here, cell)
        point, is_possible = self._most_promising(process, s, cell, here, prior, trials, generator, regions)
        if regions and not is_possible:  # no trial is allowed there
            point, _ = self._most_promising(process, s, cell, here, prior, trials, generator, [])
        return self._point(point)

    def _most_promising(
        self,
        process: GaussianProcess,
        s: Array,
        cell: int,
        here: Array,
        prior: LogPrior | None,
        trials: Trials | None,
        generator: np.random.Generator,
        regions: list[Region],
    ) -> tuple[Array, bool]:
        """The point, and whether a trial may be there; `here` are the encoded points of all runs at the scale."""
        lowest = self._lowest(process, s, cell, generator, trials)
        tried = process.data.u[process.data.cell == cell]
        if not len(tried) and prior is None:
            return lowest, True
        bottom = float(self._values(process, self._tried_at(lowest[None], trials)[0], s, cell)[0][0])
        incumbent = float(self._values(process, tried, s, cell)[0].min()) if len(tried) else bottom

        def score(points: Array) -> Array:
            u, allowed = self._tried_at(points, trials)
            mean, std = self._values(process, u, s, cell)
            promise = log_expected_improvement(mean, std, incumbent)
            if prior is not None:
                promise = promise + PRIOR_WEIGHT / (len(tried) + 1) * self._logs(prior, u)
            value = (
                np.where(is_within(regions, u), -promise, np.inf)
                if regions
                else -promise + FAR * (mean > bottom + NEAR)
            )
            if trials is None:
                return np.asarray(value)
            return np.where(allowed, value + REPEATED * _is_among(u, here), np.inf)

        start = moved_into(regions, lowest, self.box) if regions else lowest[None]
        found = minimise(score, self.box, generator, start)
        return found, bool(np.isfinite(score(found[None])[0]))

    def _unwanted(self, points: Array, here: Array, trials: Trials | None) -> NDArray[np.bool_]:
        """Which encoded points have trials that are not allowed, or that are among `here`."""
        u, allowed = self._tried_at(points, trials)
        return ~allowed | _is_among(u, here)

    def _to_explore(self, here: Array, cell: int) -> list[Region]:
        """Untried regions for the next point of a scale; if there are none, the point may lie anywhere.

        Every second point of a scale, from its second on, explores, at most once for each region that runs of other scales
        left untried. `here` are the encoded points of finished and running runs at the scale.
        """
        elsewhere = self.u[self.cell != cell]
        columns = [column for column, *_ in untried(self.box, elsewhere)]
        if len(here) % 2 == 0 or len(here) >= 2 * len(columns):
            return []
        left = untried(self.box, np.concatenate([elsewhere, here]))
        return [region for region in left if region[0] in columns]

    def _lowest(
        self,
        process: GaussianProcess,
        s: Array,
        cell: int,
        generator: np.random.Generator,
        trials: Trials | None = None,
    ) -> Array:
        """Encoded minimum of the mean."""
        best = np.argsort(process.data.w, kind="stable")[:16]
        start = np.clip(process.data.u[best], 0, 1) if len(best) else np.zeros((0, len(self.box.layout.groups)))

        def mean(points: Array) -> Array:
            u, allowed = self._tried_at(points, trials)
            return np.where(allowed, self._values(process, u, s, cell)[0], np.inf)

        return minimise(mean, self.box, generator, start)

    def _tried_at(self, u: Array, trials: Trials | None) -> tuple[Array, NDArray[np.bool_]]:
        """Encoded points at which trials of these points would be, and whether each is allowed."""
        if trials is None:
            return u, np.ones(len(u), dtype=bool)
        points, allowed = trials(self.box.decode(u))
        return self.box.encode(points), allowed

    def _drawn_optima(self, best: Array, s: Array, cell: int, generator: np.random.Generator) -> Array:
        """Encoded minima of functions drawn from the posterior, [draws, q]."""
        n = N_CANDIDATES // 8
        spreads = np.geomspace(0.01, 0.3, 4)
        fixed = [best[None], *(around(best, spread, self.box, generator, n) for spread in spreads)]
        out = []
        for _ in range(N_DRAWS):
            process = self.process.redrawn(generator)
            lowest = self._lowest(process, s, cell, generator)
            u = np.concatenate([*fixed, lowest[None], *(around(lowest, x, self.box, generator, n) for x in spreads)])
            mean, covariance = process.joint(u, np.tile(s, (len(u), 1)), np.full(len(u), cell))
            near = np.flatnonzero(mean <= mean.min() + NEAR)
            values, vectors = np.linalg.eigh(covariance[np.ix_(near, near)])
            root = vectors * np.sqrt(np.maximum(values, 0.0))
            functions = mean[near] + generator.standard_normal((N_FUNCTIONS, len(near))) @ root.T
            out.append(u[near[functions.argmin(axis=1)]])
        return np.concatenate(out)

    def _values(self, process: GaussianProcess, u: Array, s: Array, cell: int) -> tuple[Array, Array]:
        return process.predict(u, np.tile(s, (len(u), 1)), np.full(len(u), cell))

    def _logs(self, prior: LogPrior, u: Array) -> Array:
        return np.asarray(prior(self.box.decode(u)), np.float64)

    def _point(self, u: Array) -> Point:
        return {str(name): value for name, value in self.box.decode(u[None]).to_dict("records")[0].items()}

    def _at(self, scale: Mapping[str, float] | None) -> tuple[Array, int]:
        octaves = self.box.octaves(pd.DataFrame([dict(scale or {})]))
        return octaves[0] - self.centre, int(self._cells_of(octaves)[0])

    def _cells_of(self, octaves: Array) -> Integers:
        """Number of each row's scale; scales without runs have distinct negative numbers."""
        _, number = np.unique(octaves.round(9), axis=0, return_inverse=True) if octaves.shape[1] else ((), 0)
        out = np.broadcast_to(-1 - np.asarray(number).ravel(), len(octaves)).copy()
        for known, cell in enumerate(self.cells):
            out[np.isclose(octaves, cell, rtol=0, atol=1e-8).all(axis=1)] = known
        return out

    def __str__(self) -> str:
        drifts = {
            name: ", ".join(f"{value:+.2f} per doubling of {scale}" for scale, value in row.items())
            for name, row in (self.drift.iterrows() if self.box.scales else ())
        }
        runs = f"{self.n_runs} at {len(self.cells)} scales, {self.n_runs - sum(self.n_finite)} diverged"
        return lines(drifts | {"noise": f"{self.noise:.2%} of the loss", "runs": runs})


@single_threaded
def fit_response(rows: pd.DataFrame, *, box: SearchBox) -> ResponseSurface:
    """Fit the surface to the runs of all scales; without any runs the surface is the prior.

    Args:
        rows: the box's coordinates and scales, and `loss` (nats per token; NaN or infinite if diverged); `source` if
            the box has sources.
        box: the searched box. Runs outside its bounds are used too.

    Raises:
        ValueError: a column is missing or a value breaks its rule.
    """
    if rows.empty:
        rows = pd.DataFrame(columns=[*box.names, *box.scales, "loss"], dtype=np.float64)
    require_columns(rows, ("loss",))
    u, octaves, log_loss = box.encode(rows), box.octaves(rows), np.log(losses(rows))
    cells, cell = np.unique(octaves.round(9), axis=0, return_inverse=True) if len(rows) else (octaves, np.zeros(0, int))
    if len(rows) and not box.scales:
        cells, cell = np.zeros((1, 0)), np.zeros(len(rows), int)
    w = clipped_excess(log_loss, cell)
    of_source = octaves[:, len(box.scales) :] > 0
    kept = most_informative(w, cell, np.asarray(~of_source.any(axis=1)))
    centre = octaves[kept].mean(axis=0) if len(rows) else np.zeros(len(box.scales))
    data = Observations(
        u=u[kept], s=octaves[kept] - centre, cell=cell[kept], w=w[kept], exact=np.zeros(len(kept), dtype=bool)
    )
    process, left_out = _fitted(data, box, of_source[kept])
    return ResponseSurface(
        box=box,
        u=u,
        cell=cell,
        process=process,
        centre=centre,
        cells=cells,
        n_finite=tuple(int(np.isfinite(log_loss[cell == i]).sum()) for i in range(len(cells))),
        left_out=left_out,
    )


def _fitted(
    data: Observations, box: SearchBox, of_source: NDArray[np.bool_]
) -> tuple[GaussianProcess, tuple[str, ...]]:
    """Fit the process to the family and to the sources that make its runs likelier; return the names of the other sources.

    Sources are tested in turn by Bayes' factor at the fitted hyperparameters: log p(own, source) − log p(own) − log p(source).

    Args:
        box: Box with the sources' names.
        of_source: Whether each observation comes from each source, [n, sources].
    """
    own = np.asarray(~of_source.any(axis=1))
    if not box.sources or own.sum() < MIN_OWN:
        return GaussianProcess.fit(data, box.layout), ()
    process, left_out = GaussianProcess.fit(data.subset(own), box.layout), []
    for name, rows in zip(box.sources, of_source.T, strict=True):
        alone, both = (
            GaussianProcess.fit(data.subset(rows), box.layout),
            GaussianProcess.fit(data.subset(own | rows), box.layout),
        )
        if both.negative_log_density > process.negative_log_density + alone.negative_log_density:
            left_out.append(name)
        else:
            process, own = both, own | rows
    return process, tuple(left_out)


def _is_among(u: Array, known: Array) -> NDArray[np.bool_]:
    """Which encoded points are equal to a known one."""
    away = np.abs(u[:, None] - known[None]).max(axis=2)
    return np.asarray((away <= 1e-9).any(axis=1), dtype=np.bool_)
