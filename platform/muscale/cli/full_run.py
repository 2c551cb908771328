"""Commands of the full run: promote, train, continue."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.application import FULL_RUN, command
from muscale.cli.ending import Ending, line
from muscale.cli.options import AsJson, Flag, Options, StageOptions, StudyFile, Whole
from muscale.cli.running import is_begun, result_alone, run_stage, show
from muscale.errors import StudyFileError
from muscale.layout import BUNDLES, FULL_RUNS

if TYPE_CHECKING:
    from muscale.study import Study


@command(FULL_RUN, example="muscale promote study.toml --dry-run")
def promote(
    study: StudyFile,
    *,
    plan: Path | None = None,
    force: Flag = False,
    smoke_test: Flag = False,
    steps: Whole | None = None,
    prepare: Flag = False,
    profile: str | None = None,
    replay: Whole | None = None,
    options: StageOptions = StageOptions(),
) -> int:
    """Train the planned run and compare its loss with the forecast; exit code 1 if it is outside the interval.

    With --dry-run, print the plan, the gate, memory and workers; exit code 1 if the gate is closed.

    Args:
        plan: The key of a plan, or a file written by `muscale plan`, whose [resources] apply. By default the study file's plan.
        force: Continue although conditions of the gate failed; the ledger records them.
        smoke_test: Only train a few steps on the real devices, save, resume, and estimate the wall time.
        steps: Steps in each of the smoke test's two launches; 6 by default.
        prepare: Only record that the run started, and write the file for `muscale train`, which works without Ray.
        profile: Range of steps, such as 20:25, for which each worker writes a trace; sets promote.profile.
        replay: As for `muscale amend`, before an interrupted run goes on.
    """
    if profile is not None:
        options = replace(options, set=(*options.set, f'promote.profile="{profile}"'))
    if steps is not None and not smoke_test:
        raise StudyFileError(f"promote: --steps {steps} is for --smoke-test; the plan sets the length of a full run")
    if prepare or smoke_test or options.dry_run:
        _refuse_replay("promote", replay, "--prepare" if prepare else "--smoke-test" if smoke_test else "--dry-run")
    if prepare and (smoke_test or options.dry_run):
        raise StudyFileError("promote: --prepare cannot be combined with --smoke-test or --dry-run")
    if prepare:
        return run_stage(study, options, lambda opened: opened.prepare(plan, force=force), "promote", trains=True)
    if smoke_test and (force or options.dry_run):
        raise StudyFileError(f"promote: --smoke-test cannot be combined with {'--force' if force else '--dry-run'}")
    plan_option = ("--plan", plan) if plan else ()

    def then(_opened: Study, _result: Any) -> Ending:
        return Ending(next=(options.line("promote", study, *plan_option),))

    if smoke_test:
        length = {} if steps is None else {"steps": steps}
        return run_stage(
            study, options, lambda opened: opened.smoke_test(plan, **length), "promote", ending=then, trains=True
        )
    if options.dry_run and (plan or is_begun(study)):
        return run_stage(
            study,
            options,
            lambda opened: opened.dry_run(plan),
            None,
            failed=lambda result: not result.passed,
            ending=lambda opened, result: then(opened, result) if result.passed else Ending(),
            trains=True,
        )

    def ending(opened: Study, promoted: Any) -> Ending:
        return after_promotion(opened, promoted, study, options, {"run": opened.directory / FULL_RUNS / promoted.plan})

    return run_stage(
        study,
        options,
        lambda opened: opened.promote(plan, force=force, replay=replay),
        "promote",
        failed=lambda result: not result.inside,
        ending=ending,
        trains=True,
    )


@command(FULL_RUN, example="muscale continue study.toml code.toml --dry-run", name="continue")
def continue_(
    study: StudyFile, file: Path, *, replay: Whole | None = None, options: StageOptions = StageOptions()
) -> int:
    """Continue training from a checkpoint of a full run, on another corpus or on more of the same one.

    The result is the held-out loss before and after, on the continuation's corpus and on earlier corpora. Run the same command
    again to resume. With --dry-run, print the checkpoint, data, learning rate and schedule, and train nothing. An example of a
    continuation file:

        name = "code"
        n_tokens = 2_000_000
        learning_rate_factor = 0.3
        rewarm_tokens = 100_000

        [corpus]
        source = "code"

    Args:
        file: The continuation file; paths in it are relative to its directory.
        replay: As for `muscale amend`.
    """
    once_more = options.line("continue", study, file)
    if options.dry_run:
        _refuse_replay("continue", replay)
        return _planned_child(study, options, lambda opened: opened.plan_continuation(file), once_more)
    return _trained_child(study, options, lambda opened: opened.continue_run(file, replay=replay))


@command(
    FULL_RUN,
    example='muscale amend study.toml --set hyperparameters.cooldown_fraction=0.4 --reason "the budget ends in May"',
)
def amend(
    study: StudyFile,
    file: Path | None = None,
    *,
    run: str | None = None,
    at: Whole | None = None,
    reason: str | None = None,
    control: Whole | None = None,
    replay: Whole | None = None,
    options: StageOptions = StageOptions(),
) -> int:
    """Change a full run from a checkpoint on: train a run that branches off there, and compare its loss with a second forecast.

    The forecast is registered before the first step; exit code 1 if the loss is outside its interval. The run that is amended stays
    as it is. Run the same command again to resume. With --dry-run, print the changes, what carries over, cost and forecast.
    An example of a file, which --set, --run, --at, --reason and --control may replace:

        reason = "the budget ends in May"

        [parent]
        tokens = 2_000_000

        [hyperparameters]
        cooldown_fraction = 0.4

    Args:
        file: File of the amendment; paths in it are relative to its directory.
        run: Key of the plan, or key or name of the amended run, to branch off; by default the run that began last.
        at: Tokens of that run at the checkpoint; by default its newest checkpoint.
        reason: Why the run is changed.
        control: Steps for which the parent's recipe is trained first, from the same checkpoint, to compare its losses.
        replay: Steps before the checkpoint that are trained again first, on the present devices; their losses must be those recorded.
    """
    from muscale.settings.amendment_file import AmendmentFile

    # --set changes the amendment, where it has the key, and otherwise the study file
    keys = AmendmentFile.model_fields
    stated = tuple(one for one in options.set if one.partition("=")[0].split(".")[0].strip() in keys)
    others = replace(options, set=tuple(one for one in options.set if one not in stated))
    given: dict[str, Any] = {"run": run, "at": at, "reason": reason, "control": control}

    def once_more() -> str:
        named = [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]
        return options.line("amend", study, *([file] if file else []), *named)

    if options.dry_run:
        _refuse_replay("amend", replay)
        return _planned_child(
            study, others, lambda opened: opened.plan_amendment(file, **given, changes=stated), once_more()
        )
    return _trained_child(study, others, lambda opened: opened.amend(file, **given, changes=stated, replay=replay))


def _refuse_replay(stage: str, replay: int | None, other: str = "--dry-run") -> None:
    if replay is not None:
        raise StudyFileError(f"{stage}: --replay {replay} trains steps again and cannot be combined with {other}")


def _planned_child(study: Path, options: StageOptions, plan: Callable[[Study], Any], once_more: str) -> int:
    return run_stage(study, options, plan, None, ending=lambda *_: Ending(next=(once_more,)), trains=True)


def _trained_child(study: Path, options: StageOptions, train: Callable[[Study], Any]) -> int:
    return run_stage(
        study,
        options,
        train,
        None,
        failed=lambda result: result.inside is False,
        ending=lambda _, result: Ending(next=(options.line("bundle", study, "--continuation", result.key),)),
        trains=True,
    )


@command(FULL_RUN, example="muscale train full_runs/KEY/prepared.json")
def train(run: Path, *, json: AsJson = False) -> int:
    """Train a run written by `muscale promote --prepare` without Ray, in one process or under torchrun.

    torchrun --nproc-per-node 8 -m muscale train full_runs/KEY/prepared.json

    Args:
        run: The file written by `muscale promote --prepare`.
    """
    from muscale.full_runs.promote.prepared import commands_of, train_here

    with result_alone(json):
        result = train_here(run)
    if int(os.environ.get("RANK", "0")) == 0:
        message = f"loss {result['loss']:.4f} after {result['tokens']:,} tokens; `muscale promote` records it"
        show(result if json else message, as_json=json, commands=commands_of(run))
    return 0


def after_promotion(opened: Study, promoted: Any, study: Path, options: Options, wrote: dict[str, Path]) -> Ending:
    """Return the files of a promotion and its bundle, and the next commands."""
    bundle = opened.directory / BUNDLES / promoted.plan
    report = () if "report" in wrote else (options.line("report", study),)
    if not bundle.exists():
        return Ending(wrote=wrote, next=(options.line("bundle", study), *report))
    use = "generate" if opened.config.can_generate else "verify"
    return Ending(wrote=wrote | {"bundle": bundle}, next=(*report, line(use, bundle)))
