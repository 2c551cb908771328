"""muscale: find the hyperparameters, the size, the tokens and the loss of a large training run, then prove it.

import muscale as ms

study = ms.Study.open("study.toml")
study.sweep(), study.transfer(), study.fit(), study.plan(), study.promote()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muscale.bundle import Bundle, load_bundle
    from muscale.calibration import Calibration
    from muscale.checkpoint_evaluation import CheckpointEvaluation, evaluate_checkpoint
    from muscale.config import StudyConfig
    from muscale.continuation import Continuation
    from muscale.continuing import Continued
    from muscale.errors import BundleError, MuscaleError, StageError, StudyDirectoryError, StudyFileError
    from muscale.gate import Gate
    from muscale.planning import Plan
    from muscale.promotion import Promotion
    from muscale.prospect import Prospect
    from muscale.rehearsal import Rehearsal
    from muscale.study import Study
    from muscale.sweep_result import SweepResult
    from muscale.watch import Watch

__all__ = [
    "Bundle",
    "BundleError",
    "Calibration",
    "CheckpointEvaluation",
    "Continuation",
    "Continued",
    "Gate",
    "MuscaleError",
    "Plan",
    "Promotion",
    "Prospect",
    "Rehearsal",
    "StageError",
    "Study",
    "StudyConfig",
    "StudyDirectoryError",
    "StudyFileError",
    "SweepResult",
    "Watch",
    "evaluate_checkpoint",
    "load_bundle",
]

_HOMES = {
    "Bundle": "bundle",
    "BundleError": "errors",
    "Calibration": "calibration",
    "CheckpointEvaluation": "checkpoint_evaluation",
    "Continuation": "continuation",
    "Continued": "continuing",
    "Gate": "gate",
    "MuscaleError": "errors",
    "Plan": "planning",
    "Promotion": "promotion",
    "Prospect": "prospect",
    "Rehearsal": "rehearsal",
    "StageError": "errors",
    "Study": "study",
    "StudyConfig": "config",
    "StudyDirectoryError": "errors",
    "StudyFileError": "errors",
    "SweepResult": "sweep_result",
    "Watch": "watch",
    "evaluate_checkpoint": "checkpoint_evaluation",
    "load_bundle": "bundle",
}


def __getattr__(name: str) -> Any:
    """Import a public name at first use, so that `import muscale` and `muscale --help` stay light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'muscale' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"muscale.{_HOMES[name]}"), name)
