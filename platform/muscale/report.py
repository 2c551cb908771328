"""The report: one self-contained page of what a study knows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from muscale import figures
from muscale.law_sections import law_sections
from muscale.planning import told, told_decision
from muscale.sections import Section, as_table, drawn
from muscale.sweep_figures import figures_of
from muscale.watch import place
from scaling import ScalingFit, Verdict

if TYPE_CHECKING:
    from muscale.band import Band
    from muscale.calibration import Calibration
    from muscale.checkpoint_evaluation import CheckpointEvaluation
    from muscale.next_stems import NextStems
    from muscale.sweep_result import SweepResult
    from proxy_models.coordinate_check import CoordinateCheck
    from proxy_models.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class ReportContents:
    """What a report shows; None where it is not known yet."""

    name: str
    config: dict[str, Any]
    created_at: str
    runs: pd.DataFrame
    corpus: Corpus | None = None
    check: CoordinateCheck | None = None
    sweep: SweepResult | None = None
    transfer: Verdict | None = None
    fit: ScalingFit | None = None
    next_runs: NextStems | None = None
    plan: dict[str, Any] | None = None
    forecast: dict[str, Any] | None = None
    promotion: dict[str, Any] | None = None
    curve: pd.DataFrame | None = None
    evaluations: pd.DataFrame | None = None
    evaluated: CheckpointEvaluation | None = None
    band: Band | None = None
    calibration: Calibration | None = None
    befallen: pd.DataFrame | None = None


def write_report(contents: ReportContents, path: Path) -> Path:
    """Write the page, whole or not at all, and return its path."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"moment": _moment, "told": told, "told_decision": told_decision}
    template = environment.from_string((resources.files("muscale") / "report.html.jinja").read_text())
    page = template.render(contents=contents, sections=_sections(contents), plotly=get_plotlyjs())
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(page)
    unfinished.replace(path)
    return path


def _moment(stamp: str) -> str:
    """A time of the ledger as people write it, to the second."""
    return f"{datetime.fromisoformat(stamp):%Y-%m-%d %H:%M:%S} UTC"


def _sections(contents: ReportContents) -> list[Section]:
    return [
        Section(
            title="The corpus",
            command="check",
            about="Every source and its share at the end of a run; with a plan, how often the full run sees each.",
            result="\n".join(_corpus_lines(contents)),
            table=as_table(_epochs(contents)),
        ),
        Section(
            title="Coordinate check",
            command="check",
            about="Every activation must move by the same amount at every width, or nothing tuned small holds when large.",
            result=str(contents.check) if contents.check else None,
            drawings=drawn(contents.check and contents.check.plot(), "sizes of activations against width, by step"),
        ),
        *_search(contents.sweep),
        *_transfer(contents.transfer),
        *law_sections(contents.fit, contents.plan, contents.next_runs),
        Section(
            title="The full run",
            command="promote",
            about="The forecast was registered before the first step and can't be changed, and so was the band on the way to it.",
            result="\n".join(str(told) for told in (contents.band, contents.evaluated) if told),
            drawings=drawn(_curve(contents), "loss along the full run, its forecast and what was measured"),
            table=as_table(_source_losses(contents)),
        ),
        *_befallen(contents.befallen),
        *_calibration(contents.calibration),
        Section(
            title="Every run",
            command="run",
            about="The ledger: one row for each run to its annealed end; loss in nats per token on held-out text.",
            table=as_table(
                contents.runs[["purpose", "label", "n_params", "n_tokens", "learning_rate", "loss", "seconds"]]
                if len(contents.runs)
                else None
            ),
        ),
    ]


def _search(sweep: SweepResult | None) -> list[Section]:
    """What was searched, and a section for each figure for which there is data."""
    about = "Trials at the base shape, compared at rungs; those that went on and the best of each rung were annealed."
    if sweep is None:
        return [Section(title="What was searched", command="sweep", about=about)]
    whole = Section(
        title="What was searched",
        command="sweep",
        about=about,
        result=str(sweep),
        drawings=drawn(sweep.plot_survivors(), "loss of each trial from rung to rung"),
        table=as_table(sweep.trials),
    )
    parts = [
        Section(title=title, command="sweep", about=about, drawings=drawn(figure, title.lower()), table=as_table(table))
        for title, about, figure, table in figures_of(sweep)
    ]
    return [whole, *parts]


def _transfer(verdict: Verdict | None) -> list[Section]:
    """The verdict with its drifts, a section for each scale and hyperparameter, and the laws in the tokens."""
    about = "Under muP the best rate stays put while the model gets wider; the verdict gates promotion."
    horizon, batch, missing = (verdict.horizon, verdict.batch, verdict.missing) if verdict else (None, None, {})
    laws = [
        Section(
            title="Best rate against training tokens",
            command="transfer",
            about="muP says nothing about longer training; this law carries the rate across tokens.",
            result=str(horizon) if horizon else missing.get("horizon law"),
            drawings=drawn(horizon and horizon.plot(), "best learning rate against training tokens"),
        )
    ]
    if batch or "batch law" in missing:
        laws.append(
            Section(
                title="Best batch against training tokens",
                command="transfer",
                about="At equal tokens, the rate tuned for each batch; the best batch follows the tokens, not the size.",
                result=str(batch) if batch else missing.get("batch law"),
                drawings=drawn(batch and batch.plot(), "best batch against training tokens"),
                table=as_table(batch.cells if batch else None),
            )
        )
    if verdict is None:
        return [Section(title="Loss against learning rate, per width", command="transfer", about=about), *laws]
    several = len(verdict.transfers) > 1
    panels = [
        Section(
            title=f"Loss against {'learning rate' if found.over == 'rate' else found.over}, per {found.along}",
            command="transfer",
            about="Dotted: the runs, with the range over seeds; solid: the parabola; stars: the optima.",
            drawings=drawn(found.plot(), f"loss against {found.over} for each {found.along}"),
            table=as_table(found.table().reset_index()),
        )
        for found in verdict.transfers
    ]
    summary = Section(
        title="Does it transfer?",
        command="transfer",
        about=about,
        result=str(verdict),
        drawings=drawn(verdict.plot_drifts() if several else None, "drift of each optimum with its interval"),
        table=as_table(verdict.table()),
    )
    return [summary, *panels, *laws]


def _corpus_lines(contents: ReportContents) -> list[str]:
    if contents.corpus is None:
        return []
    warnings = contents.corpus.warnings(contents.plan["n_tokens"]) if contents.plan else []
    return [str(contents.corpus), *(f"warning: {warning}" for warning in warnings)]


def _epochs(contents: ReportContents) -> pd.DataFrame | None:
    if contents.corpus is None or contents.plan is None:
        return None
    epochs = contents.corpus.epochs(contents.plan["n_tokens"])
    return pd.DataFrame(epochs.items(), columns=["source", "epochs in the full run"])


def _source_losses(contents: ReportContents) -> pd.DataFrame | None:
    """The measured loss by source, where there are several."""
    if contents.promotion is None:
        return None
    return pd.DataFrame(contents.promotion["source_losses"].items(), columns=["source", "loss, nats per token"])


def _befallen(events: pd.DataFrame | None) -> list[Section]:
    """Where there was anything."""
    if events is None or events.empty:
        return []
    return [
        Section(
            title="What befell the full run",
            command="promote",
            about="Alarms, batches left out, returns to a checkpoint and restarts, in order of time.",
            table=as_table(events),
        )
    ]


def _calibration(found: Calibration | None) -> list[Section]:
    """Of every run that ended, once there is one."""
    if found is None or found.table.empty:
        return []
    return [
        Section(
            title="Did forecasts hold?",
            command="promote",
            about="Every full run that ended, its residual in units of the forecast's own scale. Asserted: as its owner tells.",
            table=as_table(found.table.drop(columns="study")),
        )
    ]


def _curve(contents: ReportContents) -> go.Figure | None:
    if contents.curve is None or contents.forecast is None or contents.curve.empty:
        return None
    measured = contents.promotion["loss"] if contents.promotion else None
    data = figures.curve_data(contents.curve)
    if contents.band is None or contents.evaluations is None:
        return figures.draw_curve(data, contents.forecast, measured)
    return figures.draw_curve(
        data,
        contents.forecast,
        measured,
        end=contents.band.n_tokens,
        band=figures.band_data(contents.band),
        evaluations=place(contents.evaluations, contents.band),
    )
