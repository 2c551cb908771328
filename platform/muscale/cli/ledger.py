"""Commands of the ledger: runs, report, merge, gc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from muscale.cli.application import app
from muscale.cli.options import Options
from muscale.cli.running import refuse_dry_run, run_stage

if TYPE_CHECKING:
    from muscale.study import Study


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

    return run_stage(study, options, table, "runs")


@app.command
def report(study: Path, *, options: Options = Options()) -> int:
    """Write report.html from what the ledger knows; trains nothing."""
    return run_stage(study, options, lambda opened: opened.report(), "report")


@app.command
def merge(study: Path, *, source: Annotated[Path, Parameter(name="--from")], options: Options = Options()) -> int:
    """Add what another ledger of the same study knows: muscale merge study.toml --from ../colleague.

    Args:
        study: The study file.
        source: Another study's directory, or its ledger.sqlite; it is only read.
    """
    refuse_dry_run("a merge", options)
    return run_stage(study, options, lambda opened: opened.merge(source), None)


@app.command
def gc(study: Path, *, options: Options = Options()) -> int:
    """Remove training states that nothing goes on from, or with --dry-run only show what would go; results stay."""
    removes = replace(options, dry_run=False)  # of which the other dry run, of costs, knows nothing
    return run_stage(study, removes, lambda opened: opened.gc(dry_run=options.dry_run), None)
