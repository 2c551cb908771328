"""An ablation: the proxy once more with one component swapped at a time, over seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from muscale.actors.jobs import Job
from muscale.errors import StageError
from muscale.proxies.ladder import branches
from muscale.settings.ablation import AblateSettings, swaps
from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training.numerics import Numerics
from scaling.comparisons.ablation import AS_IT_IS

PURPOSE = "ablate"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One run of an ablation; the component is "" for the model as it is."""

    component: str
    value: str
    job: Job


def variants(settings: AblateSettings, numerics: Numerics, best: Hyperparameters, n_tokens: float) -> list[Variant]:
    """The model as it is and every swap, each over the seeds, all with the same hyperparameters on the same data.

    Args:
        settings: What is swapped.
        numerics: At the base shape.
        best: Hyperparameters, tuned for the model as it is: a swap that wants others looks worse than it could be.
        n_tokens: Of each run, where the settings don't say.

    Raises:
        StageError: If the model is not the built-in decoder, whose components they are.
    """
    length, shape = settings.n_tokens or n_tokens, numerics.model
    if not isinstance(shape, ModelConfig):
        raise StageError(f"ablate: the components are those of the built-in decoder, got {shape}")
    models: list[tuple[str, str, ModelConfig]] = [(AS_IT_IS, "", shape)]
    models += [(name, str(value), model) for name, value, model in swaps(shape, settings.components)]
    found = []
    for component, value, model in models:
        label = f"{component} {value}" if component else "as it is"
        for seed in settings.seeds:
            own = replace(numerics, model=model, base=model, seed=seed)
            (job,) = branches(own, best, [length], tuned_at=length, purpose=PURPOSE, label=f"{label}, seed {seed}")
            found.append(Variant(component=component, value=value, job=job))
    return found


def rows(runs: pd.DataFrame, found: list[Variant]) -> pd.DataFrame:
    """The runs as `scaling.compare_ablations` wants them; loss is NaN where one diverged."""
    outcome = runs[runs["purpose"] == PURPOSE].set_index("key")["loss"]
    return pd.DataFrame(
        [
            {
                "component": variant.component,
                "value": variant.value,
                "n_params": variant.job.chain.numerics.model.n_params,
                "seed": variant.job.chain.numerics.seed,
                "loss": outcome.get(variant.job.chain.key, np.nan),
            }
            for variant in found
        ]
    )
