"""The command line: each command parses, calls one method of `Study`, and prints its result. It is long as there are many commands.

Exit codes: 0 done, 1 a check failed (coordinate check, transfer verdict, a run outside its forecast or its band), 2 an error that the
user can mend, 75 a full run that was told to end (SIGTERM) and has saved, 130 interrupted otherwise (Ctrl-C, SIGTERM); the same
command goes on after both. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from muscale.errors import StudyFileError
from muscale.layout import LEDGER, LEDGER_PLACE, STUDY_FILE
from muscale.plain import finite

if TYPE_CHECKING:
    from muscale.following import Until
    from muscale.study import Study
    from muscale.watch import Watch, Watcher

app = App(
    name="muscale",
    version=metadata.version("muscale"),
    suppress_keyboard_interrupt=False,
    help="Find the hyperparameters, the size, the tokens and the loss of a large training run, then prove it.",
)


AsJson = Annotated[bool, Parameter(name="--json", negative=())]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every stage.

    Attributes:
        set: Replace a setting of the study file, `table.key=value`; may be repeated.
        json: Print the result as JSON.
        dry_run: Print what the stage would cost at most, and train nothing.
    """

    set: Annotated[tuple[str, ...], Parameter(name="--set", negative=())] = ()
    json: AsJson = False
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative=())] = False


@app.command
def init(directory: Path, *, keep: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Write a copy of the quickstart's study file into a directory, to be edited.

    Args:
        directory: Created if it is not there.
        keep: Leave a study file that is there already as it is, instead of refusing.
    """
    from muscale.errors import StudyDirectoryError

    path = directory / STUDY_FILE
    if path.exists():
        if not keep:
            raise StudyDirectoryError(f"{path}: is there already; edit it, or pass --keep to leave it as it is")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text((resources.files("muscale") / "quickstart.toml").read_text())
    print(f"wrote {path}; next: muscale run {path}")
    return 0


@app.command
def wheel(folder: Path = Path("dist")) -> int:
    """Write this muscale as a wheel that `ray job submit` can ship to a cluster: muscale wheel dist.

    Args:
        folder: Created if it is not there.
    """
    from muscale.wheel import write_wheel

    print(write_wheel(folder))
    return 0


@app.command
def run(study: Path, *, force: Annotated[bool, Parameter(negative=())] = False, options: Options = Options()) -> int:
    """Run every stage, skipping what the ledger knows: muscale run runs/quickstart/study.toml.

    Args:
        study: The study file.
        force: Go on past a failed coordinate check or a closed gate; the ledger keeps which lines were forced.
    """

    def every_stage(opened: Study) -> Any:
        promoted = opened.run(force=force)
        if not options.json:
            print(f"report: {opened.directory / 'report.html'}")
        return promoted

    return _stage(study, options, every_stage, None, failed=lambda result: not result.inside)


@app.command
def check(study: Path, *, options: Options = Options()) -> int:
    """Run the coordinate check; exit code 1 if it fails."""
    return _stage(study, options, lambda opened: opened.check(), "check", failed=lambda result: not result.passed)


@app.command
def sweep(
    study: Path,
    *,
    narrow: Annotated[bool, Parameter(negative=())] = False,
    learn_from: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    options: Options = Options(),
) -> int:
    """Search the space at the base shape: muscale sweep study.toml --set sweep.trials=64.

    Args:
        study: The study file.
        narrow: Where nothing of it is left to do, search as much again around the best region, in the same table; else
            only finish it.
        learn_from: Another study of the same corpus and family whose runs inform the searcher: its file, its directory or
            its ledger.sqlite; may be repeated.
    """
    return _stage(study, options, lambda opened: opened.sweep(narrower=narrow, learn_from=learn_from), "sweep")


@app.command
def transfer(study: Path, *, options: Options = Options()) -> int:
    """Check that the best learning rate stays put across widths and depths; exit code 1 unless it does."""
    return _stage(study, options, lambda opened: opened.transfer(), "transfer", failed=lambda result: not result.passed)


@app.command
def ablate(study: Path, *, options: Options = Options()) -> int:
    """Swap one component of the model at a time, over seeds: muscale ablate study.toml --set ablate.components='["norm"]'."""
    return _stage(study, options, lambda opened: opened.ablate(), "ablate")


@app.command
def ladder(study: Path, *, options: Options = Options()) -> int:
    """Train the runs that the law is fitted from."""
    return _stage(study, options, lambda opened: opened.ladder(), "ladder")


@app.command
def fit(study: Path, *, options: Options = Options()) -> int:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta to the tuned runs."""
    return _stage(study, options, lambda opened: opened.fit(), "fit")


@app.command
def plan(study: Path, *, export: Path | None = None, options: Options = Options()) -> int:
    """Decide the full run for the budget, register its forecast, write its file, and say which runs would make it surer.

    Args:
        study: The study file.
        export: Also write the plan into this folder for another framework: every tensor's values and the schedule.
    """

    def planned(opened: Study) -> Any:
        plan = opened.plan()
        if export:
            opened.export(export, plan)
        if options.json:
            return plan
        return f"{plan}\n  written to {opened.plan_path(plan)}\n{opened.band(plan)}\n{opened.next_runs(plan)}"

    return _stage(study, options, planned, "promote")


@app.command
def promote(
    study: Path,
    *,
    plan: Path | None = None,
    force: Annotated[bool, Parameter(negative=())] = False,
    rehearse: Annotated[bool, Parameter(negative=())] = False,
    steps: int = 5,
    prepare: Annotated[bool, Parameter(negative=())] = False,
    options: Options = Options(),
) -> int:
    """Train the planned run and hold it against its forecast; exit code 1 if it ends outside the interval.

    With --dry-run, print plan, gate, memory and workers, and exit with 1 if the gate is closed.

    Args:
        study: The study file.
        plan: A file that `muscale plan` wrote, whose [resources] hold then; by default the study file's plan.
        force: Go on past lines of the gate that failed; the ledger keeps which.
        rehearse: Only train, save and resume a few steps on the real devices, and forecast the run's wall time.
        steps: Of each of a rehearsal's two launches.
        prepare: Only enter that the run begins, and write what `muscale train` takes where there is no Ray.
    """
    if prepare and (rehearse or options.dry_run):
        raise StudyFileError("promote: --prepare enters that the run begins; leave out --rehearse and --dry-run")
    if prepare:
        return _stage(study, options, lambda opened: opened.prepare(plan, force=force), "promote")
    if rehearse and (force or options.dry_run):
        raise StudyFileError(
            f"promote: --rehearse asks no gate and shows no prospect; leave out {'--force' if force else '--dry-run'}"
        )
    if rehearse:
        return _stage(study, options, lambda opened: opened.rehearse(plan, steps=steps), "promote")
    if options.dry_run and (plan or _is_begun(study)):
        seen = replace(options, dry_run=False)
        return _stage(study, seen, lambda opened: opened.prospect(plan), None, failed=lambda result: not result.passed)

    def promoted(opened: Study) -> Any:
        return opened.promote(plan, force=force)

    return _stage(study, options, promoted, "promote", failed=lambda result: not result.inside)


@app.command(name="continue")
def continue_(study: Path, stage: Path, *, options: Options = Options()) -> int:
    """Train on from a checkpoint of a full run, on another corpus or more of the same: muscale continue study.toml code.toml.

    The same command goes on where it was, and prints the result of a finished stage: the held-out loss on its own corpus and on
    those before, before and after. With --dry-run, print what it goes on from and how, and train nothing. A stage file:

        name = "code"
        n_tokens = 2_000_000
        learning_rate_factor = 0.3
        rewarm_tokens = 100_000

        [corpus]
        source = "code"

    Args:
        study: The study file.
        stage: The stage file; its paths are relative to it.
    """
    if options.dry_run:
        seen = replace(options, dry_run=False)
        return _stage(study, seen, lambda opened: opened.continuation(stage), None)
    return _stage(study, options, lambda opened: opened.continue_run(stage), None)


@app.command
def train(run: Path) -> int:
    """Train a run that `muscale promote --prepare` wrote, without Ray: alone, or as one of torchrun's ranks.

    torchrun --nproc-per-node 8 -m muscale train full_runs/KEY/prepared.json

    Args:
        run: The file.
    """
    from muscale.prepared import train_here

    result = train_here(run)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {result['loss']:.4f} after {result['tokens']:,} tokens; `muscale promote` records it")
    return 0


@app.command
def watch(
    study: Path,
    *,
    until: Literal["now", "alarm", "end"] = "end",
    plan: str | None = None,
    every: float = 5.0,
    options: Options = Options(),
) -> int:
    """Show the full run beside its band; exit code 0 if its loss is inside, 1 outside or at an alarm, 2 if there is no run.

    Args:
        study: The study file.
        until: Look once ("now"), or until the run has ended, or is alarming; "alarm" ends with the run, too.
        plan: Key of a plan; by default the one whose run was begun last, here or elsewhere.
        every: Seconds between two looks.
    """
    _refuse_dry_run("a watch", options)
    return _stage(
        study, options, lambda opened: _followed(opened, opened.watcher(plan), until, every, options), None, _alarming
    )


@app.command
def observe(
    study: Path,
    source: str,
    *,
    follow: Annotated[bool, Parameter(negative=())] = False,
    wandb: Annotated[bool, Parameter(negative=())] = False,
    plan: str | None = None,
    tokens: str | None = None,
    loss: str | None = None,
    every: float = 5.0,
    options: Options = Options(),
) -> int:
    """Hold a full run that goes on elsewhere against its plan: muscale observe study.toml losses.csv --follow.

    What it says is marked as asserted, here and for ever. Exit codes as those of `watch`.

    Args:
        study: The study file.
        source: A CSV file with a column tokens or step, and loss or val_loss (held-out), train_loss or both.
        follow: Go on reading while the file grows, until the run has ended.
        wandb: The source is a run of Weights & Biases, entity/project/run; its key is in WANDB_API_KEY.
        plan: Key of the plan that the run follows, by default the one registered last.
        tokens: Name of the column of tokens or steps, if it is another.
        loss: Name of the column of held-out losses, if it is another.
        every: Seconds between two looks.
    """
    from muscale.observe import read_csv, read_wandb

    _refuse_dry_run("an observation", options)

    def observed(opened: Study) -> Any:
        observer = opened.observer(source if wandb else str(Path(source).resolve()), plan)

        def take() -> None:
            named = {"tokens": tokens, "loss": loss}
            rows = read_wandb(source, **named) if wandb else read_csv(Path(source), growing=follow, **named)
            observer.take(rows)

        take()
        until: Literal["now", "end"] = "end" if follow else "now"
        return _followed(opened, opened.watcher(observer.plan.key), until, every, options, take)

    return _stage(study, options, observed, None, _alarming)


@app.command
def calibration(study: Path, *others: Path, options: Options = Options()) -> int:
    """Print how often the forecasts of promoted runs held, of this study and of others.

    Args:
        study: The study file.
        others: Further studies: their files, directories or ledgers, which are only read.
    """
    _refuse_dry_run("a calibration", options)
    return _stage(study, options, lambda opened: opened.calibration(*others), None)


@app.command
def report(study: Path, *, options: Options = Options()) -> int:
    """Write report.html from what the ledger knows; trains nothing."""
    return _stage(study, options, lambda opened: opened.report(), "report")


@app.command
def runs(study: Path, *, options: Options = Options()) -> int:
    """Print the ledger's runs as a table."""

    def table(opened: Study) -> Any:
        if (again := opened.ledger.retrained()) and not options.json:
            print(
                f"{len(again)} times a pruned state was trained again, {sum(row['tokens'] for row in again):,} tokens in all"
            )
        hidden = ["hyperparameters", "source_losses", "numerics", "segment", "environment", "diverged_because"]
        return opened.runs().drop(columns=hidden)

    return _stage(study, options, table, "runs")


@app.command
def gc(study: Path, *, options: Options = Options()) -> int:
    """Remove training states that nothing goes on from, or with --dry-run only show what would go; results stay."""
    removes = replace(options, dry_run=False)  # of which the other dry run, of costs, knows nothing
    return _stage(study, removes, lambda opened: opened.gc(dry_run=options.dry_run), None)


@app.command
def merge(study: Path, *, source: Annotated[Path, Parameter(name="--from")], options: Options = Options()) -> int:
    """Add what another ledger of the same study knows: muscale merge study.toml --from ../colleague.

    Args:
        study: The study file.
        source: Another study's directory, or its ledger.sqlite; it is only read.
    """
    _refuse_dry_run("a merge", options)
    return _stage(study, options, lambda opened: opened.merge(source), None)


@app.command
def bundle(study: Path, *, average: int = 1, stage: str | None = None, options: Options = Options()) -> int:
    """Put everything of the promoted run into one directory that needs the study no more, with a hash of each file.

    Args:
        study: The study file.
        average: Write the average of so many last checkpoints beside the last weights, and print both losses.
        stage: Key or name of a finished stage of `muscale continue`, in place of the promoted run.
    """
    return _stage(study, options, lambda opened: opened.bundle(average=average, stage=stage), "bundle")


@app.command
def verify(bundle: Path, *, json: AsJson = False) -> int:
    """Check every hash of a bundle; exit code 1 if a file is missing, different or extra.

    Args:
        bundle: Its directory.
        json: Print the result as JSON.
    """
    from muscale.bundle_files import verify

    found = verify(bundle)
    _show(found, as_json=json)
    return 0 if found.passed else 1


@app.command
def export(
    bundle: Path,
    folder: Path,
    *,
    to: Literal["llama"],
    averaged: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Write a bundle's model in another layout: muscale export BUNDLE folder --to llama.

    Args:
        bundle: Its directory.
        folder: Must be empty, or not be there yet.
        to: "llama" is Hugging Face's, which transformers and lm-eval load, for models that are Llamas.
        averaged: The average of checkpoints, which the bundle must have, in place of the last weights.
    """
    from muscale.bundle import Bundle

    print(f"wrote {Bundle.open(bundle).export(folder, averaged=averaged)}")
    return 0


@app.command
def generate(
    bundle: Path,
    *,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    averaged: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Let a bundle's model continue a text, as a check that it learned something.

    Args:
        bundle: Its directory.
        prompt: Begins a document.
        tokens: To add, at most.
        temperature: 0 takes the likeliest token at each step; more draws.
        top_p: Draws among the likeliest tokens that have this probability together.
        seed: Of the draws.
        averaged: The average of checkpoints, which the bundle must have, in place of the last weights.
    """
    from muscale.bundle import Bundle

    opened = Bundle.open(bundle)
    text = opened.generate(prompt, tokens, temperature=temperature, top_p=top_p, seed=seed, averaged=averaged)
    print(f"{prompt}{text}")
    return 0


@app.command
def ui(
    study: Path,
    *,
    port: int = 8719,
    allow_actions: Annotated[bool, Parameter(negative=())] = False,
    options: Options = Options(),
) -> int:
    """Show the report as a page of this machine that follows the study while it runs: muscale ui study.toml.

    Args:
        study: The study file.
        port: Of the loopback device; 0 takes any that is free.
        allow_actions: Let the page cancel a trial or the study, for whoever has the access token that is printed.
    """
    from contextlib import suppress

    from muscale.live_server import serve
    from muscale.study import Study

    _refuse_dry_run("a page", options)
    with suppress(KeyboardInterrupt):  # the way to end it
        serve(Study.open(study, options.set, quiet=True), port=port, allow_actions=allow_actions)
    return 0


def _refuse_dry_run(what: str, options: Options) -> None:
    if options.dry_run:
        raise StudyFileError(f"--dry-run is for what costs compute or removes something; {what} does neither")


def _stage(
    path: Path,
    options: Options,
    stage: Callable[[Study], Any],
    name: str | None,
    failed: Callable[[Any], bool] = lambda result: False,
) -> int:
    """Open the study, call one method of it, print what it returns."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and not path.is_absolute():
        raise StudyFileError(
            f"{path}: a job of Ray runs in {Path.cwd()}; give the study file by its absolute path on a file system that "
            "every node has"
        )
    if options.dry_run:
        from muscale.config import StudyConfig
        from muscale.costs import estimate

        table = estimate(StudyConfig.read(path, options.set))
        shown = table["stage"] != "ablate" if name is None else table["stage"] == name  # no stage of `run`
        _show(table[shown], as_json=options.json)
        return 0
    from muscale.study import Study

    result = stage(Study.open(path, options.set, quiet=options.json))
    _show(result, as_json=options.json)
    return 1 if failed(result) else 0


def _is_begun(path: Path) -> bool:
    """Whether a study has a ledger; without one a dry run knows the study file alone, and writes nothing."""
    return any((path.parent / name).exists() for name in (LEDGER, LEDGER_PLACE))


def _followed(
    opened: Study,
    watcher: Watcher,
    until: Until,
    every: float,
    options: Options,
    before_look: Callable[[], None] = lambda: None,
) -> Watch:
    """The run as it stands at the end of the watching; shown on standard error meanwhile."""
    from rich.console import Console

    from muscale.following import follow

    console = None if options.json or until == "now" else Console(file=sys.stderr)
    return follow(
        watcher,
        until=until,
        every=every,
        settings=opened.config.promote,
        console=console,
        before_look=before_look,
    )


def _alarming(watch: Watch) -> bool:
    return watch.alarming or watch.inside is False


def _show(result: Any, *, as_json: bool) -> None:
    import pandas as pd

    if as_json:
        plain = (
            result.to_dict("records")
            if isinstance(result, pd.DataFrame)
            else getattr(result, "to_dict", lambda: str(result))()
        )
        print(json.dumps(finite(plain), indent=1, default=str))
    elif isinstance(result, pd.DataFrame):
        print(result.to_string(index=False) if len(result) else "nothing to train")
    else:
        print(result)


def _interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM is a Ctrl-C: `ray job stop` and batch systems send it."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the command `muscale`."""
    from muscale.errors import EXIT_PREEMPTED, MuscaleError, PreemptedError

    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(result_action="return_value")
    except PreemptedError as error:
        print(error, file=sys.stderr)
        code = EXIT_PREEMPTED
    except MuscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        code = 130
    sys.exit(code)
