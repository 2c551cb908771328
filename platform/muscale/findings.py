"""The chain of a study's stages, and the results that are known of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from muscale.actors.jobs import Job
from muscale.commands import StudyCommands
from muscale.errors import StageError
from muscale.layout import CORPUS
from muscale.plans.ladder_schedules import LadderSchedules
from muscale.plans.next_stems import NextStems, choose
from muscale.plans.plan import Plan, as_registered
from muscale.plans.planning import Planner
from muscale.proxies import ladder, transfer
from muscale.proxies.expert_axes import NO_LAWS, AxisLaws
from muscale.proxies.ladder_stages import stage_law
from muscale.proxies.study_check import known_check
from muscale.search.sweep import Sweep
from muscale.search.sweep_result import SweepResult
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import runs
from muscale.store.statements import find
from proxy_models.architecture.parametrization import CARRIED_EXPERTS
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.data.corpus import Corpus
from proxy_models.data.token_files import MANIFEST
from proxy_models.training.numerics import Numerics
from scaling import HorizonLaw, ScalingError, ScalingFit, StageLaw, Verdict


@dataclass(frozen=True, kw_only=True)
class StudyContents:
    """The parts of a study that pages, bundles and trackers read.

    Attributes:
        ledger: Everything that the study knows; it lies in, or points from, the study's directory.
        path: The study file.
        overrides: Settings that replaced the file's, as given to --set.
    """

    config: StudyConfig
    ledger: Ledger
    path: Path
    overrides: tuple[str, ...] = ()

    @property
    def directory(self) -> Path:
        """Directory of all files except the ledger's database."""
        return self.ledger.directory

    @property
    def commands(self) -> StudyCommands:
        """Commands on this study under the same settings."""
        return StudyCommands(self.path, self.overrides)

    @property
    def corpus(self) -> Corpus | None:
        """The token files, None where they are not written yet."""
        folder = self.directory / CORPUS
        return Corpus.open(folder) if (folder / MANIFEST).exists() else None

    @property
    def coordinate_check(self) -> CoordinateCheck | None:
        """The coordinate check under the present settings, None if it is not known."""
        if (corpus := self.corpus) is None:
            return None
        return known_check(self.config, self.config.shared_numerics(corpus, self.directory), self.ledger)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of a study's stages; None is what is not known yet.

    Attributes:
        sweep: The search at the base shape.
        transfer: The verdict, with the laws in the tokens.
        fit: The law L(N, D).
        plan: The full run for the study file's budget, registered or not.
        next_runs: Runs that would make its forecast surer.
    """

    sweep: SweepResult | None = None
    transfer: Verdict | None = None
    fit: ScalingFit | None = None
    plan: Plan | None = None
    next_runs: NextStems | None = None


class NotFinishedError(StageError):
    """A stage whose runs are not all trained, where nothing may be trained."""


class Stages:
    """The chain of a study's stages: each is concluded from the stages before it, and at most once.

    A study trains what a stage lacks; pages, bundles and dry runs read the same chain up to the first stage that lacks something.

    Args:
        corpus: Gives the token files.
        search: Gives the finished sweep; by default that of the ledger.
        finish: Trains the runs of a stage that the ledger does not know; by default it raises `NotFinishedError` if there are any.

    Attributes:
        known: Results so far.
    """

    def __init__(
        self,
        contents: StudyContents,
        corpus: Callable[[], Corpus],
        *,
        search: Callable[[], SweepResult] | None = None,
        finish: Callable[[str, Sequence[Job]], None] | None = None,
    ) -> None:
        self._contents, self._corpus = contents, corpus
        self._search, self._finish = search or self._finished_sweep, finish or self._require_finished
        self.known = Findings()

    @property
    def numerics(self) -> Numerics:
        """Numerics of the study at its base shape."""
        return self._contents.config.shared_numerics(self._corpus(), self._contents.directory)

    def sweep(self) -> SweepResult:
        """The search at the base shape."""
        if found := self.known.sweep:
            return found
        found = self._search()
        self.known = replace(self.known, sweep=found)
        return found

    def transfer(self) -> Verdict:
        """The verdict on transfer, from the grids of [transfer]."""
        if found := self.known.transfer:
            return found
        config, sweep = self._contents.config, self.sweep()
        members = transfer.members(config, self.numerics, sweep.best)
        self._finish("transfer", transfer.jobs(members))
        found = transfer.conclude(members, sweep, config, self.numerics, self._contents.ledger)
        self.known = replace(self.known, transfer=found)
        return found

    def widest_transfer(self) -> Verdict:
        """The verdict of larger finished grids if the grids of [transfer] were extended: the gate's, and that of axes of experts."""
        config, ledger = self._contents.config, self._contents.ledger
        own = self.transfer()
        return transfer.widest_verdict(self.sweep(), config, self.numerics, ledger) or own

    def horizon(self) -> HorizonLaw:
        """The law of the best rate in the tokens; raises StageError that names what would determine it."""
        return transfer.horizon_of(self.transfer())

    def ladder(self) -> pd.DataFrame:
        """Every annealed run, as `ladder.law_rows` gives them; raises StageError like `horizon`."""
        config = self._contents.config
        self._finish("ladder", self.ladder_jobs())
        return ladder.law_rows(
            self._contents.ledger.runs(),
            self.sweep().best,
            config.sweep.space,
            self.horizon(),
            self.numerics,
            ladder.ladder_models(config),
            self.ladder_laws,
        )

    def ladder_jobs(self) -> list[Job]:
        """The ladder's runs, trained or not; raises StageError like `horizon`."""
        config = self._contents.config
        return ladder.ladder_jobs(config, self.numerics, self.sweep().best, self.horizon(), self.ladder_laws)

    def fit(self) -> ScalingFit:
        """The law L(N, D) of the ladder; raises StageError like `ladder`, or if no law can be fitted."""
        if found := self.known.fit:
            return found
        config, rows = self._contents.config, self.ladder()
        found = ladder.fit_law(rows, config.fit, config.model)
        self.known = replace(self.known, fit=found)
        return found

    def stage_law(self) -> StageLaw | str:
        """The law of shares of tokens in the corpus's last stage, or why there is none.

        Raises:
            StageError: Like `fit`.
        """
        config = self._contents.config
        if not config.ladder.stage_branches:
            return "ladder.stage_branches is 0"
        fit = self.fit()
        try:
            return stage_law(
                self.ladder_jobs(), fit, self._contents.ledger, config.corpus, config.ladder.stage_branches
            )
        except ScalingError as error:
            return str(error)

    def plan(self, config: StudyConfig | None = None) -> Plan:
        """The full run for the budget of the study or of another config, as it is registered where it is.

        Raises:
            StageError: As `fit`, or if the budget can't be spent.
        """
        config, law, sweep = config or self._contents.config, self.fit(), self.sweep()
        plan = Planner(
            config,
            sweep.best,
            self.horizon(),
            law,
            batches=self.transfer().batch,
            axis_laws=self._axis_laws(config),
            stages=self.stage_law(),
            corpus=self._corpus(),
            winner=sweep.winner,
        ).plan()
        return as_registered(plan, self._contents.ledger)

    @property
    def ladder_laws(self) -> AxisLaws:
        """Laws of the rate along axes of experts by the grids of [transfer]; none if all of the ladder has the base's experts.

        Larger grids move no rate of the ladder, whose finished runs would then count no more.
        """
        return self.transfer().axis_laws if self._several_mixtures else NO_LAWS

    @property
    def _several_mixtures(self) -> bool:
        return any(stem.n_experts for stem in self._contents.config.ladder.stems)

    def _axis_laws(self, config: StudyConfig) -> AxisLaws:
        """Laws of the full run's rate: the ladder's if it has several mixtures, otherwise those of the largest finished grids."""
        if self._several_mixtures:
            return self.ladder_laws
        named = any(shape.n_experts for shape in config.plan.shapes)
        return (
            self.widest_transfer().axis_laws if named or {*CARRIED_EXPERTS} & config.plan.explicit.keys() else NO_LAWS
        )

    def _finished_sweep(self) -> SweepResult:
        ledger = self._contents.ledger
        if not ledger.read(find, "runs", {"purpose": "sweep"}, limit=1):
            raise NotFinishedError("sweep: no run has ended")
        return Sweep.of(self._contents.config, ledger, self._corpus()).result()

    def _require_finished(self, stage: str, jobs: Sequence[Job]) -> None:
        """Note these runs as runs of their stage if the ledger knows how every one of them ended."""
        ledger, wanted = self._contents.ledger, {job.chain.key: job for job in jobs}
        outcomes = ledger.outcomes(job.chain for job in wanted.values())
        if len(outcomes) < len(wanted):
            raise NotFinishedError(f"{stage}: {len(wanted) - len(outcomes)} of {len(wanted)} runs are not trained")
        for key, outcome in outcomes.items():
            ledger.insert(runs, **wanted[key].row(outcome.key))


def findings(contents: StudyContents, known: Findings | None = None) -> Findings:
    """Results of every stage whose runs are complete, up to the first that is not; trains nothing.

    Args:
        known: Results that are worked out already.
    """
    corpus = contents.corpus
    if corpus is None:
        return known or Findings()
    stages = Stages(contents, lambda: corpus)
    stages.known = known or Findings()
    try:
        plan = stages.plan()
        return replace(stages.known, plan=plan, next_runs=choose(contents.config, stages.fit(), plan, corpus))
    except StageError:  # the stage that raised it says so when it is run
        return stages.known


def ladder_stages(contents: StudyContents, known: Findings) -> StageLaw | str:
    """Return the law of shares of tokens in the corpus's last stage, or why there is none; train nothing."""
    corpus = contents.corpus
    if corpus is None:
        return "the corpus is not written yet"
    try:
        stages = Stages(contents, lambda: corpus)
        stages.known = known
        return stages.stage_law()
    except StageError as error:
        return str(error)


def ladder_schedules(contents: StudyContents) -> LadderSchedules | str:
    """The law of the loss along a schedule, of the ladder's curves, or why there is none; trains nothing."""
    corpus = contents.corpus
    if corpus is None:
        return "the corpus is not written yet"
    if len(ladder.mixtures_of(ladder.ladder_models(contents.config))) > 1:
        return "the ladder has several numbers of experts, and the law of schedules does not know them"
    if corpus.mixture and len(corpus.mixture.stages) > 1:
        return "the corpus's stages change the loss along a run, and the law of schedules does not know them"
    try:
        rows = Stages(contents, lambda: corpus).ladder()
        return LadderSchedules.of(contents.ledger, rows, max_regret=contents.config.fit.max_regret)
    except (StageError, ScalingError) as error:
        return str(error)
