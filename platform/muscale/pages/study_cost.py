"""Cost of a study so far by purpose: the search and the full run."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import sqlalchemy as sa

from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import runs, segments
from proxy_models.architecture.member import Member
from scaling.drawing import COLOURS

PURPOSES = {
    "sweep": "sweep",
    "tune": "Tuner",
    "transfer": "transfer",
    "ladder": "ladder",
    "compare": "variants",
    "full": "full runs",
}
"""Purposes of runs in the order of the stages, with their names on pages; training that two purposes share counts for the first."""
_ROW, _AROUND = 40, 150  # pixels of height of a bar, and of the margin around both


def spending(ledger: Ledger) -> pd.DataFrame:
    """Return a row for each purpose with runs: purpose, runs, n_tokens, compute_flops, seconds, of_full_run.

    Tokens that runs share are counted once, for the first purpose that needed them; stopped trials count for the sweep.
    `compute_flops` is 6·N·D. `seconds` are worker seconds, but wall time for the full run. `of_full_run` is the ratio of the
    compute to the full run's, missing if there is no full run.
    """
    trained, noted = ledger.read(_trainings)
    parents = {row["key"]: (row["line"], row["parent"]) for row in trained}
    owners: dict[str, str] = {}
    for purpose in PURPOSES:
        for key in (key for of, key in noted if of == purpose):
            at: str | None = key
            while at in parents:
                line, at = parents[at]
                owners.setdefault(line, purpose)
    rows = [
        {
            "purpose": owners.get(row["line"], "sweep"),
            "n_tokens": row["tokens"] - row["trained_from"],
            "compute_flops": 6.0 * _n_params(row["numerics"]) * (row["tokens"] - row["trained_from"]),
            "seconds": row["seconds"],
        }
        for row in trained
    ]
    columns = ["purpose", "n_tokens", "compute_flops", "seconds"]
    table = pd.DataFrame(rows, columns=columns).groupby("purpose", as_index=False).sum()
    table.insert(1, "runs", [sum(of == purpose for of, _ in noted) for purpose in table["purpose"]])
    full = table.loc[table["purpose"] == "full", "compute_flops"].sum()
    table["of_full_run"] = table["compute_flops"] / full if full else float("nan")
    order = {purpose: place for place, purpose in enumerate(PURPOSES)}
    return table.sort_values("purpose", key=lambda names: names.map(order), ignore_index=True)


def draw_spending(table: pd.DataFrame) -> go.Figure:
    """Draw compute and time as two bars, with a colour for each purpose."""
    figure = go.Figure()
    for i, row in enumerate(table.to_dict("records")):
        shares = [
            100 * row[name] / table[name].sum() if table[name].sum() else 0 for name in ("seconds", "compute_flops")
        ]
        hovers = [f"{row['seconds']:,.0f} worker seconds", f"{row['compute_flops']:.3g} FLOPs"]
        figure.add_bar(
            x=shares,
            y=["worker time", "compute"],
            orientation="h",
            name=row["purpose"],
            text=[f"{share:.0f} %" if share >= 4 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            hovertext=hovers,
            hoverinfo="name+text",
            marker={"color": COLOURS[i % len(COLOURS)]},
        )
    figure.update_layout(barmode="stack", height=_AROUND + 2 * _ROW, legend={"traceorder": "normal"})
    figure.update_traces(textfont={"color": "white"})
    figure.update_xaxes(title="share of the total (%)", range=[0, 100])
    return figure


def format_spending(table: pd.DataFrame) -> str | None:
    """Compare the cost of the search with the full run in a sentence; None without a full run."""
    search = table[table["purpose"] != "full"]
    full = table[table["purpose"] == "full"]
    if full.empty or search.empty:
        return None
    share = search["compute_flops"].sum() / full["compute_flops"].sum()
    return (
        f"everything before the full run cost {search['compute_flops'].sum():.3g} FLOPs, {share:.3g} times the full run's "
        f"{full['compute_flops'].sum():.3g}, and {search['seconds'].sum() / 3600:.3g} worker hours"
    )


def _trainings(connection: sa.Connection) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    names = ("key", "line", "parent", "trained_from", "tokens", "seconds")
    query = sa.select(
        *(segments.c[name] for name in names), sa.type_coerce(segments.c.numerics, sa.Text).label("numerics")
    )
    found = connection.execute(query.order_by(segments.c.key)).mappings()
    noted = connection.execute(sa.select(runs.c.purpose, runs.c.key).order_by(runs.c.key))
    return [dict(row) for row in found], [(purpose, key) for purpose, key in noted]


@cache
def _n_params(numerics: str) -> int:
    """Return the parameters of the model in a segment's numerics; few values occur, however many the rows."""
    values: dict[str, Any] = json.loads(numerics)["model"]
    return Member.from_dict(values).n_params
