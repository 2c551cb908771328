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
from muscale.planning import told
from muscale.sweep_figures import figures_of
from scaling import Forecast, ScalingFit, Verdict

if TYPE_CHECKING:
    from muscale.sweep_result import SweepResult
    from proxy_models.coordinate_check import CoordinateCheck
    from proxy_models.corpus import Corpus

_LAYOUT = {
    "template": "none",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#808488", "family": "system-ui, sans-serif"},
    "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
    "margin": {"l": 60, "r": 16, "t": 32, "b": 56},
    "autosize": True,
}
_GRID = {"gridcolor": "rgba(128,132,136,0.25)", "zerolinecolor": "rgba(128,132,136,0.4)", "automargin": True}


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
    plan: dict[str, Any] | None = None
    forecast: dict[str, Any] | None = None
    promotion: dict[str, Any] | None = None
    curve: pd.DataFrame | None = None


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: prose, a result as it prints itself, figures with their alternative text, a table."""

    title: str
    command: str
    about: str
    result: str | None = None
    drawings: tuple[tuple[str, str], ...] = ()
    table: str | None = None

    @property
    def known(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.result or self.drawings or self.table)


def write_report(contents: ReportContents, path: Path) -> Path:
    """Write the page, whole or not at all, and return its path."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"moment": _moment, "told": told}
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
            table=_table(_epochs(contents)),
        ),
        Section(
            title="Coordinate check",
            command="check",
            about="Every activation must move by the same amount at every width, or nothing tuned small holds when large.",
            result=str(contents.check) if contents.check else None,
            drawings=_drawn(contents.check and contents.check.plot(), "sizes of activations against width, by step"),
        ),
        *_search(contents.sweep),
        *_transfer(contents.transfer),
        Section(
            title="The law and its data",
            command="fit",
            about="Only annealed runs near their own best rate tell the law.",
            result=str(contents.fit) if contents.fit else None,
            drawings=(
                *_drawn(contents.fit and contents.fit.plot(), "predicted against measured loss, and residuals"),
                *_drawn(_frontier(contents), "loss against compute with the frontier and the forecast"),
            ),
        ),
        Section(
            title="The full run",
            command="promote",
            about="The forecast was registered before the first step and can't be changed.",
            drawings=_drawn(_curve(contents), "loss along the full run, its forecast and what was measured"),
            table=_table(_source_losses(contents)),
        ),
        Section(
            title="Every run",
            command="run",
            about="The ledger: one row for each run to its annealed end; loss in nats per token on held-out text.",
            table=_table(
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
        drawings=_drawn(sweep.plot_survivors(), "loss of each trial from rung to rung"),
        table=_table(sweep.trials),
    )
    parts = [
        Section(title=title, command="sweep", about=about, drawings=_drawn(figure, title.lower()), table=_table(table))
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
            drawings=_drawn(horizon and horizon.plot(), "best learning rate against training tokens"),
        )
    ]
    if batch or "batch law" in missing:
        laws.append(
            Section(
                title="Best batch against training tokens",
                command="transfer",
                about="At equal tokens, the rate tuned for each batch; the best batch follows the tokens, not the size.",
                result=str(batch) if batch else missing.get("batch law"),
                drawings=_drawn(batch and batch.plot(), "best batch against training tokens"),
                table=_table(batch.cells if batch else None),
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
            drawings=_drawn(found.plot(), f"loss against {found.over} for each {found.along}"),
            table=_table(found.table().reset_index()),
        )
        for found in verdict.transfers
    ]
    summary = Section(
        title="Does it transfer?",
        command="transfer",
        about=about,
        result=str(verdict),
        drawings=_drawn(verdict.plot_drifts() if several else None, "drift of each optimum with its interval"),
        table=_table(verdict.table()),
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


def _frontier(contents: ReportContents) -> go.Figure | None:
    if contents.fit is None:
        return None
    target = Forecast.from_dict(contents.plan["forecast"]) if contents.plan else None
    return contents.fit.plot_frontier(target)


def _curve(contents: ReportContents) -> go.Figure | None:
    if contents.curve is None or contents.forecast is None or contents.curve.empty:
        return None
    measured = contents.promotion["loss"] if contents.promotion else None
    return figures.draw_curve(figures.curve_data(contents.curve), contents.forecast, measured)


def _drawn(figure: go.Figure | None, alternative: str) -> tuple[tuple[str, str], ...]:
    """The figure as markup that needs the page's one copy of plotly.js, with its alternative text; nothing without one."""
    if figure is None:
        return ()
    figure.update_layout(**_LAYOUT)
    figure.update_xaxes(**_GRID)
    figure.update_yaxes(**_GRID)
    markup = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"responsive": True, "displayModeBar": False},
        default_height="420px",
    )
    return ((markup, alternative),)


def _table(table: pd.DataFrame | None) -> str | None:
    """The table as markup; pandas escapes what it holds."""
    if table is None or table.empty:
        return None
    return str(table.to_html(index=False, border=0, na_rep="–", float_format=lambda value: f"{value:.4g}"))
