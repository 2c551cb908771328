"""muscale's own searcher: a surface over hyperparameters, size and tokens, which starts from the runs at other scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from muscale.search.protocols import Known
from muscale.search.searchers import Sampler
from scaling import ResponseSurface, SearchBox, fit_response
from scaling.optima.batch_law import PRIOR as BATCH_WITH_TOKENS
from scaling.optima.horizon import PRIOR as RATE_WITH_TOKENS
from scaling.search.response import MIN_OWN
from scaling.search.search_box import OFFSET_SPREAD, SOURCE
from search_spaces import Choice, Config, Distribution, Fixed, Integer, Ordinal, Simplex, Space, is_log

N_PARAMS, N_TOKENS = "n_params", "n_tokens"
RATE, BATCH = "learning_rate", "batch_tokens"


def box_of(space: Space) -> SearchBox:
    """The space as the surface sees it: log2 where the distribution is logarithmic, an ordinal by its rank."""
    bounds: dict[str, tuple[float, float]] = {}
    choices: dict[str, tuple[Any, ...]] = {}
    for name in space.searched:
        distribution = space[name]
        if isinstance(distribution, Choice):
            choices[name] = distribution.values
        elif isinstance(distribution, Simplex):
            bounds |= {f"{name}.{place}": (0.0, 1.0) for place in range(distribution.dimensions)}
        else:
            low, high = (distribution.decode([u]) for u in (0.0, 1.0))
            bounds[name] = _place(distribution, low), _place(distribution, high)
    return SearchBox(bounds=bounds, choices=choices, scales=(N_PARAMS, N_TOKENS))


def expected_drift(space: Space) -> dict[str, dict[str, tuple[float, float]]]:
    """Drift of the optimum in a space's box by the horizon and batch laws' priors, in octaves or ranks per doubling.

    Where the batch is searched too, the rate is the best at the best batch, of which published laws don't agree even about
    the sign: nothing is stated of it. Nor is anything with size, which is the parametrization's to settle.
    """
    drift: dict[str, dict[str, tuple[float, float]]] = {}
    if BATCH in space.searched and (unit := _octaves(space[BATCH])):
        drift[BATCH] = {N_TOKENS: (BATCH_WITH_TOKENS[0] / unit, BATCH_WITH_TOKENS[1] / unit)}
    elif RATE in space.searched and (unit := _octaves(space[RATE])):
        drift[RATE] = {N_TOKENS: (-RATE_WITH_TOKENS[0] / unit, RATE_WITH_TOKENS[1] / unit)}
    return drift


def coordinates(space: Space, config: Config) -> dict[str, Any]:
    """Coordinates of a configuration in the box; an inactive value lies in the middle, or at the first choice."""
    point: dict[str, Any] = {}
    for name in space.searched:
        distribution = space[name]
        value = config.get(name, distribution.decode([0.5] * distribution.dimensions))
        if isinstance(distribution, Choice):
            point[name] = value
        elif isinstance(distribution, Simplex):
            point |= {f"{name}.{place}": u for place, u in enumerate(distribution.encode(value))}
        else:
            point[name] = _place(distribution, value)
    return point


def config_at(space: Space, point: dict[str, Any]) -> Config:
    """The configuration at a point of the box."""
    values: dict[str, Any] = {}
    for name, distribution in space.items():
        if isinstance(distribution, Simplex):
            values[name] = distribution.decode([point[f"{name}.{place}"] for place in range(distribution.dimensions)])
        elif name in space.searched:
            values[name] = _value(distribution, point[name])
        else:
            values[name] = distribution.decode([])
    return {name: values[name] for name in space.active(values)}


@dataclass(frozen=True, kw_only=True)
class AcrossScales(Sampler):
    """Suggests the configuration that looks most promising on the surface of `scaling.fit_response`.

    Attributes:
        n_tokens: Tokens of the last rung, to which the sweep's own losses belong. No annealed run has exactly this number, so
            losses of averaged weights are never compared with annealed losses.
        prior_runs: Returns the runs at other scales: the searched hyperparameters, n_params, n_tokens, loss and source ("": this
            study's family). The optimum of a source may differ from this study's by an offset, which is estimated.
    """

    n_params: int
    n_tokens: int
    prior_runs: Callable[[], pd.DataFrame]

    @cached_property
    def known_runs(self) -> pd.DataFrame:
        """The prior runs, asked for at the first suggestion."""
        return self.prior_runs()

    @property
    def scale(self) -> dict[str, float]:
        """Scale of the sweep's own trials."""
        return {N_PARAMS: float(self.n_params), N_TOKENS: float(self.n_tokens)}

    def surface(self, known: Known) -> ResponseSurface:
        """The surface through the prior runs and the sweep's own trials so far."""
        space = self.space
        prior_runs = [(row, _active(space, row)) for row in self.known_runs.to_dict("records")]
        rows = [
            {
                **coordinates(space, config),
                **{name: float(row[name]) for name in (N_PARAMS, N_TOKENS)},
                SOURCE: row.get(SOURCE, ""),
                "loss": row["loss"],
            }
            for row, config in prior_runs
            if _is_comparable(space, config)
        ]
        rows += [
            {
                **coordinates(space, seen.config),
                **self.scale,
                SOURCE: "",
                "loss": np.nan if seen.loss is None else seen.loss,
            }
            for seen in known.observations
            if _is_comparable(space, seen.config)
        ]
        if sum(row[SOURCE] == "" for row in rows) < MIN_OWN:  # too few for an offset: sources are taken as they are
            rows = [{**row, SOURCE: ""} for row in rows]
        sources = tuple(sorted({row[SOURCE] for row in rows} - {""}))
        box = replace(box_of(space), sources=sources, drift=expected_drift(space))
        return fit_response(pd.DataFrame(rows), box=box)

    def propose(self, number: int, known: Known) -> Config:
        """The surface's suggestion, given the prior runs and the sweep's own trials so far."""
        space, scale, surface = self.space, self.scale, self.surface(known)
        pending = _table(
            [{**coordinates(space, config), **scale} for config in known.pending if _is_comparable(space, config)],
            surface.box,
        )
        has_prior = any(distribution.prior for distribution in space.values())

        def log_prior(points: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.float64]]:
            configs = [config_at(space, point) for point in points.to_dict("records")]
            return np.array([space.log_prior(c) if space.contains(c) else -np.inf for c in configs])

        def suggested(attempt: int) -> Config:
            point = surface.suggest(
                scale,
                pending=pending,
                prior=log_prior if has_prior else None,
                trials=self._trials if _is_uneven(space) else None,
                seed=self.seed + attempt,
            )
            return config_at(space, point)

        return self._allowed(number, suggested)

    def _trials(self, points: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray[Any, np.dtype[np.bool_]]]:
        """The points of the configurations at these points, rounded and with inactive values in the middle, and which are allowed."""
        configs = [config_at(self.space, point) for point in points.to_dict("records")]
        allowed = np.array([self.space.contains(config) for config in configs])
        return pd.DataFrame([coordinates(self.space, config) for config in configs], columns=list(points)), allowed

    def describe_disagreements(self, known: Known) -> list[str]:
        """Messages about the sources that disagree with the study's own runs: left out, or with another optimum.

        An optimum is another one if a coordinate's offset is above `OFFSET_SPREAD` of its range.
        """
        surface = self.surface(known)
        messages = [
            f"{name} disagrees with this study's own runs: the searcher left it out" for name in surface.left_out
        ]
        for source in surface.offsets.columns.difference(surface.left_out, sort=False):
            far = [
                f"{name} {_format_offset(self.space, str(name), offset)}"
                for name, offset in surface.offsets[source].items()
                if abs(offset) > OFFSET_SPREAD * (surface.box.bounds[name][1] - surface.box.bounds[name][0])
            ]
            if far:
                messages.append(
                    f"{source} has its optimum elsewhere than this study, at the same size and length: {', '.join(far)}; "
                    "the searcher corrected for it"
                )
        return messages


def _is_uneven(space: Space) -> bool:
    """Whether points of the box may share a configuration, or have none that is allowed."""
    kinds = [type(space[name]) for name in space.searched]
    rounded = any(issubclass(kind, Integer | Ordinal) for kind in kinds) or all(kind is Choice for kind in kinds)
    return rounded or bool(space.constraints) or any(distribution.when for distribution in space.values())


def _format_offset(space: Space, name: str, offset: float) -> str:
    return f"× {2**offset:.3g}" if name in space and is_log(space[name]) else f"{offset:+.3g}"


def _active(space: Space, row: Mapping[Any, Any]) -> Config:
    """Return a row's values without those that are missing, which a table has for inactive hyperparameters."""
    values = {name: row[name] for name in space if name in row}
    return {name: value for name, value in values.items() if value is not None and value == value}  # NaN is not


def _is_comparable(space: Space, config: Mapping[str, Any]) -> bool:
    """Whether a configuration has no value that the space does not know; a number may lie outside the bounds."""
    for name, distribution in space.items():
        if name not in config:
            continue
        listed = distribution.values if isinstance(distribution, Choice | Ordinal) else ()
        if isinstance(distribution, Fixed):
            listed = (distribution.value,)
        if listed and config[name] not in listed:
            return False
    return True


def _table(rows: Sequence[dict[str, Any]], box: SearchBox) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[*box.names, *box.scales])


def _octaves(distribution: Distribution) -> float:
    """Octaves in a unit of the box, the mean of those between an ordinal's ranks; 0 where they don't rise like that."""
    if isinstance(distribution, Ordinal):
        first, last = distribution.values[0], distribution.values[-1]
        if isinstance(first, str) or isinstance(last, str) or not 0 < first < last:
            return 0.0
        return math.log2(last / first) / (len(distribution.values) - 1)
    return float(is_log(distribution))


def _place(distribution: Distribution, value: Any) -> float:
    if isinstance(distribution, Ordinal):
        return float(distribution.values.index(value))
    return float(np.log2(value)) if is_log(distribution) else float(value)


def _value(distribution: Distribution, place: Any) -> Any:
    if isinstance(distribution, Choice):
        return place
    if isinstance(distribution, Ordinal):
        return distribution.values[min(max(round(place), 0), len(distribution.values) - 1)]
    value = 2.0**place if is_log(distribution) else place
    if isinstance(distribution, Integer):
        value = round(value)
    low, high = distribution.decode([0.0]), distribution.decode([1.0])
    return min(max(value, low), high)
