"""Commands of the scaling law and its use: ladder, fit, compare, plan, calibration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muscale.cli.application import LAW, command
from muscale.cli.ending import Ending
from muscale.cli.options import Columns, Flag, Options, StageOptions, StudyFile
from muscale.cli.running import is_begun, result_alone, run_stage, show, upper_costs
from muscale.errors import StudyFileError, refusing

if TYPE_CHECKING:
    from muscale.plans.plan import Plan
    from muscale.study import Study


@command(LAW, example="muscale ladder study.toml --dry-run")
def ladder(study: StudyFile, *, options: StageOptions = StageOptions()) -> int:
    """Train the ladder of runs for the scaling law.

    Print the ladder's own runs. With --json, also print the runs of earlier stages, which the fit uses too.
    """

    def trained(opened: Study) -> Any:
        rows = opened.ladder()
        return rows if options.json else rows[rows["purpose"] == "ladder"]

    return run_stage(
        study,
        options,
        trained,
        "ladder",
        ending=lambda *_: Ending(next=(options.line("fit", study), options.line("report", study))),
        trains=True,
    )


@command(LAW, example="muscale fit --runs ladder.csv --n-params 'without embeddings' --compute-flops 1e21")
def fit(
    study: Path | None = None,
    *,
    runs: Path | None = None,
    n_params: str | None = None,
    loss_unit: str | None = None,
    compute_flops: float | None = None,
    form: str | None = None,
    html: Path | None = None,
    columns: Columns = Columns(),
    options: StageOptions = StageOptions(),
) -> int:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to the tuned runs of a study or of a table.

    Args:
        runs: Fit this table instead of a study: a CSV, TSV, Parquet or JSON Lines file of finished, tuned runs, with the columns
            n_params, n_tokens and loss.
        n_params: Which parameters the table's n_params counts, such as "total" or "without embeddings"; printed with every result.
        loss_unit: Unit of the table's losses: "nats" per token (the default), "bits" per token (converted to nats), or "bpb".
        compute_flops: With --runs, a compute budget: also print the optimal size for it and the forecast.
        form: With --runs, the form of the law: "chinchilla" (the default), "one size" (the default for rows of one size), "tied",
            "joint", "kaplan", "repeated" (with a column unique_tokens) or "experts" (with n_params_total or sparsity;
            n_params counts the parameters that a token uses).
        html: With --runs, also write the result as a page to this file: decision, figures of the law, backtest, runs to train next.
    """
    if runs is None:
        if study is None:
            raise StudyFileError("fit: give a study file, or a table of runs with --runs")
        if n_params or loss_unit or compute_flops or form or html or columns.to_dict():
            raise StudyFileError(
                "fit: --n-params, --loss-unit, --compute-flops, --form, --html and column names are for --runs; "
                "a study's budget is in its [plan], and `muscale report` writes its page"
            )
        ending = Ending(next=(options.line("plan", study), options.line("report", study)))
        return run_stage(study, options, lambda opened: opened.fit(), "fit", ending=lambda *_: ending, trains=True)
    if study is not None or options.set:
        raise StudyFileError("fit: --runs needs no study: leave out the study file and --set")
    if n_params is None:
        raise StudyFileError(
            'fit: --runs needs --n-params: which parameters n_params counts, such as "without embeddings" or "total"'
        )
    if options.dry_run:
        raise StudyFileError("fit: --runs trains nothing; leave out --dry-run")
    from muscale.importers.runs_fit import fit_runs

    _require_folder("fit", html)
    with result_alone(options.json):
        found = fit_runs(
            runs,
            n_params_convention=n_params,
            loss_unit=loss_unit or None,
            compute_flops=compute_flops,
            **({"form": form} if form else {}),
            columns=columns.to_dict(),
        )
        if html:
            from muscale.pages.table_pages import write_fit_page

            write_fit_page(html, runs.stem, found.fit, found.decision, found.warnings)
    show(found, as_json=options.json)
    return 0


def _require_folder(name: str, html: Path | None) -> None:
    if html and not html.absolute().parent.is_dir():
        raise StudyFileError(f"{name}: --html {html}: there is no folder {html.absolute().parent}")


@command(LAW, example="muscale compare study.toml --dry-run")
def compare(
    runs: Path,
    *,
    one_size: Flag = False,
    baseline: str | None = None,
    target_flops: float | None = None,
    worth: float | None = None,
    html: Path | None = None,
    columns: Columns = Columns(),
    options: StageOptions = StageOptions(),
) -> int:
    """Decide which variants of a recipe still win at the target's compute: promote, reject or undecided; suggest the next runs.

    Args:
        runs: A study file with tables [variants.NAME], whose variants are tuned and trained; or a CSV, TSV, Parquet or JSON Lines
            file of runs with the columns variant, loss, compute_flops (or n_params and n_tokens), and seed if there are several.
        one_size: For a study, compare at the base shape only.
        baseline: For a table, the variant that the others are compared with; "baseline" by default.
        target_flops: Compute of the run that the decision is for; by default from the study's [compare] and [plan], or that of the
            table's largest run.
        worth: Smallest gain in compute that justifies a change, as a fraction; by default from the study's [compare], or 0.02.
        html: For a table, also write the result and its figures to this page; a study's result is a section of `muscale report`.
    """
    if runs.suffix == ".toml":
        if columns.to_dict():
            raise StudyFileError(f"compare: column names are for a table of runs; got the study file {runs}")
        if html:
            raise StudyFileError(
                f"compare: --html is for a table of runs; `muscale report {runs}` shows a study's variants"
            )
        if baseline:
            raise StudyFileError(
                f"compare: the baseline of a study file is the study itself; leave out --baseline {baseline}"
            )
        given = {"target_flops": target_flops, "worth": worth}
        set_ = (*options.set, *(f"compare.{key}={value!r}" for key, value in given.items() if value is not None))
        return run_stage(
            runs,
            replace(options, set=set_),
            lambda opened: opened.compare(one_size=one_size),
            "compare --one-size" if one_size else "compare",
            ending=lambda *_: Ending(next=(options.line("report", runs),)),
            trains=True,
        )
    if one_size or options.set or options.dry_run:
        raise StudyFileError(
            f"compare: --one-size, --set and --dry-run are for a study file, a .toml; got the table {runs}"
        )
    from scaling import ScalingError, compare_variants
    from scaling.variants.verdicts import WORTH

    _require_folder("compare", html)
    with result_alone(options.json):
        with refusing("compare", ScalingError, ValueError):
            found = compare_variants(
                runs,
                baseline or "baseline",
                target_flops=target_flops,
                worth=WORTH if worth is None else worth,
                columns=columns.to_dict(),
            )
        if html:
            from muscale.pages.table_pages import write_variant_page

            write_variant_page(html, runs.stem, found)
    show(found, as_json=options.json)
    return 0


@command(LAW, example="muscale plan study.toml --set plan.compute_flops=1e21")
def plan(study: StudyFile, *, export: Path | None = None, options: StageOptions = StageOptions()) -> int:
    """Plan the full run for the budget, register its forecast, and suggest runs that would narrow it.

    With --dry-run, once the ladder is finished, only print the plan, for example for another budget, and register no forecast.

    Args:
        export: Also write the plan to this folder for another framework: every tensor's hyperparameters and the schedule, or, for
            a study with [trainer], the full run's job.
    """
    if options.dry_run and is_begun(study):

        def tried(opened: Study) -> Any:
            from muscale.findings import findings

            if findings(opened.contents).fit is None:
                return upper_costs("plan", opened.config, study, as_json=options.json)
            found = opened.plan()
            return _with_scores(opened, found, str(found), as_json=options.json)

        return run_stage(study, options, tried, None, trains=True)
    if export and export.exists() and not export.is_dir():
        raise StudyFileError(f"plan: --export {export} is a file; give a folder")
    wrote: dict[str, Path] = {}

    def planned(opened: Study) -> Any:
        from muscale.plans.band import registered_band
        from muscale.plans.plan_export import export as write_export
        from muscale.plans.plan_export import export_job
        from muscale.plans.plan_file import path_of

        plan = opened.register(opened.plan())
        wrote["plan"] = path_of(opened.directory, plan.key)
        if export:
            numerics = opened.config.shared_numerics(opened.corpus, opened.directory)
            if opened.config.trainer:
                wrote["for the trainer"] = export_job(plan, numerics, export)
            else:
                completed = opened.contents.commands.completed
                wrote["for other frameworks"] = write_export(plan, numerics, export, completed=completed)
        text = "" if options.json else f"{plan}\n{registered_band(plan.key, opened.ledger)}\n{opened.next_runs(plan)}"
        return _with_scores(opened, plan, text, as_json=options.json)

    def ending(opened: Study, _result: Any) -> Ending:
        if opened.config.trainer:
            rows = (export or Path("full-run")) / "state" / "rows.jsonl"
            export_it = () if export else (options.line("plan", study, "--export", "full-run"),)
            return Ending(wrote=wrote, next=(*export_it, options.line("watch", study, "--losses", str(rows))))
        return Ending(wrote=wrote, next=(options.line("promote", study, "--dry-run"), options.line("promote", study)))

    return run_stage(study, options, planned, "plan", ending=ending, trains=True)


def _with_scores(opened: Study, plan: Plan, text: str, *, as_json: bool) -> Any:
    """Return the plan with the registered forecasts of its scores and its use-case card: plain values, or the text and theirs."""
    from muscale.plans.score_forecasts import registered_scores

    further = {"scores": registered_scores(plan.key, opened.ledger), "use_case": opened.use_case(plan)}
    known = {name: found for name, found in further.items() if found is not None}
    if as_json:
        return {**plan.to_dict(), **{name: found.to_dict() for name, found in known.items()}} if known else plan
    return "\n".join([text, *map(str, known.values())])


@command(LAW, example="muscale calibration study.toml ../other-study")
def calibration(study: StudyFile, *others: Path, options: Options = Options()) -> int:
    """Print how often the forecasts of this study and other studies held.

    Args:
        others: Other studies: study files, directories or ledgers; opened read-only.
    """
    from muscale.monitoring.calibration import calibrate

    return run_stage(study, options, lambda opened: calibrate(opened.ledger, others), None)
