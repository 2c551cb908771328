"""Commands of the ledger: runs, report, ui, gc."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from muscale.cli.application import KEEP, LOOK, command
from muscale.cli.ending import Ending, line
from muscale.cli.options import Flag, Options, Settings, Words
from muscale.cli.running import refuse_dry_run, run_stage
from muscale.errors import StudyFileError

if TYPE_CHECKING:
    from muscale.study import Study


@command(LOOK, example="muscale runs study.toml --where 'loss<2 and purpose=ladder' --sort loss --limit 10")
def runs(
    study: Path,
    *,
    where: Words = (),
    sort: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    limit: int | None = None,
    columns: Words = (),
    compare: Annotated[tuple[str, str] | None, Parameter(negative=())] = None,
    export: Path | None = None,
    options: Options = Options(),
) -> int:
    """Print the ledger's runs as a table, or compare two of them.

    Args:
        study: The study file.
        where: Only runs for which this holds, `column<value`, with = != < <= > >=; may be repeated, or joined by `and`. A
            column is one of the table's or a hyperparameter.
        sort: Sort by a column, from the largest if it is written `-column`.
        limit: At most so many runs.
        columns: Only these, `key,loss,n_tokens`; hyperparameters have columns, too.
        compare: Keys of two runs, or their beginnings: print what differs, and both losses.
        export: Also write the table into this file, .csv or .parquet; every column where none are named.
    """
    from muscale.store.ledger import NESTED
    from muscale.store.run_comparison import RunComparison
    from muscale.store.run_selection import Selection, save, widened

    refuse_dry_run("a table", options)
    selecting = bool(where or sort or limit or columns or export)
    if compare and selecting:
        raise StudyFileError(
            "runs: --compare shows two runs; leave out --where, --sort, --limit, --columns and --export"
        )
    selection = Selection(where=where, sort=sort, limit=limit, columns=columns)
    wrote: dict[str, Path] = {}

    def table(opened: Study) -> Any:
        if compare:
            return RunComparison.of(opened.runs(), *compare)
        known = opened.ledger.runs(without=set(NESTED) - {"hyperparameters"})
        if (again := opened.ledger.retrained()) and not options.json:
            tokens = sum(row["tokens"] for row in again)
            print(f"{len(again)} times a pruned state was trained again, {tokens:,} tokens in all", file=sys.stderr)
        selected = selection.of(known)
        if export:
            every = replace(selection, columns=columns or tuple(widened(known).columns))
            wrote["table"] = save(every.of(known), export)
        return selected

    def ending(_opened: Study, result: Any) -> Ending:
        nothing = not compare and result.empty and not where
        return Ending(wrote=wrote, next=(line("sweep", study),) if nothing else ())

    return run_stage(study, options, table, "runs", ending=ending, empty="no runs" if where else "no runs yet")


@command(LOOK, example="muscale report study.toml")
def report(study: Path, *, options: Options = Options()) -> int:
    """Write report.html from what the ledger knows; trains nothing.

    Args:
        study: The study file.
    """
    refuse_dry_run("a report", options)

    def written(opened: Study) -> Any:
        path = opened.report()
        return {"report": str(path)} if options.json else path

    return run_stage(study, options, written, None, ending=lambda _, path: Ending(wrote={"report": path}))


@command(LOOK, example="muscale ui study.toml --allow-actions")
def ui(study: Path, *, port: int = 8719, allow_actions: Flag = False, set: Settings = ()) -> int:
    """Show the report as a page of this machine that follows the study while it runs, until Ctrl-C.

    Args:
        study: The study file.
        port: Of the loopback device; 0 takes any that is free.
        allow_actions: Let the page cancel a trial or the study, for whoever has the access token that is printed.
        set: Replace a setting of the study file, `table.key=value`; may be repeated.
    """
    from muscale.pages.live_server import serve
    from muscale.study import Study

    with suppress(KeyboardInterrupt):  # the way to end it
        serve(Study.open(study, set, quiet=True).contents, port=port, allow_actions=allow_actions)
    return 0


@command(KEEP, example="muscale gc study.toml --dry-run")
def gc(study: Path, *, options: Options = Options()) -> int:
    """Remove training states that nothing goes on from, or with --dry-run only show what would go; results stay.

    Args:
        study: The study file.
    """
    from muscale.store.retention import prune

    removes = replace(options, dry_run=False)  # of which the other dry run, of costs, knows nothing
    once_more = Ending(next=(line("gc", study),) if options.dry_run else ())
    return run_stage(
        study,
        removes,
        lambda opened: prune(opened.ledger, top_k=opened.config.sweep.top_k, dry_run=options.dry_run),
        None,
        ending=lambda *_: once_more,
    )
