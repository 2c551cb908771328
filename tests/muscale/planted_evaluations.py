"""A study with evaluated checkpoints, planted: two sizes of the ladder, and a full run with 24 checkpoints and its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from muscale import json_lines
from muscale.actors.jobs import Job
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
from muscale.full_runs.checkpoints.run_description import RunDescription
from muscale.layout import CORPUS, EVALUATIONS
from muscale.plans.score_forecasts import PlannedScore, ScoreForecasts, register_scores
from muscale.store.evaluations import record
from muscale.store.ledger_tables import runs, segments
from muscale.store.lineage import Chain
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.evaluation.measure import Measured, Sample, Score, Subject
from proxy_models.recipes.segments import chain
from tests.muscale.planted_ladder import PlantedPlan, numerics_of

EVIL = "</script><script>window.evil = 1</script>"
PROMPTS = ("The answer is", "def add(a, b):\n    return", EVIL)
CHECKPOINTS = 24
"""Checkpoints of the full run before its end."""
ENVIRONMENT = {"device": "cpu", "python": "3", "torch": "2", "muscale": "0"}
SCORES = f"""
[scores]
prompts = ["The answer is", "def add(a, b):\\n    return", "{EVIL}"]
"""


@dataclass(frozen=True)
class Taken:
    """A measure that was taken elsewhere."""

    name: str
    key: str = "planted"

    def measure(self, subject: Subject) -> Measured:
        raise NotImplementedError


def score(measure: str, name: str, metric: str, value: float, error: float | None = None) -> Score:
    return Score(measure=measure, name=name, metric=metric, value=value, standard_error=error, n=100)


def measured(share: float, n_params: float) -> dict[str, Measured]:
    """Scores and samples at a share of a run."""
    skill = share**0.3 * math.log10(n_params) / 6
    scores = []
    for task, best in (("copying", 0.9), ("arithmetic", 0.4)):
        accuracy = 0.25 + (best - 0.25) * skill
        scores += [
            score("tasks", task, "bits_per_byte", 3 - 2 * skill * best, 0.05),
            score("tasks", task, "accuracy", accuracy, 0.03),
            score("tasks", task, "chance", 0.25),
        ]
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "slept", "until", "noon", EVIL, "while", "rain", "fell"]
    kept = [word for place, word in enumerate(words) if (place * 7 + round(24 * share)) % 5]
    samples = tuple(
        Sample(prompt=prompt, text=f" {' '.join(kept)} {round(100 * share)}", temperature=1.0, seed=0)
        for prompt in PROMPTS
    )
    return {
        "loss": Measured(scores=(score("loss", "", "loss", 4 - 2 * skill, 0.01),)),
        "tasks": Measured(scores=tuple(scores)),
        "samples": Measured(scores=(), samples=samples),
    }


def at_end(n_params: float) -> dict[str, Measured]:
    """Measures that are taken at the end of a run alone."""
    size = math.log10(n_params)
    shares = {"1 time": 0.01, "2–3 times": 0.05, "4–7 times": 0.2, "held out": 0.0}
    return {
        "memorisation": Measured(
            scores=tuple(
                score("memorisation", name, "memorised", share * size / 4, 0.01) for name, share in shares.items()
            )
        ),
        "quantised_loss": Measured(
            scores=tuple(
                one
                for name, bits, increase in (("bf16", 16, None), ("int8", 8, 0.001), ("int4", 4, 0.03))
                for one in (
                    score("quantised_loss", name, "loss", 2 + (increase or 0), 0.01),
                    *([score("quantised_loss", name, "loss_increase", increase, 0.002)] if increase else []),
                    score("quantised_loss", name, "memory_bytes", n_params * bits / 8),
                )
            )
        ),
        "ablation": Measured(
            scores=(
                score("ablation", "", "loss", 2.0, 0.01),
                score("ablation", "layer 0", "loss_increase", 0.5, 0.1),
                score("ablation", "layer 1", "loss_increase", 0.25 * size, 0.05),
            )
        ),
    }


class PlantedEvaluations(PlantedPlan):
    """A study with [scores], whose ladder and full run were evaluated; `ladder` has its annealed chains."""

    def __init__(self, path: Path) -> None:
        path.write_text(path.read_text() + SCORES)
        super().__init__(path)
        self.ladder = [self._ladder_run(width) for width in (32, 64)]
        self._full_run()

    def _ladder_run(self, width: int) -> Chain:
        h, shape = self.config.hyperparameters, numerics_of(self.config)
        numerics = replace(shape, model=replace(shape.model, d_model=width))
        whole = Chain(numerics=numerics, segments=chain(h, 128 * h.batch_tokens))
        for steps in (16, 32, 64):
            self._record(whole.until(steps * h.batch_tokens), measured(steps / 1280, numerics.model.n_params))
        self._record(whole, measured(0.12, numerics.model.n_params) | at_end(numerics.model.n_params))
        return whole

    def _record(self, chain: Chain, found: dict[str, Measured]) -> None:
        for name, measurement in found.items():
            record(self.ledger, chain, Taken(name), measurement, seconds=1.0)

    def _full_run(self) -> None:
        plan, n_params = self.plan, self.plan.model.n_params
        whole = plan.chain(numerics_of(self.config))
        self.directory.mkdir(parents=True)
        RunDescription(
            numerics=whole.numerics,
            multipliers=ForwardMultipliers(embedding=1.0, branch=1.0, readout=1.0, attention=1.0),
            corpus=self.ledger.directory / CORPUS,
            n_tokens=plan.n_tokens,
        ).write(self.directory)
        for number in range(1, CHECKPOINTS + 1):
            tokens = plan.n_tokens * number // (CHECKPOINTS + 1)
            found = list(measured(number / (CHECKPOINTS + 1), n_params).values())
            row = CheckpointEvaluation(
                checkpoint=f"tokens={tokens}",
                tokens=tokens,
                val_loss=4 - 0.05 * number,
                source_losses={},
                scores=tuple(score for one in found for score in one.scores),
                samples=tuple(sample for one in found for sample in one.samples),
                seconds=1.0,
            )
            json_lines.append(self.directory / EVALUATIONS, row.to_dict())
        self.ledger.insert(
            segments, **whole.row(), trained_from=0, loss=2.5, source_losses={}, seconds=1.0, environment=ENVIRONMENT
        )
        job = Job(purpose="full", label=f"plan {plan.key}", hyperparameters=plan.hyperparameters, chain=whole)
        self.ledger.insert(runs, **job.row(whole.key))
        self._record(whole, measured(1.0, n_params) | at_end(n_params))
        forecast = PlannedScore(
            task="copying", metric="accuracy", value=0.7, low=0.6, high=0.8, method="direct", errors={"direct": 0.02},
            signal_to_noise=9.0,
        )  # fmt: skip
        other = PlannedScore(task="arithmetic", metric="accuracy", errors={}, reasons=("signal to noise is 1.1",))
        register_scores(ScoreForecasts(plan=plan.key, level=0.9, scores=(forecast, other)), self.ledger)
