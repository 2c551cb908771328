"""A study: one file, one directory, and a method for each stage.

Prerequisites run first; finished work is reused from the ledger. An interrupted study continues when the same method, or
command, is called again. Each method only joins functions of other modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pandas as pd

from muscale.actors.cluster import staying_cluster
from muscale.actors.jobs import Job, finish_stage
from muscale.errors import BundleError, StageError, StudyDirectoryError, refusing
from muscale.findings import Findings, Stages, StudyContents, findings, ladder_schedules, ladder_stages
from muscale.full_runs.promote import promotion
from muscale.full_runs.promote.final_scores import final_scores
from muscale.full_runs.promote.launch import launcher_of
from muscale.full_runs.promote.promotion import Promotion
from muscale.full_runs.promote.replay import NOT_REPLAYED, replay
from muscale.layout import CORPUS, FULL_RUNS, GALLERY, METRICS, REPORT
from muscale.monitoring.follow import guarding
from muscale.monitoring.losses import LossSource
from muscale.monitoring.monitor import monitor_of
from muscale.monitoring.run_status import RunStatus
from muscale.pages.overview import overview
from muscale.plans import next_stems, plan_file
from muscale.plans.band import Band, register_band, registered_band
from muscale.plans.gate import check_line, require_check
from muscale.plans.layouts import with_layout
from muscale.plans.next_stems import NextStems
from muscale.plans.plan import Plan, replaced_by
from muscale.plans.plan import register as register_plan
from muscale.plans.score_forecasts import ScoreForecasts, forecast_scores, in_time, register_scores, registered_scores
from muscale.plans.use_case_card import UseCaseCard, card_of
from muscale.programs.program_family import files_of
from muscale.progress import Display, following
from muscale.proxies import comparison, ladder, transfer
from muscale.proxies.comparison import Comparison
from muscale.proxies.ladder_scores import known_ladder_scores, ladder_scores
from muscale.proxies.leak_check import LeakCheck, known_leaks
from muscale.proxies.measures import Measures, check_tasks, measures_of
from muscale.proxies.study_check import known_check, run_check
from muscale.proxies.variant_corpora import variant_corpora
from muscale.search.protocols import Scheduler, Searcher
from muscale.search.run_sweep import run_sweep
from muscale.search.sweep import Sweep
from muscale.search.sweep_progress import SweepProgress, describe_sources
from muscale.search.sweep_result import SweepResult
from muscale.settings import corpus as data
from muscale.settings.config import StudyConfig
from muscale.settings.cross_field_rules import budget_errors
from muscale.settings.overrides import Overrides, as_set
from muscale.settings.own_model import require_same_family, write_record
from muscale.settings.scores import ScoresSettings
from muscale.store.cancels import cancel_trial, cancellable
from muscale.store.lease import full_run_lease, lease
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from muscale.store.open_ledger import open_ledger
from muscale.study_corpus import check_corpus, clean_corpus, open_corpus
from muscale.tracking.trackers import Tracking
from proxy_models.architecture.member import ModuleConfig
from proxy_models.data.cleaning.cleaned import Cleaned
from proxy_models.data.corpus import Corpus
from proxy_models.training.compilation import missing_compiler
from proxy_models.training.numerics import Numerics
from scaling import ScalingFit, Verdict
from scaling.fits.as_found import NO_COLUMNS
from scaling.presentation import Result

if TYPE_CHECKING:
    from ray.tune import Callback

    from muscale.bundles.bundle import Bundle
    from muscale.full_runs.amend.amendment import Amendment
    from muscale.full_runs.amend.amendment_plan import AmendmentPlan
    from muscale.full_runs.amend.train import Amended
    from muscale.full_runs.promote.dry_run import DryRun
    from muscale.full_runs.promote.prepared import Prepared
    from muscale.full_runs.promote.smoke_test import SmokeTest
    from muscale.monitoring.anneal_now import AnnealNow
    from proxy_models.coordinates.check import CoordinateCheck


class Study(Result):
    """An open study; make one with `Study.open`."""

    def __init__(self, contents: StudyContents, display: Display) -> None:
        self.contents = contents
        self._display = display
        self._stages = Stages(contents, lambda: self.corpus, search=self.sweep, finish=self._finish)

    @property
    def config(self) -> StudyConfig:
        """The resolved study file."""
        return self.contents.config

    @property
    def ledger(self) -> Ledger:
        """The database of the study's results, in the storage of [storage]."""
        return self.contents.ledger

    @property
    def directory(self) -> Path:
        """The study file's directory."""
        return self.contents.directory

    @classmethod
    def open(cls, path: str | Path, overrides: Overrides = (), *, quiet: bool = False, trains: bool = False) -> Self:
        """Open the study of a study file; the study's directory is the file's.

        Args:
            overrides: Settings that replace the file's: each `table.key=value`, or a mapping of `table.key` to a value.
            trains: Import the model family that the file names, which runs its module, or run its [trainer] program; needed
                once, before anything is trained. Without it, the study's record of its members is read instead.

        Raises:
            StudyFileError: If the file can't be used; nothing is written then.
            StudyDirectoryError: If the directory belongs to another study.
            StageError: If the corpus can't be read.
        """
        where, path = Path(path), Path(path).resolve()
        config = StudyConfig.read(where, overrides, trains=trains)
        with refusing(where, ValueError, StageError):
            if config.trainer is None:
                data.check(config.corpus, path.parent, config.model.vocab_size)
            if config.scores:
                check_tasks(config.scores, path.parent, runs=trains)
            if config.initial_weights:
                from muscale import weights_folder  # slow to import: torch

                weights_folder.check(config, path.parent)
        ledger = open_ledger(config.storage, path.parent, config.name)
        try:
            ledger.claim(config.identity, config.to_dict())
        except StudyDirectoryError as error:
            files = files_of(config.trainer.command, path.parent) if config.trainer else {}
            raise StudyDirectoryError(f"{error}{_advice(files, path)}") from error
        contents = StudyContents(config=config, ledger=ledger, path=path, overrides=as_set(overrides))
        opened = cls(contents, Display(quiet=quiet, completed=contents.commands.completed))
        opened._record_members()
        return opened

    def _record_members(self) -> None:
        """Record the counted members of an imported family, so that the study can be read without the family."""
        own, base = self.config._own_model, self.config.model
        if own and isinstance(base, ModuleConfig):
            write_record(self.directory, own, base)

    # Stages

    @cached_property
    def corpus(self) -> Corpus:
        """The token files, written at first use."""
        return open_corpus(self.contents, self._display)

    def check_data(self) -> LeakCheck:
        """Measure how much held-out text, and how many near-duplicates, the training text contains.

        Raises:
            StageError: If a program reads its own data, or a source can't be read.
        """
        self._require_no_trainer("data check", "its data is not visible here")
        return check_corpus(self.contents, self.corpus, self._display)

    def clean_data(self, confirm: Callable[[str], bool] | None = None) -> Cleaned:
        """Clean the text of the corpus as set in [corpus.clean], or open the cleaned text.

        Args:
            confirm: Answers a question before a step removes more than `most_removed` of a source; by default this is an error.

        Raises:
            StageError: If [corpus.clean] has no step, the text can't be read, or a step removes too much.
        """
        self._require_no_trainer("data clean", "it reads its own data")
        return clean_corpus(self.contents, self._display, confirm)

    @cached_property
    def _numerics(self) -> Numerics:
        return self.config.shared_numerics(self.corpus, self.directory)

    def check(self) -> CoordinateCheck:
        """Run the coordinate check of the family.

        Raises:
            StageError: If a [trainer] program trains, since its modules are not visible here, or all runs start from given weights.
            FamilyError: If a full run could not train the model, or the model breaks another rule of its family.
        """
        self._require_no_trainer("check", "muscale can't see its modules; `muscale transfer` measures the drift")
        if self.config.initial_weights:
            raise StageError("check: compares widths from random values; with initial_weights all runs have one shape")
        if known := self._known_check():
            return known
        from muscale.full_runs.train.one_rank import require_shardable  # slow to import: Lightning

        with self._display.stage("check"):
            widest = self.config.family.at(width=max(self.config.check.widths))
            require_shardable(replace(self._numerics, model=widest), self.config.hyperparameters, self.corpus)
            return run_check(self.config, self._numerics, self.ledger, self.corpus)

    def _require_no_trainer(self, stage: str, instead: str) -> None:
        """Raise an error for a stage that a study with [trainer] can't have.

        Raises:
            StageError: If the study has a [trainer].
        """
        if self.config.trainer:
            raise StageError(f"{stage}: the study's models are built by its [trainer] program; {instead}")

    def _warn_before_search(self) -> None:
        """Print a warning if the coordinate check has failed, as tuned values may not transfer, or if the law can't use a stem."""
        check = self._known_check() if self.config.has_check else None
        if check and not check.passed:
            line = check_line(check)
            self._warn(f"the coordinate check {line.compared}; {line.advice}")
        self._warn(ladder.planned_warmup_warning(self.config, self._numerics))

    def _warn(self, message: str) -> None:
        if message:
            self._display.line(f"warning: {message}")

    def _known_check(self) -> CoordinateCheck | None:
        return known_check(self.config, self._numerics, self.ledger)

    def sweep(
        self,
        *,
        searcher: Searcher | None = None,
        scheduler: Scheduler | None = None,
        narrower: bool = False,
        learn_from: Sequence[str | Path] = (),
        columns: Mapping[str, str] = NO_COLUMNS,
        callbacks: Sequence[Callback] = (),
    ) -> SweepResult:
        """Search hyperparameters at the base shape.

        Args:
            searcher, scheduler: Frozen dataclasses that follow the protocols of `muscale.search`; they replace the methods of the
                study file. Equal objects continue the same sweep. Once it is finished, later stages and commands use it without
                the objects.
            narrower: Once the study file's trials are done, search with the same number of trials around the best region.
            learn_from: Files or directories of further studies with the same corpus and family, whose runs inform the searcher;
                or results from elsewhere, reported by the user: a table of hyperparameters with loss, or an Optuna storage.
            columns: Names of the columns loss, n_params, n_tokens and run in the tables of `learn_from`, by muscale's names.
            callbacks: Ray Tune callbacks (`ray.tune.Callback`) that run during the search.

        Raises:
            StageError: If no trial has an annealed run, or a searcher or scheduler breaks its protocol.
        """
        if self._stages.known.sweep and not (searcher or scheduler or narrower or learn_from):
            return self._stages.known.sweep
        sweep = Sweep.of(self.config, self.ledger, self.corpus)
        sweep = replace(sweep, learn_from=tuple(map(str, learn_from)), columns=columns, callbacks=tuple(callbacks))
        self._warn_before_search()
        result = self._run_sweep(sweep.by(searcher, scheduler) if searcher or scheduler else sweep, narrower)
        self._stages.known = Findings(sweep=result)  # the results of later stages were those of another sweep
        return result

    def cancel_trial(self, trial: int, reason: str = "no reason given") -> None:
        """Request that a trial of the sweep is not trained further, in a running search or a later one.

        Raises:
            StageError: If the sweep has no such trial, or the trial has ended.
        """
        sweep = Sweep.of(self.config, self.ledger, self.corpus)
        record = sweep.record()
        if trial in record.configs and (status := record.status(trial, sweep.plan.top)) not in ("running", "stopped"):
            raise StageError(f"cancel: only a trial that may train further can be cancelled; trial {trial} is {status}")
        cancel_trial(self.ledger, sweep.key, trial, reason)

    def _run_sweep(self, sweep: Sweep, narrower: bool) -> SweepResult:
        rounds = len(self.ledger.rounds(sweep.key))
        with self._display.stage("sweep") as update:
            progress = SweepProgress(sweep, update)
            for line in describe_sources(sweep):
                self._display.line(line)
            progress.begin()
            with self._tracking.during_sweep(sweep):
                result = run_sweep(sweep, progress.on_result, progress.on_run, narrower=narrower)
        if narrower and len(self.ledger.rounds(sweep.key)) == max(rounds, 1):
            self._display.line(
                "the sweep has just finished; run it again with --narrow to search around its best region"
            )
        return result

    def transfer(self) -> Verdict:
        """Return the verdict on transfer across widths and depths, and the laws across tokens, from the grids of [transfer]."""
        return self._stages.transfer()

    @property
    def _gate_verdict(self) -> Verdict:
        """Return the verdict for the gate, which judges axes of experts only if the run differs from its proxies along them."""
        return self._stages.widest_transfer()

    def ladder(self) -> pd.DataFrame:
        """Return every annealed run with its size, tokens, loss, predicted regret, and the reason if the fit leaves it out.

        Raises:
            StageError: If the transfer check gives no horizon law; the message says which settings would.
        """
        return self._stages.ladder()

    def _finish(self, stage: str, jobs: Sequence[Job]) -> None:
        """Train the runs of a stage that the ledger does not have, and measure the ladder's on the way as set in [scores]."""
        is_new = len(self.ledger.outcomes(job.chain for job in jobs)) < len({job.chain.key for job in jobs})
        if stage == "ladder" and is_new:
            self._warn(ladder.warmup_warning(jobs))
        if (settings := self.config.scores) and stage == "ladder" and is_new:
            jobs = ladder.evaluated(jobs, self._measures, settings.checkpoints)
        finish_stage(stage, jobs, self.ledger, self.config.resources, self._display)

    def fit(self) -> ScalingFit:
        """Fit the law L(N, D) to the tuned runs.

        Raises:
            StageError: As for `ladder`, or if no law can be fitted.
        """
        return self._stages.fit()

    def plan(self, *, compute_flops: float | None = None) -> Plan:
        """Plan the full run for the budget, with its registered forecast if there is one; register nothing and write no plan file.

        Stages that are not finished are trained first.

        Args:
            compute_flops: Budget that replaces the study file's.

        Raises:
            StageError: As for `fit`, or if the budget can't be spent, or is no larger than the ladder's largest run.
            ValueError: If `compute_flops` is not finite and above 0, or more than any computer could spend.
        """
        config = self.config
        if compute_flops is not None:
            config = config.model_copy(update={"plan": config.plan.at(compute_flops)})
            if problem := next(budget_errors(config), None):
                raise StageError(f"plan: {problem}")
        plan = self._stages.plan(config)
        self._record_members()
        return plan

    def register(self, plan: Plan) -> Plan:
        """Register a plan's forecast, its band and the forecasts of its scores permanently, and write or update the plan's file.

        Raises:
            StageError: If the plan's file was edited by hand.
        """
        registered = register_plan(plan, self.ledger)
        if settings := self.config.scores:
            register_scores(forecast_scores(plan, self._ladder_scores(settings), settings), self.ledger)
        plan_file.write(
            registered,
            self.config,
            self.directory,
            along=self._band(registered).along,
            completed=self.contents.commands.completed,
        )
        return registered

    def _band(self, plan: Plan) -> Band:
        """Band of a registered plan's loss along its run; registered with it, before the first step."""
        known = registered_band(plan.key, self.ledger)
        return known or register_band(
            plan,
            self.ledger,
            self.ladder(),
            max_regret=self.config.fit.max_regret,
            mixture=self.corpus.mixture,
        )

    def evaluate(self, plan: Plan | None = None) -> ScoreForecasts:
        """Measure the ladder's runs, and the plan's run if it has ended, as set in [scores].

        Args:
            plan: By default the study file's.

        Returns:
            The forecast of each score of the plan's run, as registered if it is, with the measured score if there is one.

        Raises:
            StageError: If the study has no [scores], a measure can't be taken, or as for `plan`.
        """
        settings, plan = self.config.scores, plan or self.plan()
        if settings is None:
            raise StageError("evaluate: the study file must have a table [scores], which says what to measure")
        of_ladder = self._ladder_scores(settings)
        registered, current = registered_scores(plan.key, self.ledger), forecast_scores(plan, of_ladder, settings)
        forecasts = registered.with_further(current) if registered else in_time(current, self.ledger)
        if (promoted := promotion.recorded_promotion(self.ledger, plan.key)) is None:
            return forecasts
        trained = promotion.trained_chain(plan, self.config, self._numerics, promoted)
        directory, resources = self.directory / FULL_RUNS / plan.key, self.config.resources
        with self._display.stage("evaluate"):
            return forecasts.with_measured(
                final_scores(trained, directory, self.ledger, self._measures.final, resources, workers=settings.workers)
            )

    @cached_property
    def _measures(self) -> Measures:
        """The measures of [scores]."""
        if self.config.scores is None:
            return Measures(always=(), at_end=())
        with self._display.reading("tasks") as on_progress:
            return measures_of(self.config, self.config.scores, self.ledger, self.corpus, self.directory, on_progress)

    def _ladder_scores(self, settings: ScoresSettings) -> pd.DataFrame:
        """Scores of the ladder's runs, which are trained and measured if they are not."""
        jobs = ladder.evaluated(self._stages.ladder_jobs(), self._measures, settings.checkpoints)
        finish_stage("ladder", jobs, self.ledger, self.config.resources, self._display)
        return ladder_scores(jobs, self.ledger)

    def use_case(self, plan: Plan | None = None) -> UseCaseCard | None:
        """Compare sizes with [use_case], and find the cheapest run that meets all of it; None without the table.

        Args:
            plan: Plan whose compute the sizes are compared at; by default the study file's.

        Raises:
            StageError: As for `plan`.
        """
        return card_of(self.config, self.fit(), plan or self.plan(), known_ladder_scores(self.ledger))

    def next_runs(
        self,
        plan: Plan | None = None,
        *,
        affordable_flops: float | None = None,
        n_runs: int = 4,
        width: float = next_stems.NARROW,
    ) -> NextStems:
        """Suggest runs to add to the ladder for a narrower forecast of the plan's loss; train none of them.

        Args:
            plan: Plan of the forecast; by default the study file's.
            affordable_flops: Maximum cost of all runs together; by default a tenth of the plan, or the cost of the largest run fitted.
            n_runs: Maximum number of runs.
            width: Stop once the interval is this narrow, relative to the forecast.

        Raises:
            StageError: As for `plan`.
            ValueError: If an argument is out of its range.
        """
        plan = plan or self.plan()
        chosen = next_stems.choose(
            self.config, self.fit(), plan, self.corpus, affordable_flops=affordable_flops, n_runs=n_runs, width=width
        )
        self._record_members()
        return chosen

    def promote(
        self, plan: Plan | str | Path | None = None, *, force: bool = False, replay: int | None = None
    ) -> Promotion:
        """Train the planned run, compare it with its forecast, and write its bundle unless [promote] turns that off.

        A run that was trained to its end is not trained again, even if a later fit has changed the plan. If another process
        trains the run, wait for it.

        Args:
            plan: A plan from `plan()`, which is registered if it is not yet; or the key or file of a plan, whose [resources] then
                apply; by default the study file's plan.
            force: Continue although lines of the gate failed; the ledger records them.
            replay: Steps before the newest checkpoint that are trained again before the run continues there, on the present
                devices; their losses must be those recorded, within a tolerance.

        Raises:
            StageError: If the gate is closed, or the file has an edit that is not allowed; if the run diverged, failed with an error
                that would recur, failed more often than promote.max_failures, or was stopped by promote.on_alarm; if the losses
                trained again deviate.
            PreemptedError: If this process was preempted; the workers have saved.
        """
        planned, config = self._to_promote(plan, register=False)
        own = promotion.recorded_promotion(self.ledger, planned.key)
        if own is None and (same := promotion.promotion_of_same_run(planned, config, self.ledger, self._numerics)):
            self._display.line(
                f"plan {planned.key}: this run was trained as plan {same.plan} and is scored against that plan's forecast"
            )
            return same
        if plan is None and (earlier := replaced_by(planned, self.ledger)):
            self._display.line(
                f"plan {planned.key} ({planned.model}, forecast {planned.forecast.loss:.4f}) replaces plan {earlier.key} "
                f"({earlier.model}, forecast {earlier.forecast.loss:.4f}): results or settings have changed since; "
                f"--plan {earlier.key} promotes the earlier one"
            )
        plan, config = self._to_promote(plan if isinstance(plan, str | Path) else planned, register=True)
        if known := promotion.recorded_promotion(self.ledger, plan.key):
            return known
        result = self._promote(plan, config, force=force, replay_steps=replay)
        if config.scores:
            try:
                self._display.line(str(self.evaluate(plan)))
            except StageError as error:  # the run itself is done, and recorded
                self._display.line(f"no scores: {error}; `muscale evaluate` measures them")
        if config.promote.bundle:
            try:
                self._display.line(f"bundle: {self.bundle().path}")
            except (StageError, BundleError, OSError) as error:  # the run itself is done, and recorded
                self._display.line(f"no bundle: {error}; `muscale bundle` writes it")
        return result

    def _promote(self, plan: Plan, config: StudyConfig, *, force: bool, replay_steps: int | None) -> Promotion:
        """Train the plan's run under its lease, or return its promotion if another process recorded one meanwhile."""
        metrics = self.directory / FULL_RUNS / plan.key / METRICS
        with staying_cluster(), lease(self.ledger, name := full_run_lease(plan.key)) as token:
            if known := promotion.recorded_promotion(self.ledger, plan.key):
                return known
            seen = self._admitted(plan, config, force=force)
            if replay_steps is not None:
                run = promotion.full_run_of(plan, config, self._numerics, metrics.parent, self.directory / CORPUS)
                with self._display.stage("replay") as update, cancellable(self.ledger):
                    found = replay(
                        run, replay_steps, launcher_of(config, plan.key, update), self.ledger.under(name, token)
                    )
                self._display.line(str(found or NOT_REPLAYED))
            with (
                guarding(self.ledger, plan.key, config.promote, self._display.line),
                self._display.stage("promote") as update,
                following(metrics, plan.n_tokens, update),
                self._tracking.during_full_run(plan.key),
            ):
                return promotion.promote(
                    plan,
                    config,
                    self.ledger.under(name, token),
                    self._numerics,
                    verdict=self._gate_verdict.of_axes(()).verdict,
                    gate=seen.gate,
                    measures=self._measures.always,
                )

    def prepare(self, plan: Plan | str | Path | None = None, *, force: bool = False) -> Prepared:
        """Record the start of the planned run, and write it to a file for ranks started without Ray; trains nothing.

        Args:
            plan, force: As in `promote`, which records the run once it has ended.

        Raises:
            StageError: As for `promote`.
        """
        from muscale.full_runs.promote.prepared import prepare

        plan, config = self._to_promote(plan, register=True)
        if self.ledger.result(ResultKind.PROMOTION, plan.key):
            raise StageError(
                f"promote: plan {plan.key} has already been trained to its end; `muscale promote` shows the result"
            )
        seen = self._admitted(plan, config, force=force)
        promotion.begin(plan, config, self.ledger, verdict=self._gate_verdict.of_axes(()).verdict, gate=seen.gate)
        folder = self.directory / FULL_RUNS / plan.key
        return prepare(plan, config, self._numerics, folder, self.contents.commands)

    def _admitted(self, plan: Plan, config: StudyConfig, *, force: bool) -> DryRun:
        """Return the dry run of a run that the gate allows, or that is forced."""
        seen = self._dry_run(plan, config, self.check() if self.config.has_check else None)
        seen.gate.require(force=force)
        seen.gate.record(self.ledger)
        return seen

    def continue_run(self, file: str | Path, *, replay: int | None = None) -> Amended:
        """Continue training from a checkpoint of a full run as set in a continuation file; return forecast and losses.

        Args:
            replay: As in `amend`.

        Raises:
            StudyFileError: If the file can't be used.
            StageError: If there is no such checkpoint, it can't be continued in this way, or the training failed.
            PreemptedError: As for `promote`.
        """
        return self._train_amendment(self.plan_continuation(file), "continue", replay)

    def plan_continuation(self, file: str | Path) -> AmendmentPlan:
        """Return the run that `continue_run` would train, with its forecast; write its corpus if it is new, and train nothing."""
        from muscale.full_runs.amend.plan_amendment import plan_continuation

        self._require_no_trainer("continue", "continue the run with that program")
        with self._display.reading("corpus") as on_progress:
            return self._with_forecast(
                plan_continuation(Path(file), self.config, self.ledger, self.corpus, self._numerics, on_progress)
            )

    def amend(
        self,
        file: str | Path | None = None,
        *,
        run: str | None = None,
        at: int | None = None,
        reason: str | None = None,
        changes: Overrides = (),
        control: int | None = None,
        replay: int | None = None,
    ) -> Amended:
        """Train a run that branches off a checkpoint of a full run with stated changes; compare its loss with a second forecast.

        The parent run stays as it is. The same call resumes the run, and returns the result once it has ended.

        Args:
            file: File of the amendment; None: the other arguments have all of it.
            run: Key of the plan, or key or name of the amended run, to branch off; by default the run that began last.
            at: Tokens of that run at the checkpoint; by default its newest checkpoint.
            reason: Why; required here or in the file.
            changes: Changes by dotted key, such as `{"hyperparameters.cooldown_fraction": 0.4}`.
            control: Steps for which the parent's recipe is trained first, from the same checkpoint, to compare its losses.
            replay: Steps before the checkpoint that are trained again first, on the present devices; their losses must be those
                recorded, within a tolerance.

        Raises:
            StudyFileError: If the amendment can't be used.
            StageError: If there is no such checkpoint, it can't take the change, the parent is training now, the training failed, or
                the losses trained again deviate.
            PreemptedError: As for `promote`.
        """
        planned = self.plan_amendment(file, run=run, at=at, reason=reason, changes=changes, control=control)
        return self._train_amendment(planned, "amend", replay)

    def plan_amendment(
        self,
        file: str | Path | None = None,
        *,
        run: str | None = None,
        at: int | None = None,
        reason: str | None = None,
        changes: Overrides = (),
        control: int | None = None,
    ) -> AmendmentPlan:
        """Return the run that `amend` would train, with its forecast; write its corpus if it is new, and train nothing."""
        from muscale.full_runs.amend.plan_amendment import plan_amendment
        from muscale.settings.amendment_file import AmendmentFile

        self._require_no_trainer("amend", "amend the run with that program")
        named = {"parent.run": run, "parent.tokens": at, "reason": reason, "control": control}
        stated = (*as_set(changes), *as_set({key: value for key, value in named.items() if value is not None}))
        path = None if file is None else Path(file)
        amendment = AmendmentFile.read(path, stated, vocab_size=self.config.model.vocab_size)
        with self._display.reading("corpus") as on_progress:
            return self._with_forecast(
                plan_amendment(amendment, path, self.config, self.ledger, self.corpus, self._numerics, on_progress)
            )

    def _with_forecast(self, amendment: Amendment) -> AmendmentPlan:
        from muscale.full_runs.amend.amendment_plan import AmendmentPlan

        known = findings(self.contents, self._stages.known)
        return AmendmentPlan.of(
            amendment,
            known.fit,
            lambda: ladder_schedules(self.contents),
            lambda: ladder_stages(self.contents, known),
            self.config,
            self.ledger,
        )

    def _train_amendment(self, planned: AmendmentPlan, stage: str, replay: int | None) -> Amended:
        from muscale.full_runs.amend.amendment_plan import train

        with staying_cluster():
            return train(planned, stage, self.config, self.ledger, self._display, replay_steps=replay)

    def watch(self, losses: str | Path | pd.DataFrame | None = None, plan: str | None = None) -> RunStatus:
        """Compare the full run so far with its forecast; train nothing.

        Args:
            losses: All losses so far of a run trained elsewhere: a CSV file, `wandb:entity/project/run`, or a DataFrame with a
                column `tokens` or `step`, and `loss` or `val_loss` (held-out), `train_loss`, or both, in nats per token. They are
                recorded in the study as reported by the user, not verified. None: the run's own records.
            plan: Key of a plan; by default the plan whose run started last, or with `losses` the plan of `plan()`.

        Raises:
            StageError: If there is no such run, the losses can't be read or go beyond the plan's tokens, or `losses` are given
                for a plan that was promoted in this study.
        """
        source = None if losses is None else LossSource(losses=losses)
        return monitor_of(self.contents, plan, source, self._stages.known).look()

    def anneal_now(self, run: str | None = None, *, shares: Sequence[float] = (0.1, 0.2, 0.3)) -> AnnealNow:
        """Forecast a full run's final loss if its cooldown began now, over further shares of its tokens so far; train nothing.

        Args:
            run: Key of a plan, or key or name of an amended run; by default the run that began last.
            shares: Lengths of the cooldowns, as shares of the tokens so far.

        Raises:
            StageError: If there is no such run, it has no losses, its rate is zero, or the ladder has no law of schedules.
        """
        from muscale.monitoring.anneal_now import anneal_now

        schedules = ladder_schedules(self.contents)
        return anneal_now(self.ledger, schedules, run, shares=shares, level=self.config.plan.level)

    def compare(self, *, one_size: bool = False) -> Comparison:
        """Decide on each of the study's variants at the target: tune all in the same way, and train size after size until decided.

        Args:
            one_size: Train all variants only at the base shape, over the transfer check's tokens, and decide there.

        Raises:
            StageError: If there are no variants, no horizon law (unless `one_size`), or their runs can't be compared.
        """
        config = self.config.at_one_size() if one_size else self.config
        with staying_cluster(), cancellable(self.ledger):
            best, verdict = self.sweep().best, self.transfer()
            horizon = verdict.horizon if one_size else transfer.horizon_of(verdict)
            with self._display.reading("corpora of the variants") as on_progress:
                corpora = variant_corpora(config, self.corpus, self.directory, on_progress)
            return comparison.compare(config, self._numerics, best, horizon, self.ledger, self._finish, corpora)

    def dry_run(self, plan: Plan | str | Path | None = None) -> DryRun:
        """Return a dry run of `promote` with the gate's state; train nothing and register no forecast.

        Raises:
            StageError: If the ladder is not complete, or with a stated plan the transfer check, which the gate needs.
        """
        reader = Study(self.contents, self._display)
        reader._stages = Stages(self.contents, lambda: self.corpus)
        reader._stages.known = known = findings(self.contents, self._stages.known)
        if (known.transfer if plan else known.fit) is None:
            if self.contents.corpus is None and self.ledger.is_begun:
                raise StageError(f"promote: {self.directory / CORPUS} is missing; run `muscale plan` to write it again")
            needed = (
                "the gate needs the transfer check; run `muscale transfer`"
                if plan
                else "a plan needs its ladder; run `muscale plan`"
            )
            raise StageError(f"promote: {needed} first")
        plan, config = reader._to_promote(plan, register=False)
        return reader._dry_run(plan, config, self._known_check())

    def smoke_test(self, plan: Plan | str | Path | None = None, *, steps: int = 6) -> SmokeTest:
        """Train, save and resume a few steps of the planned run on its real devices, and forecast its wall time.

        This does not touch the run's checkpoints and forecast, and does not check the gate.

        Args:
            plan: As in `promote`.
            steps: Steps of each of the two launches (the second resumes the first); at least 5.

        Raises:
            StageError: If `steps` is too small, the run has fewer than twice as many steps, or a launch failed.
        """
        from muscale.full_runs.promote.smoke_test import smoke_test_on_cluster

        plan, config = self._to_promote(plan, register=False)
        with lease(self.ledger, full_run_lease(plan.key)), self._display.stage("smoke test"):
            return smoke_test_on_cluster(plan, config, self.ledger, self._numerics, steps=steps)

    def _to_promote(self, plan: Plan | str | Path | None, *, register: bool) -> tuple[Plan, StudyConfig]:
        """Return the plan to promote and the settings for it, with the layout chosen if it is "auto"."""
        self._require_no_trainer(
            "promote",
            "`muscale plan --export FOLDER` writes the full run's job for that program, and `muscale watch --losses FILE` records its "
            "losses",
        )
        if isinstance(plan, str | Path):
            path = plan_file.path_of(self.directory, str(plan)) if str(plan).isalnum() else Path(plan)
            plan, config = plan_file.read(path, self.ledger, self.config, along=lambda plan: self._band(plan).along)
            require_same_family(plan.model, config.model)
            return plan, with_layout(plan, config, self.corpus)
        plan = plan or self.plan()
        require_same_family(plan.model, self.config.model)
        return self.register(plan) if register else plan, with_layout(plan, self.config, self.corpus)

    def _dry_run(self, plan: Plan, config: StudyConfig, check: CoordinateCheck | None) -> DryRun:
        from muscale.full_runs.promote.dry_run import dry_run

        if plan.model.is_custom:
            self._display.line(f"tracing the memory of {plan.model}")
        leaks = known_leaks(config, self.ledger, self.corpus)
        seen = dry_run(
            plan,
            config,
            self.corpus,
            check=check,
            leaks=leaks,
            verdict=self._gate_verdict,
            ladder_laws=self._stages.ladder_laws,
            directory=self.directory,
        )
        return replace(seen, gate=seen.gate.completed(self.contents.commands))

    def run(self, *, force: bool = False) -> Promotion | Plan:
        """Run every stage in turn; finished work is reused.

        With [trainer] or initial_weights there is no coordinate check. With [trainer] the last stage is the registered plan, whose run
        is trained elsewhere.

        Raises:
            StageError: If a stage has no result, or the coordinate check or the gate fails and `force` is not set.
        """
        if self.config.resources.compile:
            missing_compiler(self.config.resources.device)  # logged here, as workers' logs are not shown
        with staying_cluster(), cancellable(self.ledger):
            if not self.config.trainer:
                self._display.line(f"corpus    {self.corpus.n_tokens:,} training tokens, key {self.corpus.key}")
            self._display.line(str(self.corpus))
            if self.config.has_check:
                self._display.line(str(self.check()))
                require_check(self.check(), force=force)  # before training that a failed check would waste
            self._display.line(str(self.sweep()))
            self._display.line(str(self.transfer()))
            self.ladder()
            self._display.line(str(self.fit()))
            plan = self.plan()
            self._display.line(str(plan))
            if self.config.scores:
                self._ladder_scores(self.config.scores)
            if card := self.use_case(plan):
                self._display.line(str(card))
            for warning in self.corpus.warnings(plan.n_tokens, plan.model.context_length):
                self._display.line(f"warning: {warning}")
            result = self.register(plan) if self.config.trainer else self.promote(plan, force=force)
        self.report()
        self._tracking.finish()
        return result

    @cached_property
    def _tracking(self) -> Tracking:
        return Tracking(self.config, self.ledger)

    def bundle(self, *, average: int = 1, continuation: str | None = None) -> Bundle:
        """Bundle the run promoted last: write one directory that does not need the study. Nothing is trained.

        Args:
            average: Also write the average weights of the last checkpoints, this many, and evaluate both.
            continuation: Key or name of a finished continuation to bundle instead of the promoted run.

        Raises:
            StageError: If no promoted run has finished, or its last weights are missing; if the model's family was not imported, as
                in a study opened without `trains`.
            BundleError: If the bundle was written before and is damaged.
        """
        from muscale.bundles.preserve import preserve, preserve_amendment

        if continuation is not None:
            return preserve_amendment(self.contents, continuation, average=average)
        return preserve(self.contents, self._stages.known, average=average)

    def runs(self) -> pd.DataFrame:
        """Return the ledger's runs, one row each."""
        return self.ledger.runs()

    def report(self) -> Path:
        """Write the report of everything known so far, and return its path; trains nothing."""
        from muscale.pages.contents import gather
        from muscale.pages.report import write_report

        found = findings(self.contents, self._stages.known)
        return write_report(gather(self.contents, found), self.directory / REPORT)

    def gallery(
        self, path: str | Path | None = None, *, runs: Collection[str] = (), compare: tuple[str, str] | None = None
    ) -> Path:
        """Write the page of the samples and scores of every evaluated checkpoint, and return its path; trains nothing.

        Args:
            path: By default gallery.html in the study's directory.
            runs: Names of the runs to show, as on the page; all by default.
            compare: Two checkpoints that the page compares first, each as RUN@TOKENS, or RUN for its last.

        Raises:
            StageError: If nothing was evaluated, or a name is unknown.
        """
        from muscale.pages.gallery import write_gallery

        return write_gallery(self.contents, Path(path or self.directory / GALLERY), runs=runs, compare=compare)

    def __str__(self) -> str:
        return overview(self.contents)


def _advice(files: Collection[str], study: Path) -> str:
    """Advice for a study whose trainer differs from its directory's: the files that count, and how to use known results."""
    return (
        f"; the trainer's files are {', '.join(files)}: with the original files, `muscale runs {study} --export known.csv` "
        'writes the known results, and sweep.learn_from = ["known.csv"] of the new study uses it'
        if files
        else ""
    )
