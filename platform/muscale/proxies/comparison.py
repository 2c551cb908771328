"""The study and its variants: each is tuned the same way, trained at increasing sizes, and compared with the study.

The next runs depend on the ledger's runs alone, so the same command continues after an interruption with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, SupportsFloat

import numpy as np
import pandas as pd

from muscale.actors.jobs import Job
from muscale.errors import StageError, refusing
from muscale.proxies.compared_losses import ComparedLosses
from muscale.proxies.variant_rates import MAX_STEPS, Train, first_steps, tune_rates
from muscale.proxies.variants import Variant, policy, stems_of, variants, widths_of
from muscale.settings.compare import BASELINE
from muscale.settings.config import StudyConfig
from muscale.settings.plan import Stem
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import input_key
from muscale.store.statements import find
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from scaling import HorizonLaw, ScalingError, VariantComparison, compare_variants
from scaling.serialization import JsonResult, TableLayout

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison(JsonResult):
    """Compute multipliers and verdicts of the study's variants at its target.

    Attributes:
        outcome: Multipliers, verdicts and next runs.
        tuned: By variant: octaves (best rate above the study's on equal grids; NaN if no rate trained), at_end (whether the best rate
            lies at an end of its grid), rates (number tried).
        asked: The keys of [compare] and [variants.NAME] behind the result, with sizes and target resolved; {} in older results.
    """

    outcome: VariantComparison
    tuned: Annotated[pd.DataFrame, TableLayout("records")] = field(repr=False)
    asked: dict[str, Any] = field(default_factory=dict, repr=False)

    def plot(self) -> go.Figure:
        """Plot the multiplier of each variant against compute, with its band up to the target."""
        return self.outcome.plot()

    @property
    def _tuning(self) -> str:
        rates = ", ".join(
            f"{row['variant']} {row['octaves']:+.2f}" + (" (at the edge of its grid)" if row["at_end"] else "")
            if math.isfinite(row["octaves"])
            else f"{row['variant']} none: no rate of its grid trains"
            for row in self.tuned.to_dict("records")
        )
        return f"tuned, best rate in octaves above the study's: {rates}"

    @property
    def about(self) -> str:
        """Basis of the verdicts, the runs that would decide, and how each variant was tuned."""
        return f"{self.outcome.about}\n{self._tuning}"

    def __str__(self) -> str:
        return f"{self.outcome}\n{self._tuning}"


def compare(
    config: StudyConfig,
    numerics: Numerics,
    best: Hyperparameters,
    horizon: HorizonLaw | None,
    ledger: Ledger,
    train: Train,
    corpora: Mapping[str, Corpus],
) -> Comparison:
    """Tune every variant, train the undecided ones size after size, and record the comparison.

    Args:
        numerics: Numerics of the study at its base shape.
        horizon: Horizon law of the study; None if every size is as long as the rate grids, whose best rate is then used.
        train: Trains the runs of each step; known runs are included.
        corpora: Corpora of the variants that have their own data.

    Raises:
        StageError: If there are no variants, or the runs can't be compared.
    """
    if not config.variants:
        raise StageError(
            "compare: the study file has no variants; add a table [variants.NAME] with the settings that differ"
        )
    found, rates = tune_rates(config, variants(config, numerics, best, corpora), ledger, train)
    study, *others = found
    if study.log2_rate is None:
        raise StageError("compare: no rate of the study's own grid trains at every width; see `muscale transfer`")
    own = 2**study.log2_rate
    rate: Callable[[float], SupportsFloat] = (lambda _: own) if horizon is None else horizon.rate
    octaves = {v.name: math.nan if v.log2_rate is None else v.log2_rate - study.log2_rate for v in found}
    stems = stems_of(config)
    keys: list[str] = []
    rows: list[dict[str, Any]] = []
    for untrained in (v for v in others if v.log2_rate is None):  # at no rate: one diverged run of the first size
        flops = 6.0 * stems[0].of(untrained.family).n_params * stems[0].n_tokens
        rows.append(_row(untrained, 1, config.compare.seeds[0], flops, math.nan))
    running = [v for v in others if v.log2_rate is not None]
    losses = ComparedLosses.of(ledger, corpora, numerics.model.loss_unit)
    for number, stem in enumerate(stems, start=1):
        wanted = [
            (v, seed, v.size_job(stem, seed, policy(rate, octaves[v.name])))
            for v, seed in _runs(config, study, running)
        ]
        train(f"compare, {_size(stem)}", [job for _, _, job in wanted])
        outcomes = ledger.outcomes(job.chain for _, _, job in wanted)
        for variant, seed, job in wanted:
            keys.append(job.chain.key)
            loss = losses.loss(variant.name, outcomes[job.chain.key])
            rows.append(_row(variant, number, seed, job.chain.compute_flops, loss))
        if number == 1 < len(stems):
            continue
        outcome = _outcome(config, rows, len(stems), losses.unit)
        running = [v for v in running if v.name in outcome.undecided]
        if not running:
            break
    tuned = [
        {"variant": v.name, "octaves": octaves[v.name], "at_end": v.at_end, "rates": rates[v.name]} for v in others
    ]
    result = Comparison(outcome=outcome, tuned=pd.DataFrame(tuned), asked=_asked(config))
    settings = [
        config.compare.target_flops,
        config.compare.worth,
        config.compare.error,
        config.plan.budget.compute_flops,
    ]
    ledger.record_result(ResultKind.COMPARISON, input_key(keys, *settings), result.to_dict())
    return result


def latest_comparison(config: StudyConfig, ledger: Ledger) -> Comparison | None:
    """Return the latest comparison with the study file's settings, or else the latest one with any sizes or target."""
    rows = ledger.read(find, "results", {"kind": ResultKind.COMPARISON.value}, ["-created_at"])
    asked = _asked(config)
    fitting = [row for row in rows if row["payload"].get("asked") == asked]
    return next((Comparison.from_dict(row["payload"]) for row in (*fitting, *rows)), None)


def _asked(config: StudyConfig) -> dict[str, Any]:
    stems = config.compare.stems or config.ladder.stems
    resolved = {"stems": stems, "widths": widths_of(config), "target_flops": _target(config, len(stems))}
    compare = config.compare.model_copy(update=resolved).model_dump(mode="json")
    variants = {name: own.model_dump(mode="json", exclude_unset=True) for name, own in config.variants.items()}
    return {**compare, "variants": variants}


def _target(config: StudyConfig, n_sizes: int) -> float | None:
    """Return the compute at which variants are judged; None means that of the largest run, if there is one size and no target."""
    if config.compare.target_flops is None and n_sizes > 1:
        return config.plan.budget.compute_flops
    return config.compare.target_flops


def most_jobs(config: StudyConfig, numerics: Numerics, best: Hyperparameters) -> Iterator[tuple[str, str, Job]]:
    """Generate every run that a comparison may need, with a placeholder rate at the sizes: (variant, "rates" or size, job)."""
    first = first_steps(config)
    steps = [float(step) for step in np.arange(first[0] - MAX_STEPS, first[-1] + MAX_STEPS + 1)]
    for variant in variants(config, numerics, best):
        for width in widths_of(config):
            yield from ((variant.name, "rates", variant.grid_job(config, width, step)) for step in steps)
        for stem in stems_of(config):
            for seed in config.compare.seeds:
                yield variant.name, _size(stem), variant.size_job(stem, seed, lambda _: best.learning_rate)


def _size(stem: Stem) -> str:
    return f"{stem}, {stem.n_tokens} tokens"


def _runs(config: StudyConfig, study: Variant, running: Sequence[Variant]) -> list[tuple[Variant, int]]:
    return [(variant, seed) for variant in (study, *running) for seed in config.compare.seeds]


def _row(variant: Variant, size: int, seed: int, flops: float, loss: float) -> dict[str, Any]:
    return {"variant": variant.name, "size": size, "seed": seed, "compute_flops": flops, "loss": loss}


def _outcome(config: StudyConfig, rows: list[dict[str, Any]], n_sizes: int, unit: str) -> VariantComparison:
    """Compare the variants so far, with the verdicts of the looks that decided them; raise StageError if that is impossible."""
    settings = config.compare
    with refusing("compare", ScalingError, ValueError):
        return compare_variants(
            pd.DataFrame(rows),
            BASELINE,
            target_flops=_target(config, n_sizes),
            worth=settings.worth,
            error=settings.error,
            n_looks=max(1, n_sizes - 1),
            unit=unit,
        )
