"""A full run's saves and evaluations follow its length, its size and the number of its workers; explicit intervals win."""

from __future__ import annotations

import math
from typing import Any

import pytest

from muscale.plans.cadence import Cadence
from muscale.plans.device_lines import cadence_line
from muscale.settings.promote import PromoteSettings
from proxy_models.architecture.config import ModelConfig
from tests.gpu_free.cases import SHAPES

TINY = ModelConfig(d_model=80, n_layers=2)
LLAMA_8B = SHAPES["8B"]


def cadence(
    model: ModelConfig = LLAMA_8B, n_tokens: int = 10**11, evaluation_tokens: int = 10**7, **settings: Any
) -> Cadence:
    return Cadence.of(
        PromoteSettings(**settings), model, optimizer="adamw", n_tokens=n_tokens, evaluation_tokens=evaluation_tokens
    )


def test_a_short_run_is_saved_and_evaluated_twenty_times() -> None:
    short = cadence(TINY, 7_000_000, 32_768)
    assert (short.checkpoints, short.evaluations) == (20, 20)
    assert short.evaluation_share == pytest.approx(20 * 32_768 / (3 * 7_000_000))


@pytest.mark.parametrize("n_tokens", [10**5, 10**7, 10**9, 10**11, 10**13])
def test_evaluations_by_default_are_few_and_cost_little(n_tokens: int) -> None:
    found = cadence(n_tokens=n_tokens, evaluation_tokens=32_768)
    assert 1 <= found.evaluations <= 100
    assert found.evaluations == 1 or found.evaluation_share <= (0.02 if found.evaluations > 20 else 0.1)


def test_time_between_checkpoints_is_youngs() -> None:
    found = cadence(workers=256)
    between_faults = 54 * 24 * 16_384 / 419 / 256 * 3600  # seconds; arXiv 2407.21783, section 3.3.4
    saves = 2 + 12 * LLAMA_8B.n_params_total / 256 / 1e9  # weights and two moments in fp32
    assert found.save_seconds == pytest.approx(saves)
    assert found.checkpoint_every_minutes == pytest.approx(math.sqrt(2 * saves * between_faults) / 60, rel=1e-3)


@pytest.mark.parametrize("workers", [1, 8, 512, 4096, 65_536])
def test_default_saves_take_at_most_a_hundredth_of_the_time(workers: int) -> None:
    found = cadence(workers=workers)
    assert (share := found.save_share(None)) is not None
    assert share <= 0.01 * (1 + 1e-9)
    assert found.checkpoint_every_minutes is not None
    assert found.checkpoint_every_minutes <= 60 or share == pytest.approx(0.01)


def test_explicit_intervals_win() -> None:
    tokens = cadence(checkpoint_every_tokens=10**9, evaluate_every_tokens=10**10)
    assert (tokens.checkpoints, tokens.checkpoint_every_minutes, tokens.evaluations) == (100, None, 10)
    minutes = cadence(checkpoint_every_minutes=90)
    assert (minutes.checkpoints, minutes.checkpoint_every_minutes) == (20, 90)
    assert cadence(evaluation="async").evaluate_every_tokens is None
    assert cadence(evaluation="async").evaluations == 1, "the one at the end"


def test_the_gate_refuses_the_intervals_of_a_toy_for_a_large_run() -> None:
    toys = cadence(checkpoint_every_tokens=500_000, evaluate_every_tokens=200_000, workers=64)
    line = cadence_line(toys, run_seconds=10**11 * LLAMA_8B.train_flops_per_token / (64 * 4e14))
    assert line.status == "failed"
    assert "checkpoint_every_tokens" in line.advice
    assert "evaluate_every_tokens" in line.advice
    assert cadence_line(cadence(workers=64), run_seconds=None).status == "passed"
