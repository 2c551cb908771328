"""How a training ends without a loss, and what is refused before it starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy_models.architecture.families import ModelFamily
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import stem
from proxy_models.training.guard import Divergence
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState
from proxy_models.training.trainer import Trainer

BATCH = 4 * 32
N_TOKENS = 40 * BATCH


def test_a_rate_out_of_all_measure_is_a_divergence_and_no_loss(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    recipe = replace(hyperparameters, learning_rate=1e30).resolve(N_TOKENS)
    result = trainer.train(numerics, stem(recipe, 20 * BATCH), averaged=True)
    assert (result.state, result.loss, result.averaged_loss) == (None, None, None)
    finite = np.isfinite(result.curve.train_loss)
    assert isinstance(result.divergence, Divergence)
    assert result.divergence.step == finite.argmin() > 0
    assert result.divergence.reason == f"the training loss is nan at step {result.divergence.step}"


def test_a_divergence_names_its_step_in_the_run_and_ends_the_training(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    recipe = hyperparameters.resolve(200 * BATCH)
    state = trainer.train(numerics, stem(recipe, 3 * BATCH)).state
    assert state is not None
    state.tensors["weight/readout.weight"][0, 0] = float("nan")
    segment = replace(stem(recipe, 150 * BATCH), start=3 * BATCH)
    result = trainer.train(numerics, segment, state)
    assert result.divergence == Divergence(step=3, reason="the training loss is nan at step 3")
    assert len(result.curve.train_loss) == 32  # and not 147


def test_a_last_step_that_breaks_the_model_is_a_divergence(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    recipe = replace(hyperparameters, learning_rate=1e30).resolve(N_TOKENS)
    result = trainer.train(numerics, stem(recipe, BATCH))
    assert np.isfinite(result.curve.train_loss).all()
    assert result.divergence == Divergence(step=1, reason="the validation loss is not finite")
    assert result.loss is None


@pytest.mark.parametrize(
    ("rate", "reason"), [(100.0, r"more than 10 ln V = 55\.45"), (1e4, r"no better than ln V = 5\.545")]
)
def test_a_finite_loss_that_tells_nothing_is_a_divergence(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, rate: float, reason: str
) -> None:
    recipe = replace(hyperparameters, learning_rate=rate).resolve(N_TOKENS)
    result = trainer.train(numerics, stem(recipe, 20 * BATCH), averaged=True)
    assert np.isfinite(result.curve.train_loss).all()
    assert (result.state, result.loss, result.averaged_loss) == (None, None, None)
    assert result.divergence is not None
    assert result.divergence.step == 20
    assert re.search(reason, result.divergence.reason)


@pytest.mark.parametrize(
    "values",
    [{"learning_rate": 1.0}, {"output_multiplier": 16.0}, {"init_scale": 16.0}, {"zero_readout": True}],
    ids=str,
)
def test_a_run_that_begins_high_or_peaks_is_none(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, values: dict[str, Any]
) -> None:
    recipe = replace(hyperparameters, **values).resolve(N_TOKENS)
    for n_steps in (1, 20):
        result = trainer.train(numerics, stem(recipe, n_steps * BATCH))
        assert result.divergence is None
        assert result.loss is not None


def test_a_state_of_another_position_is_refused(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    recipe = hyperparameters.resolve(N_TOKENS)
    state = trainer.train(numerics, stem(recipe, 5 * BATCH)).state
    late = replace(stem(recipe, 20 * BATCH), start=10 * BATCH)
    with pytest.raises(ValueError, match="1280.*640"):
        trainer.train(numerics, late, state)
    with pytest.raises(ValueError, match="1280.*0"):
        trainer.train(numerics, late)


def test_a_state_trained_under_another_table_is_refused_also_from_disk(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, family: ModelFamily, tmp_path: Path
) -> None:
    recipe = hyperparameters.resolve(N_TOKENS)
    state = trainer.train(numerics, stem(recipe, 5 * BATCH)).state
    assert state is not None
    state.save(tmp_path / "state.pt")
    assert TrainState.load(tmp_path / "state.pt").parametrization == numerics.parametrization("adamw")
    later = replace(stem(recipe, 10 * BATCH), start=5 * BATCH)
    rebased = replace(numerics, base=family.at(width=16))
    with pytest.raises(
        ValueError, match=r"another parametrization: embedding.weight's width_mult is 1.0 there and 2.0"
    ):
        trainer.train(rebased, later, TrainState.load(tmp_path / "state.pt"))
    other = replace(later, recipe=replace(recipe, optimizer="lion"))
    with pytest.raises(ValueError, match="optimizer.*adamw.*lion"):
        trainer.train(numerics, other, state)


def test_rungs_too_near_to_each_other_to_average_between_are_refused(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    recipe = hyperparameters.resolve(N_TOKENS)
    state = trainer.train(numerics, stem(recipe, 18 * BATCH)).state
    with pytest.raises(ValueError, match=r"begins at 2176 tokens, before .* 2304: rungs must lie .* factor 1.18 apart"):
        trainer.train(numerics, replace(stem(recipe, 20 * BATCH), start=18 * BATCH), state, averaged=True)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"corpus_key": "other"}, "corpus_key must be .* got other"),
        ({"evaluation_tokens": 10**9}, "the validation split of .* tokens has"),
    ],
)
def test_numerics_that_this_trainer_can_not_serve_are_refused(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, change: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        trainer.train(replace(numerics, **change), stem(hyperparameters.resolve(N_TOKENS), BATCH))


def test_a_batch_of_parts_of_sequences_is_refused(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    recipe = replace(hyperparameters, batch_tokens=48).resolve(480)
    with pytest.raises(ValueError, match="batch_tokens must be a multiple of context_length=32, got 48"):
        trainer.train(numerics, stem(recipe, 48))
