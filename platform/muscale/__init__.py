"""muscale: find the hyperparameters, the size, the tokens and the loss of a large training run, then prove it.

import muscale as ms

study = ms.Study.open("study.toml")
study.sweep(), study.transfer(), study.fit(), study.plan(), study.promote()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy_models.lazy import lazily

if TYPE_CHECKING:
    from muscale.bundles.bundle import Bundle, load_bundle
    from muscale.bundles.evaluate_weights import evaluate
    from muscale.errors import BundleError, MuscaleError, StageError, StudyDirectoryError, StudyFileError
    from muscale.full_runs.amend.amendment import Amendment
    from muscale.full_runs.amend.amendment_plan import AmendmentPlan
    from muscale.full_runs.amend.train import Amended
    from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
    from muscale.full_runs.promote.dry_run import DryRun
    from muscale.full_runs.promote.promotion import Promotion
    from muscale.full_runs.promote.smoke_test import SmokeTest
    from muscale.monitoring.anneal_now import AnnealNow
    from muscale.monitoring.calibration import Calibration
    from muscale.monitoring.run_status import RunStatus
    from muscale.plans.gate import Gate
    from muscale.plans.plan import Plan
    from muscale.search.sweep_result import SweepResult
    from muscale.settings.config import StudyConfig
    from muscale.study import Study

__all__ = [
    "Amended",
    "Amendment",
    "AmendmentPlan",
    "AnnealNow",
    "Bundle",
    "BundleError",
    "Calibration",
    "CheckpointEvaluation",
    "DryRun",
    "Gate",
    "MuscaleError",
    "Plan",
    "Promotion",
    "RunStatus",
    "SmokeTest",
    "StageError",
    "Study",
    "StudyConfig",
    "StudyDirectoryError",
    "StudyFileError",
    "SweepResult",
    "evaluate",
    "load_bundle",
]

_HOMES = {
    "Bundle": "bundles.bundle",
    "BundleError": "errors",
    "Calibration": "monitoring.calibration",
    "CheckpointEvaluation": "full_runs.checkpoints.evaluation",
    "Amendment": "full_runs.amend.amendment",
    "AmendmentPlan": "full_runs.amend.amendment_plan",
    "AnnealNow": "monitoring.anneal_now",
    "Amended": "full_runs.amend.train",
    "Gate": "plans.gate",
    "MuscaleError": "errors",
    "Plan": "plans.plan",
    "Promotion": "full_runs.promote.promotion",
    "DryRun": "full_runs.promote.dry_run",
    "RunStatus": "monitoring.run_status",
    "SmokeTest": "full_runs.promote.smoke_test",
    "StageError": "errors",
    "Study": "study",
    "StudyConfig": "settings.config",
    "StudyDirectoryError": "errors",
    "StudyFileError": "errors",
    "SweepResult": "search.sweep_result",
    "evaluate": "bundles.evaluate_weights",
    "load_bundle": "bundles.bundle",
}

__getattr__, __dir__ = lazily("muscale", _HOMES)
