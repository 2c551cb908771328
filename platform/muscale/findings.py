"""A study as far as it is known: its place, and the results of its finished trainings. Nothing here trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from muscale.actors.jobs import Job
from muscale.commands import StudyCommands
from muscale.errors import StageError
from muscale.layout import CORPUS
from muscale.plans.next_stems import NextStems, choose
from muscale.plans.planning import Plan, as_registered, make_plan
from muscale.proxies import ladder, transfer
from muscale.search.sweep import Sweep
from muscale.search.sweep_result import SweepResult
from muscale.settings.config import StudyConfig
from muscale.store.ledger import Ledger
from muscale.store.statements import find
from muscale.store.tables import runs
from proxy_models.data.corpus import Corpus
from proxy_models.data.token_files import MANIFEST
from scaling import ScalingFit, Verdict


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
        """Where everything but the ledger's own database lies."""
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


def findings(contents: StudyContents, known: Findings | None = None) -> Findings:
    """Results of every stage whose runs are complete, up to the first that is not.

    Args:
        known: Results that are worked out already.
    """
    found, config, ledger = known or Findings(), contents.config, contents.ledger
    try:
        corpus = contents.corpus
        if corpus is None or not ledger.read(find, "runs", {"purpose": "sweep"}, limit=1):
            return found
        numerics = config.shared_numerics(corpus)
        sweep = found.sweep or Sweep.of(config, ledger, corpus).result()
        found = replace(found, sweep=sweep)
        members = transfer.members(config, numerics, sweep.best)
        if not _ended(transfer.jobs(members), ledger):
            return found
        verdict = found.transfer or transfer.conclude(members, sweep, config, numerics, ledger)
        found = replace(found, transfer=verdict)
        horizon = transfer.horizon_of(verdict)
        if not _ended(ladder.ladder_jobs(config, numerics, sweep.best, horizon), ledger):
            return found
        rows = ladder.law_rows(ledger.runs(), sweep.best, config.sweep.space, horizon, numerics)
        law = found.fit or ladder.fit_law(rows, config.fit, config.model.loss_unit)
        found = replace(found, fit=law)
        plan = make_plan(config, sweep.best, horizon, law, batches=verdict.batch, corpus=corpus, winner=sweep.winner)
        plan = as_registered(plan, ledger)
        return replace(found, plan=plan, next_runs=choose(config, law, plan, corpus))
    except StageError:  # the stage that raised it says so when it is run
        return found


def _ended(jobs: Iterable[Job], ledger: Ledger) -> bool:
    """Whether the ledger knows how every one of these runs ended; they are noted as runs of their stage then."""
    wanted = {job.chain.key: job for job in jobs}
    outcomes = ledger.outcomes(job.chain for job in wanted.values())
    if len(outcomes) < len(wanted):
        return False
    for key, outcome in outcomes.items():
        ledger.insert(runs, **wanted[key].row(outcome.key))
    return True
