"""A trial of a custom Tuner: a worker in Tune's process trains it from rung to rung, like the Tune trials of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune

from muscale.actors.jobs import Job
from muscale.actors.work import WORST_LOSS
from muscale.actors.worker import open_worker
from muscale.errors import StageError
from muscale.search.sweep_jobs import history_from_json, history_of, history_to_json
from muscale.search.sweep_steps import rung_loss
from muscale.search.trial import TrialPlan
from muscale.settings.space_rules import FIXED_IN_A_SWEEP
from muscale.settings.sweep import SweepSettings
from muscale.settings.tables import ResourceSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import runs
from proxy_models.architecture.member import NATS, Member
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.stages import CHANGEABLE
from proxy_models.training.guard import MOST_UNIFORMS
from search_spaces import Config, Space

_CHECKPOINT = "segments.json"


def diverged_loss(model: Member) -> float:
    """Return what a divergence reports, since Tune takes no NaN: 10 ln V for nats per token, else more than any loss."""
    return MOST_UNIFORMS * math.log(model.vocab_size) if model.loss_unit == NATS else WORST_LOSS


def trial_values(config: Mapping[str, Any], plan: TrialPlan, space: Space) -> Config:
    """Return the active hyperparameters of a configuration, plain values.

    Args:
        space: The study's, whose conditions hold; values that the configuration leaves out are those of the plan.

    Raises:
        StageError: If a name is no hyperparameter, or all trials share its value, or the batch does not divide the rungs.
    """
    known = [field.name for field in fields(Hyperparameters)]
    if unknown := [name for name in config if name not in known]:
        raise StageError(f"tune: {unknown[0]} is not a hyperparameter; the hyperparameters are {', '.join(known)}")
    if fixed := [name for name in config if name in FIXED_IN_A_SWEEP or name.startswith("swap_")]:
        rule = "all trials have that of [hyperparameters], since rungs are compared at equal lengths"
        raise StageError(f"tune: {fixed[0]}: {rule}; leave it out of param_space, got {config[fixed[0]]!r}")
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in config.items()}
    if "batch_tokens" in values:
        values["batch_tokens"] = _batch(values["batch_tokens"], plan)
    inactive = {*space} - {*space.active({name: values.get(name, getattr(plan.defaults, name)) for name in space})}
    return {name: value for name, value in values.items() if name not in inactive}


def _batch(value: Any, plan: TrialPlan) -> int:
    """Return a batch in tokens as an integer; raise StageError unless it divides every rung and is a multiple of the context."""
    context, rungs = plan.numerics.model.context_length, ", ".join(f"{tokens:,}" for tokens in plan.rung_tokens)
    whole = isinstance(value, int | float) and value > 0 and float(value).is_integer()
    if not whole or value % context or any(tokens % value for tokens in plan.rung_tokens):
        rule = f"must be a multiple of the context, {context}, that divides the rungs of {rungs} tokens"
        raise StageError(f"tune: batch_tokens: {rule}, got {value!r}")
    return int(value)


class StudyTrainable(tune.Trainable):
    """Each step trains to the next rung, or takes what the ledger knows; a checkpoint is the trial's history, not its weights."""

    def setup(  # type: ignore[override]
        self,
        config: dict[str, Any],
        *,
        plan: TrialPlan,
        settings: SweepSettings,
        ledger: Ledger,
        resources: ResourceSettings,
        package: str,
    ) -> None:
        """Start a worker and its first trial."""
        self._plan, self._settings, self._ledger = plan, settings, ledger
        self._worker = open_worker(ledger, resources, package)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Start another trial with the same worker."""
        self._path, self._rung = history_of(trial_values(new_config, self._plan, self._settings.space)), 0
        return True

    def step(self) -> dict[str, Any]:
        """Train to the next rung, and at the last one to the annealed end; one that has diverged trains nothing more."""
        plan, rung = self._plan, self._rung
        outcome = self._worker.reach(plan.rung(self._path, rung))
        loss = rung_loss(plan, self._path, rung, outcome, rank_by=self._settings.rank_by, worker=self._worker)
        self._rung += 1
        result = {
            "loss": diverged_loss(plan.numerics.model) if loss is None else loss,
            "n_tokens": plan.rung_tokens[rung],
            "segment": outcome.key,
            "diverged": loss is None,
            "done": rung == plan.top,  # not where it diverged: Tune's synchronous PBT waits for ever for one that ended
        }
        return result | self._annealed() if loss is not None and rung == plan.top else result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the segments trained so far; the ledger keeps their states."""
        history = {"path": history_to_json(self._path), "rung": self._rung}
        (Path(checkpoint_dir) / _CHECKPOINT).write_text(json.dumps(history))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from a trial's segments, its own or a donor's; raise StageError if a value differs that can't change in mid-run."""
        saved = json.loads((Path(checkpoint) / _CHECKPOINT).read_text())
        own, donor = self._path[-1][1], history_from_json(saved["path"])
        self._rung = int(saved["rung"])
        if not self._rung:
            return
        copied = donor[-1][1]
        if changed := [name for name in {**copied, **own} if own.get(name) != copied.get(name)]:
            if fixed := [name for name in changed if name not in CHANGEABLE]:
                raise StageError(f"tune: a copied trial can change {', '.join(CHANGEABLE)}; got another {fixed[0]}")
            if not self._plan.cools_down:
                schedule = self._plan.defaults.schedule
                raise StageError(
                    f'tune: a copied trial needs a schedule with a cooldown, such as "wsd"; got "{schedule}"'
                )
            donor = (*donor, (self._rung, own))
        self._path = donor

    def _annealed(self) -> dict[str, Any]:
        """Train the annealed end, and note it as a run of the study."""
        plan = self._plan
        job = Job(
            purpose="tune",
            label=f"Tune {self.trial_id}",
            hyperparameters=plan.followed(self._path, plan.top),
            chain=plan.branch(self._path, plan.top),
        )
        outcome = self._worker.reach(job.chain)
        self._ledger.insert(runs, **job.row(outcome.key))
        return {"annealed_loss": math.nan if outcome.loss is None else outcome.loss}
