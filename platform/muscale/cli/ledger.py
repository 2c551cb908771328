"""Commands of the ledger: runs, report, gallery, ui, gc."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from muscale.cli.application import ARTIFACTS, INSPECT, command
from muscale.cli.ending import Ending
from muscale.cli.options import Flag, Options, Port, Settings, StageOptions, StudyFile, Whole, Words
from muscale.cli.running import run_stage
from muscale.errors import StudyFileError

if TYPE_CHECKING:
    from muscale.study import Study

_WORDS = 60  # characters printed of each document


@command(INSPECT, example="muscale runs study.toml --where 'loss<2 and purpose=ladder' --sort loss --limit 10")
def runs(
    study: StudyFile,
    *,
    where: Words = (),
    sort: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    limit: Whole | None = None,
    columns: Words = (),
    compare: Annotated[tuple[str, str] | None, Parameter(negative=())] = None,
    batch: Annotated[tuple[str, int] | None, Parameter(negative=())] = None,
    export: Path | None = None,
    options: Options = Options(),
) -> int:
    """Print the ledger's runs as a table, compare two of them, or list the documents of a training step.

    Args:
        where: Print only runs that meet a condition such as `column<value`, with = != < <= > >=; may be repeated or joined by `and`.
            The column may also be a hyperparameter.
        sort: Column to sort by; `-column` sorts in descending order.
        limit: Maximum number of runs to print.
        columns: Columns to print, such as `key,loss,n_tokens`; hyperparameters are columns, too.
        compare: Keys of two runs, or prefixes of keys: print both losses and every setting that differs.
        batch: Key of a run, or its prefix, and a step, counted from 0: print the documents in that step's batch. A full run
            may also be given by its plan's key.
        export: Also write the table to this .csv or .parquet file, with all columns unless --columns is given.
    """
    from muscale.store.ledger import NESTED
    from muscale.store.run_comparison import RunComparison
    from muscale.store.run_selection import Selection, save, widened

    selecting = bool(where or sort or limit or columns)
    if compare and (selecting or export or batch):
        raise StudyFileError(
            "runs: --compare shows two runs; leave out --where, --sort, --limit, --columns, --batch and --export"
        )
    if batch and selecting:
        raise StudyFileError("runs: --batch shows one step; leave out --where, --sort, --limit and --columns")
    selection = Selection(where=where, sort=sort, limit=limit, columns=columns)
    wrote: dict[str, Path] = {}

    def table(opened: Study) -> Any:
        if compare:
            return RunComparison.of(opened.runs(), *compare)
        if batch:
            from muscale.monitoring.seen_data import SeenData  # imports torch

            documents = SeenData.of(opened.contents, batch[0]).batch(batch[1])
            if export:
                wrote["table"] = save(documents, export)
            return documents if options.json else documents.assign(text=documents["text"].map(_first_words))
        known = opened.ledger.runs(without=set(NESTED) - {"hyperparameters"})
        if (again := opened.ledger.retrained()) and not options.json:
            tokens = sum(row["tokens"] for row in again)
            print(f"pruned states were retrained {len(again)} times, {tokens:,} tokens in total", file=sys.stderr)
        selected = selection.of(known)
        if export:
            every = replace(selection, columns=columns or tuple(widened(known).columns))
            wrote["table"] = save(every.of(known), export)
        return selected

    def ending(_opened: Study, result: Any) -> Ending:
        nothing = not compare and result.empty and not where
        return Ending(wrote=wrote, next=(options.line("sweep", study),) if nothing else ())

    return run_stage(study, options, table, "runs", ending=ending, empty="no runs" if where else "no runs yet")


def _first_words(text: str | None) -> str:
    """Return the beginning of a text on one line."""
    words = " ".join((text or "")[: 4 * _WORDS].split())
    return words if len(words) <= _WORDS else words[: _WORDS - 1] + "…"


@command(INSPECT, example="muscale report study.toml")
def report(study: StudyFile, *, options: Options = Options()) -> int:
    """Write report.html from the ledger; trains nothing."""

    def written(opened: Study) -> Any:
        path = opened.report()
        return {"report": str(path)} if options.json else path

    return run_stage(study, options, written, None, ending=lambda _, path: Ending(wrote={"report": path}))


@command(INSPECT, example="muscale gallery study.toml --compare 'full run@65536' 'full run'")
def gallery(
    study: StudyFile,
    *,
    html: Path | None = None,
    run: Words = (),
    compare: tuple[str, str] | None = None,
    options: Options = Options(),
) -> int:
    """Write gallery.html: the samples of every evaluated checkpoint, their scores over training, and a comparison of two.

    Args:
        html: File to write instead.
        run: Name of a run to show, as on the page; may be repeated. All by default.
        compare: Two checkpoints that the page compares first: RUN@TOKENS, or RUN for its last checkpoint.
    """

    def written(opened: Study) -> Any:
        path = opened.gallery(html, runs=run, compare=compare)
        return {"gallery": str(path)} if options.json else path

    return run_stage(study, options, written, None, ending=lambda _, path: Ending(wrote={"gallery": path}))


@command(INSPECT, example="muscale ui study.toml --allow-actions")
def ui(study: StudyFile, *, port: Port = 8719, allow_actions: Flag = False, set: Settings = ()) -> int:
    """Serve the report as a local web page that updates while the study runs; stop with Ctrl-C.

    Args:
        port: Port on localhost; 0 picks a free one.
        allow_actions: Let anyone with the printed access token cancel a trial or the study from the page.
    """
    from muscale.pages.live_server import serve
    from muscale.study import Study

    with suppress(KeyboardInterrupt):  # the way to end it
        serve(Study.open(study, set, quiet=True).contents, port=port, allow_actions=allow_actions)
    return 0


@command(ARTIFACTS, example="muscale gc study.toml --dry-run")
def gc(study: StudyFile, *, options: StageOptions = StageOptions()) -> int:
    """Delete training states that are no longer needed; results are kept.

    With --dry-run, only print what would be deleted.
    """
    from muscale.store.retention import prune

    once_more = Ending(next=(options.line("gc", study),) if options.dry_run else ())
    return run_stage(
        study,
        options,
        lambda opened: prune(opened.ledger, top_k=opened.config.sweep.top_k, dry_run=options.dry_run),
        None,
        ending=lambda *_: once_more,
    )
