"""The report: one self-contained page about a study. `muscale.pages.live_page` shows the same page while a study runs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from muscale.full_runs.amend.amended_runs import amended_table
from muscale.monitoring import run_figures
from muscale.pages import summary
from muscale.pages.law_sections import law_sections, variant_sections
from muscale.pages.score_sections import score_sections
from muscale.pages.search_sections import running_section, search_sections, transfer_sections
from muscale.pages.sections import MAX_ROWS, Section, as_table, drawn, grouped, moment, page_file, templates
from muscale.pages.study_cost import draw_spending, format_spending
from proxy_models.data.cleaning.cleaned import removal_examples, removal_table
from proxy_models.files import write_text

if TYPE_CHECKING:
    from muscale.full_runs.amend.amended_runs import AmendedRun
    from muscale.monitoring.calibration import Calibration
    from muscale.pages.contents import ReportContents
    from muscale.plans.use_case_card import UseCaseCard

_CRITERIA = {"least": "least slope", "largest": "largest slope", "low": "bound, low", "high": "bound, high"}
_CALIBRATION = [
    "plan",
    "ended",
    "forecast",
    "low",
    "high",
    "measured",
    "residual_in_s",
    "inside",
    "asserted",
    "forced",
    "amended",
]
"""Columns of the table of finished runs."""
_of_full_run = partial(Section, command="promote", group="The full run")
_of_ledger = partial(Section, command="run", group="Ledger")


def write_report(contents: ReportContents, path: Path) -> Path:
    """Write the page atomically and return its path."""
    written = f"written {moment(contents.created_at)} · {len(contents.runs)} runs in the ledger"
    completed = contents.commands.completed_markup if contents.commands else str
    return write_page(path, sections_of(contents), name=contents.name, written=written, completed=completed)


def write_page(
    path: Path,
    sections: list[Section],
    *,
    name: str,
    written: str,
    completed: Callable[[str], str] = str,
    scripts: Sequence[str] = ("report.js",),
) -> Path:
    """Write a self-contained page atomically and return its path.

    Args:
        completed: Completes the commands that the page names.
        scripts: Files of the page's own script.
    """
    sources = {"plotly": get_plotlyjs(), "script": "".join(map(page_file, scripts))}
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in sources.values())
    write_text(path, completed(page(sections, name=name, written=written, policy=policy(hashes), **sources)))
    return path


def page(sections: list[Section], *, name: str, written: str, **values: Any) -> str:
    """Return the whole page around its sections.

    Args:
        values: Source and permissions of the page's scripts.
    """
    unset: dict[str, Any] = dict.fromkeys(("policy", "plotly", "script", "nonce", "live", "known", "actions"))
    contents, style = list(grouped(sections)), page_file("report.css")
    template = templates().get_template("page.html.jinja")
    return template.render(
        name=name, written=written, sections=sections, groups=contents, style=style, **unset | values
    )


def policy(scripts: str, *, connect: str = "'none'") -> str:
    """Return the page's content security policy: it loads nothing from other sites and runs only the page's own scripts.

    Args:
        scripts: Hashes or a nonce of the page's scripts.
        connect: Sources that these scripts may fetch from.
    """
    # plotly.js sets style attributes, and compiles the drawing of parallel coordinates, hence unsafe-inline and unsafe-eval.
    return (
        f"default-src 'none'; script-src 'unsafe-eval' {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def sections_of(contents: ReportContents, memo: dict[str, Any] | None = None) -> list[Section]:
    """Return every part of the page, in order.

    Args:
        memo: Cache of parts that are slow to draw, reused while their values are the same.
    """

    def kept(make: Callable[..., list[Section]], *shown: Any) -> list[Section]:
        made: list[Section]
        before, made = (memo or {}).get(make.__name__, (None, []))
        if before is None or not all(a is b or _same(a, b) for a, b in zip(before, shown, strict=True)):
            made = make(*shown)
        if memo is not None:
            memo[make.__name__] = (shown, made)
        return made

    return [
        _summary(contents),
        _plan(contents),
        *_use_case(contents.use_case),
        Section(
            title="The corpus",
            command="check",
            about="Each source's share at the end of a run and, with a plan, the full run's epochs on it.",
            result="\n".join(_corpus_warnings(contents)),
            table=as_table(_sources(contents)),
        ),
        *_data_sections(contents),
        *_check(contents),
        *running_section(contents.so_far, contents.sweep, contents.loss_unit),
        *kept(search_sections, contents.sweep),
        *kept(transfer_sections, contents.transfer),
        *kept(law_sections, contents.fit, contents.plan, contents.next_runs),
        *kept(variant_sections, contents.comparison),
        _of_full_run(
            title="The full run",
            about="The forecast and the band were registered before the first step and cannot be changed.",
            result="\n".join(str(one) for one in (contents.band, contents.evaluated) if one),
            drawings=(
                *drawn(_curve(contents), "loss along the full run, its forecast and the measured loss"),
                *drawn(
                    run_figures.draw_expert_loads(contents.expert_loads) if contents.expert_loads else None,
                    "load of each expert in the last evaluated step, over the mean of its block",
                ),
            ),
            table=as_table(_source_losses(contents)),
        ),
        _events(contents),
        *_amended(contents.amended),
        *_calibration(contents.calibration),
        *score_sections(contents.checkpoints, contents.score_forecasts, contents.gallery),
        _spending(contents.spending),
        _of_ledger(
            title="Every run",
            about=f"One row for each annealed run, with its held-out loss in {contents.loss_unit}. A long table shows "
            "the latest runs; `muscale runs` prints all.",
            table=as_table(_latest(contents.runs) if len(contents.runs) else None),
        ),
        _reproduction(contents.reproduction),
    ]


def _same(before: Any, now: Any) -> bool:
    """Whether two plain values are equal; values of other types count as different."""
    return isinstance(before, dict) and bool(before == now)


def _check(contents: ReportContents) -> Iterator[Section]:
    if contents.has_check:
        yield Section(
            title="Coordinate check",
            command="check",
            about="Every activation must move by the same amount at every width, or values tuned on small models do not transfer.",
            result=contents.check.about if contents.check else None,
            drawings=drawn(
                contents.check and contents.check.plot(),
                "sizes of activations and norms of matrices against width, by step",
            ),
            table=as_table(contents.check.criteria.round(2).rename(columns=_CRITERIA) if contents.check else None),
        )


def _summary(contents: ReportContents) -> Section:
    headline, state = summary.headline(contents)
    return Section(
        title="Summary",
        command="run",
        about="",
        template="summary.html.jinja",
        values={
            "contents": contents,
            "headline": headline,
            "conclusion": summary.conclusion(contents),
            "state": state,
            "ruler": summary.ruler(contents),
            "tiles": summary.tiles(contents),
            "steps": summary.lineage(contents),
        },
    )


def _plan(contents: ReportContents) -> Section:
    return Section(
        title="The plan",
        command="plan",
        about="Size, tokens and hyperparameters of the full run, each with the rule that transferred it.",
        template="plan.html.jinja" if contents.plan else None,
        values={"plan": contents.plan, "gate": contents.gate},
    )


def _use_case(card: UseCaseCard | None) -> list[Section]:
    """Return the section if the study has [use_case]."""
    if card is None:
        return []
    return [
        Section(
            title="The use case",
            command="plan",
            about=f"Sizes trained with {card.compute_flops:.3g} FLOPs, against the limits and targets of [use_case]. P is the "
            "probability that a target is reached; latency is a lower bound.",
            result="\n".join((card.conclusion, *(f"- outside declared support: {doubt}" for doubt in card.doubts))),
            table=as_table(card.shown),
        )
    ]


def _data_sections(contents: ReportContents) -> Iterator[Section]:
    """Generate the sections on removed text and on held-out text that the training text contains."""
    files = contents.corpus.sources if contents.corpus else {}
    if removed := {name: one.manifest["cleaned"] for name, one in files.items() if one.manifest.get("cleaned")}:
        about = "Text that each step of [corpus.clean] removed from each source."
        table = removal_table(removed)
        table["removed"] = table["removed"].map("{:.1%}".format)
        yield Section(title="Cleaning", command="data clean", about=about, table=as_table(table))
        examples = removal_examples(removed)
        if len(examples):
            yield Section(
                title="Examples of what was removed",
                command="data clean",
                about="Some of the documents and lines that were removed, with the reasons.",
                table=as_table(examples),
            )
    if leaks := contents.leaks:
        yield Section(
            title="Held-out text in the training text",
            command="data check",
            about="Losses on text seen in training are too low. These are the longest passages that training and held-out text share.",
            result=f"{'Passed' if leaks.passed else 'FAILED'}: {'; '.join(filter(None, (leaks.compared, leaks.repeated)))}.",
            table=as_table(leaks.table()),
        )


def _corpus_warnings(contents: ReportContents) -> list[str]:
    if contents.corpus is not None and contents.corpus.is_own_data:
        return [str(contents.corpus)]
    if contents.corpus is None or contents.plan is None:
        return []
    n_tokens, context_length = contents.plan["n_tokens"], contents.plan["model"]["context_length"]
    return [f"warning: {warning}" for warning in contents.corpus.warnings(n_tokens, context_length)]


def _sources(contents: ReportContents) -> pd.DataFrame | None:
    if contents.corpus is None or contents.corpus.is_own_data:
        return None
    table = contents.corpus.table()
    if contents.plan is None:
        return table
    epochs = contents.corpus.epochs(contents.plan["n_tokens"], contents.plan["model"]["context_length"])
    return table.assign(**{"epochs in the full run": table["source"].map(epochs)})


def _source_losses(contents: ReportContents) -> pd.DataFrame | None:
    """Return the measured loss by source."""
    if contents.promotion is None:
        return None
    return pd.DataFrame(contents.promotion["source_losses"].items(), columns=["source", f"loss, {contents.loss_unit}"])


def _events(contents: ReportContents) -> Section:
    events, begun = contents.run_events, contents.curve is not None or contents.promotion is not None
    quiet = "none: no alarm, no skipped batch, no rollback to a checkpoint, no restart" if begun else None
    return _of_full_run(
        title="Events",
        about="Alarms, skipped batches, rollbacks to a checkpoint and restarts, in order of time.",
        result=quiet if events is None or events.empty else None,
        table=as_table(events),
    )


def _amended(found: tuple[AmendedRun, ...]) -> list[Section]:
    """Return the section on runs that branched off others, if there are any."""
    if not found:
        return []
    return [
        _of_full_run(
            title="Amended runs",
            about="Runs that branched off a checkpoint of another, each with the forecast that was registered before its first step.",
            result="\n".join(f"{run.name} {run.key}: {run.control}" for run in found if run.control) or None,
            table=as_table(amended_table(found)),
        )
    ]


def _calibration(found: Calibration | None) -> list[Section]:
    """Return the section on finished runs, if there are any."""
    if found is None or found.table.empty:
        return []
    return [
        _of_full_run(
            title="Did the forecasts hold?",
            about="Every finished full run; the residual is in units of the forecast's scale. Asserted: reported by the user.",
            table=as_table(found.table[_CALIBRATION].assign(ended=found.table["ended"].str[:19])),
        )
    ]


def _spending(table: pd.DataFrame) -> Section:
    return _of_ledger(
        title="Cost",
        about="Compute and time by purpose; training that several runs share is counted once, for the first of them.",
        result=format_spending(table) if len(table) else None,
        drawings=drawn(draw_spending(table) if len(table) else None, "shares of compute and time by purpose"),
        table=as_table(table),
    )


def _reproduction(found: dict[str, Any] | None) -> Section:
    return _of_ledger(
        title="How to reproduce",
        about="The commands, the hashes that determine the results, and the study file.",
        template="reproduction.html.jinja" if found else None,
        values={"found": found},
    )


def _latest(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs to show: all of them with the oldest first, or if they are too many, with the latest first."""
    table = runs[["purpose", "label", "n_params", "n_tokens", "learning_rate", "loss", "seconds"]]
    return table if len(table) <= MAX_ROWS else table.iloc[::-1]


def _curve(contents: ReportContents) -> go.Figure | None:
    if contents.curve is None or contents.forecast is None or contents.curve.empty:
        return None
    measured = contents.promotion["loss"] if contents.promotion else None
    data, epochs = run_figures.curve_data(contents.curve), contents.epochs
    if contents.band is None or contents.evaluations is None:
        return run_figures.draw_curve(data, contents.forecast, measured, epochs=epochs, loss_unit=contents.loss_unit)
    return run_figures.draw_curve(
        data,
        contents.forecast,
        measured,
        end=contents.band.n_tokens,
        band=contents.band.to_frame(),
        evaluations=contents.band.place(contents.evaluations),
        epochs=epochs,
        loss_unit=contents.loss_unit,
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
