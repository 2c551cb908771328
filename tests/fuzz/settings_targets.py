"""Readers of what people write by hand or edit: study, stage and plan files, spaces, prepared runs, sweeps of others."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

from muscale.store.tables import ResultKind
from tests.fuzz.planned_study import planned_study
from tests.fuzz.target import Target


class StudyFile(Target):
    suffix = ".toml"
    ramped = (
        "hyperparameters.schedule='step'",
        "hyperparameters.batch_doublings=1",
        "hyperparameters.batch_ramp_tokens=1024",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from importlib import resources

        from tests.muscale.conftest import MICRO

        self.seeds = [MICRO.encode(), (resources.files("muscale") / "quickstart.toml").read_bytes()]
        self.seeds += [self.whole(folder, *settings) for settings in ((), self.ramped)]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StudyFileError

        return (StudyFileError,)

    def read(self, path: Path) -> object:
        from muscale import StudyConfig

        config = StudyConfig.read(path)
        return config.to_dict(), config.rung_tokens()

    @staticmethod
    def whole(folder: Path, *settings: str) -> bytes:
        """Every key that there is, so that none stays as it is."""
        import tomlkit

        from muscale import StudyConfig
        from tests.muscale.conftest import MICRO

        path = folder.with_name(f"{folder.name}-whole.toml")
        path.write_text(MICRO)
        values = StudyConfig.read(path, settings).to_dict()
        del values["corpus"]["sources"], values["corpus"]["stages"]
        return tomlkit.dumps(_without_none(values)).encode()


class StageOfAStudy(Target):
    """A stage file, planned against a study with a run that was promoted."""

    suffix = ".toml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale.full_runs.checkpoints.folder import CHECKPOINTS
        from muscale.layout import CORPUS, FULL_RUNS
        from proxy_models.data.corpus import write_corpus
        from tests.muscale.planted_ladder import numerics_of

        study, self.config, self.ledger, plan = planned_study(folder)
        (study / "text").write_text("some text to be held " * 2000)
        shutil.copy(study / "text", folder / "text")
        self.corpus = write_corpus(study / CORPUS, str(study / "text"))
        self.ledger.record_result(ResultKind.PROMOTION, plan.key, {"plan": plan.key})
        self.numerics = numerics_of(self.config)
        (study / FULL_RUNS / plan.key / CHECKPOINTS / f"tokens={plan.n_tokens}").mkdir(parents=True)
        alone = (
            f'name = "more"\nn_tokens = 4096\nlearning_rate_factor = 0.5\nrewarm_tokens = 512\nschedule = "wsd"\n'
            f'cooldown_fraction = 0.2\n[parent]\nrun = "{plan.key}"\ntokens = {plan.n_tokens}\n'
        )
        swapped = (
            'name = "cosine"\nn_tokens = 8192\nlearning_rate = 0.001\nrewarm_tokens = 512\nschedule = "cosine"\n'
            'final_fraction = 0.1\noptimizer = "lion"\nseed = 3\n'
            '[corpus]\nsource = "text"\nvalidation_fraction = 0.2\nevaluation_tokens = 1024\n'
        )
        self.seeds = [alone.encode(), swapped.encode()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError, StudyFileError

        return (StageError, StudyFileError)

    def read(self, path: Path) -> object:
        from muscale.full_runs.continue_run.continuation import plan_stage

        planned = plan_stage(
            path, self.config, self.ledger, self.corpus, lambda plan: plan.chain(self.numerics), lambda *_: None
        )
        return str(planned), planned.key, json.dumps(planned.to_dict())


class PreparedRun(Target):
    """What `muscale promote --prepare` wrote."""

    suffix = ".json"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale.full_runs.promote.prepared import prepare
        from tests.muscale.planted_ladder import numerics_of

        _, config, ledger, plan = planned_study(folder)
        ledger.close()
        self.seeds = [Path(prepare(plan, config, numerics_of(config), folder).path).read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError, StudyFileError

        return (StageError, StudyFileError)

    def read(self, path: Path) -> object:
        from muscale.full_runs.promote.prepared import read

        run = read(path)
        return run.n_tokens, run.n_steps(run.n_tokens), run.numerics.key


class PlanFile(Target):
    suffix = ".toml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from muscale.plans.plan_file import path_of, write

        study, self.config, self.ledger, plan = planned_study(folder)
        write(plan, self.config, self.ledger)
        self.seeds = [path_of(study, plan.key).read_bytes()]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.plans.plan_file import read

        return read(path, self.ledger, self.config)


class SpaceTable(Target):
    suffix = ".toml"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [
            b'a = { distribution = "log_uniform", low = 0.004, high = 0.03, prior = { centre = 0.01, spread = 1.0 } }\n'
            b'b = { distribution = "integer", low = 1, high = 64, log = true }\n'
            b'c = { distribution = "choice", values = ["x", "y", 3], when = { b = { low = 2 } } }\n'
            b'd = { distribution = "ordinal", values = [1, 2, 4] }\n'
            b'e = { distribution = "simplex", parts = ["p", "q"] }\n'
            b'f = { distribution = "fixed", value = 0.5 }\n'
            b'constraints = { k = { less = ["a", "b"] }, m = { sum_at_most = { names = ["a", "b"], bound = 9.0 } } }\n'
        ]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from search_spaces import SpaceError

        return (SpaceError,)

    def read(self, path: Path) -> object:
        from search_spaces import Space

        try:
            table = tomllib.loads(path.read_text())
        except (ValueError, RecursionError):
            return None  # the study file's reader tells it
        space = Space.from_dict(table, where=str(path))
        again = Space.from_dict(json.loads(json.dumps(space.to_dict())))
        return str(space), again.encode(again.sample(1, seed=0)[0])


class WandbSweep(Target):
    suffix = ".yaml"
    text = b"""method: bayes
metric: {name: loss, goal: minimize}
run_cap: 40
early_terminate: {type: hyperband, eta: 3, s: 2}
parameters:
  learning_rate: {distribution: log_uniform_values, min: 0.001, max: 0.1}
  init_scale: {values: [0.5, 1, 2]}
  batch_tokens: {distribution: q_uniform, min: 256, max: 4096, q: 256}
  weight_decay_tau: {distribution: log_normal, mu: -1.0, sigma: 0.5}
  optimizer: {value: adamw}
  nested: {parameters: {beta1: {min: 0.8, max: 0.99}}}
"""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seeds = [self.text]

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        from muscale import StageError

        return (StageError,)

    def read(self, path: Path) -> object:
        from muscale.importers.import_space import import_space
        from search_spaces import Space

        found = import_space(str(path))
        pasted = tomllib.loads(str(found))
        assert Space.from_dict(pasted["sweep"]["space"]) == found.space
        return json.dumps(found.to_dict())


def _without_none(values: Any) -> Any:
    """As TOML has no such thing."""
    if isinstance(values, dict):
        return {name: _without_none(value) for name, value in values.items() if value is not None}
    return [_without_none(value) for value in values] if isinstance(values, list | tuple) else values
