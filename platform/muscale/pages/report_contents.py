"""The values of a report: `contents` gathers them, `report` draws them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
    from muscale.monitoring.band import Band
    from muscale.monitoring.calibration import Calibration
    from muscale.pages.reproduction import Reproduction
    from muscale.plans.next_stems import NextStems
    from muscale.proxies.comparison import Comparison
    from muscale.search.search_so_far import SearchSoFar
    from muscale.search.sweep_result import SweepResult
    from proxy_models.coordinates.check import CoordinateCheck
    from proxy_models.data.corpus import Corpus
    from scaling import ScalingFit, Verdict


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """Values of a report; None is what is not known yet."""

    name: str
    config: dict[str, Any]
    created_at: str
    runs: pd.DataFrame
    corpus: Corpus | None = None
    check: CoordinateCheck | None = None
    so_far: SearchSoFar | None = None
    sweep: SweepResult | None = None
    transfer: Verdict | None = None
    fit: ScalingFit | None = None
    next_runs: NextStems | None = None
    comparison: Comparison | None = None
    plan: dict[str, Any] | None = None
    forecast: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None
    promotion: dict[str, Any] | None = None
    curve: pd.DataFrame | None = None
    evaluations: pd.DataFrame | None = None
    evaluated: CheckpointEvaluation | None = None
    band: Band | None = None
    calibration: Calibration | None = None
    run_events: pd.DataFrame | None = None
    bundle: str | None = None
    spending: pd.DataFrame = field(default_factory=pd.DataFrame)
    reproduction: Reproduction | None = None
