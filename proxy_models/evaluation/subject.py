"""A subject of evaluation from stored weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from proxy_models.architecture.families import family_of, with_weights
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.measure import Subject
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import set_multipliers
from proxy_models.training.precision import DTYPES


def subject_of(
    weights: Mapping[str, Tensor],
    numerics: Numerics,
    multipliers: ForwardMultipliers,
    *,
    corpus: Corpus | None,
    tokens: int,
    device: torch.device,
    progress: Path | None = None,
) -> Subject:
    """Return a model with these weights, by parameter name, as measures see it: in its run's precision, without dropout.

    Raises:
        FamilyError, KeyError, RuntimeError: If the weights are those of another model.
    """
    model = with_weights(numerics.model, weights).to(device)
    set_multipliers(model, multipliers)
    family_of(numerics.model).set_precision(model, DTYPES[numerics.precision])
    return Subject(model=model.eval(), numerics=numerics, text=corpus, tokens=tokens, progress=progress)
