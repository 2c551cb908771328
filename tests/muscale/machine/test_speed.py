"""The doctor's speed: what a worker trains, the time that the study takes by it, and a model that can't train."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muscale.formatting import format_duration
from muscale.machine.speed import describe_speed, measured_speed, speed_findings
from muscale.plans.costs import cost_of
from muscale.settings.config import StudyConfig
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from proxy_models.training.trainer import SegmentResult, Trainer

MakeStudy = Callable[..., Path]


def test_the_time_is_that_of_the_dry_run_s_compute_over_all_workers(make_study: MakeStudy) -> None:
    path = make_study()
    compute = cost_of("ladder", StudyConfig.read(path))["compute_flops"].sum()
    for workers in (1, 4):
        config = StudyConfig.read(path, [f"resources.workers={workers}"])
        tokens_per_second = compute / (6 * config.model.n_params) / 7200  # two hours of one worker
        found = describe_speed(config, tokens_per_second).found
        assert f"{format_duration(7200 / workers)}, {workers} at a time" in found


def test_the_base_shape_is_trained_as_the_study_would(make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    config = StudyConfig.read(make_study(), ['hyperparameters.optimizer="muon"'])
    trained, train = [], Trainer.train

    def seen(self: Trainer, numerics: Numerics, segment: Segment) -> SegmentResult:
        trained.append((numerics, segment, result := train(self, numerics, segment)))
        return result

    monkeypatch.setattr(Trainer, "train", seen)
    threads = torch.get_num_threads()
    speed = measured_speed(config)
    numerics, segment, result = trained[-1]
    assert speed == pytest.approx(segment.end / result.seconds)
    assert numerics.model == config.model
    assert segment.recipe.optimizer == "muon"
    assert segment.recipe.batch_tokens <= config.hyperparameters.batch_tokens
    assert torch.get_num_threads() == threads


def test_a_model_that_cannot_train_fails_with_its_reason(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("shapes (3, 4) and (5, 6)")

    monkeypatch.setattr(Trainer, "train", broken)
    (found,) = speed_findings(StudyConfig.read(make_study()))
    assert (found.what, found.status) == ("speed", "fail")
    assert "shapes (3, 4) and (5, 6)" in found.found
    assert "muscale check" in found.do


def test_what_trains_elsewhere_has_no_speed_here(make_study: MakeStudy) -> None:
    assert (
        not speed_findings(StudyConfig.read(make_study(), ["resources.gpus_per_worker=1"])) or torch.cuda.is_available()
    )
