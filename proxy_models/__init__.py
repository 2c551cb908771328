"""The models to search on, and their training: shape, decoder, parametrization, optimizer, schedule, data, loop, check.

    ModelFamily(base=ModelConfig(…)).at(width=…)     a shape, from the base at which values are tuned
    parametrize(config, base)                        class, initial values, rate, decay of every tensor at that shape
    Family                                           a custom family: its `build`; all functions here take its members
    module_shapes(…), parametrization_of(shapes, …)  the table of any module
    initialize(model, …), make_optimizer(model, …)   a model that follows the table
    Hyperparameters(…)                               hyperparameters of a training, given at the base shape
    write_corpus(folder, source), Corpus.open(…)     tokens, and the batches that steps see
    Trainer(corpus).train(…)                         one segment of a run after another, in one warm process
    Tasks, Samples, HeldOutLoss, Memorisation, QuantisedLoss, Ablation    measures of a trained model, for `muscale.evaluate`
    coordinate_check(family, …)                      does every activation move by the same amount at every size? -> CoordinateCheck

Shapes, tables, hyperparameters and corpora work without torch, which is imported only when needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy_models.lazy import lazily

if TYPE_CHECKING:
    from proxy_models.architecture.base_shapes import module_shapes
    from proxy_models.architecture.config import ModelConfig
    from proxy_models.architecture.decoder import Decoder
    from proxy_models.architecture.families import ModelFamily
    from proxy_models.architecture.family import Family
    from proxy_models.architecture.parametrization import Parametrization, parametrization_of, parametrize
    from proxy_models.coordinates.check import CoordinateCheck
    from proxy_models.coordinates.measurement import coordinate_check
    from proxy_models.data.corpus import Corpus
    from proxy_models.data.corpus_writing import write_corpus
    from proxy_models.evaluation.ablation import Ablation
    from proxy_models.evaluation.held_out_loss import HeldOutLoss
    from proxy_models.evaluation.memorisation import Memorisation
    from proxy_models.evaluation.quantised_loss import QuantisedLoss
    from proxy_models.evaluation.samples import Samples
    from proxy_models.evaluation.tasks import Tasks
    from proxy_models.recipes.hyperparameters import Hyperparameters
    from proxy_models.training.optimizer import initialize, make_optimizer
    from proxy_models.training.trainer import Trainer

__all__ = [
    "Ablation",
    "CoordinateCheck",
    "Corpus",
    "Decoder",
    "Family",
    "HeldOutLoss",
    "Hyperparameters",
    "Memorisation",
    "ModelConfig",
    "ModelFamily",
    "Parametrization",
    "QuantisedLoss",
    "Samples",
    "Tasks",
    "Trainer",
    "coordinate_check",
    "initialize",
    "make_optimizer",
    "module_shapes",
    "parametrization_of",
    "parametrize",
    "write_corpus",
]

_HOMES = {
    "Ablation": "evaluation.ablation",
    "CoordinateCheck": "coordinates.check",
    "Corpus": "data.corpus",
    "Decoder": "architecture.decoder",
    "Family": "architecture.family",
    "HeldOutLoss": "evaluation.held_out_loss",
    "Hyperparameters": "recipes.hyperparameters",
    "Memorisation": "evaluation.memorisation",
    "ModelConfig": "architecture.config",
    "ModelFamily": "architecture.families",
    "Parametrization": "architecture.parametrization",
    "QuantisedLoss": "evaluation.quantised_loss",
    "Samples": "evaluation.samples",
    "Tasks": "evaluation.tasks",
    "Trainer": "training.trainer",
    "coordinate_check": "coordinates.measurement",
    "initialize": "training.optimizer",
    "make_optimizer": "training.optimizer",
    "module_shapes": "architecture.base_shapes",
    "parametrization_of": "architecture.parametrization",
    "parametrize": "architecture.parametrization",
    "write_corpus": "data.corpus_writing",
}

__getattr__, __dir__ = lazily("proxy_models", _HOMES)
