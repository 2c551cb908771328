"""The data of each of a sweep's figures says what the record says, and each drawing names its axes with their units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from muscale import StageError
from muscale.pages.contents import ReportContents
from muscale.pages.report import write_report
from muscale.pages.search_sections import search_sections
from muscale.search.sweep_figures import (
    coloured_by,
    draw_parallel,
    history_data,
    lineage_data,
    parallel_data,
    response_data,
    survivors_data,
)
from muscale.search.sweep_result import SweepResult
from search_spaces import Space, Uniform

Search = Callable[..., SweepResult]
POPULATION = ("sweep.scheduler=pbt", "sweep.trials=8")


def axis_titles(figure: Any) -> set[str]:
    return {figure.layout[name].title.text for name in figure.layout if name.startswith(("xaxis", "yaxis"))}


def test_survivors_are_those_that_came_to_the_last_rung(search: Search) -> None:
    result = search()
    data = survivors_data(result.rungs, result.winner)
    last = data[data["n_tokens"] == 8000]
    assert set(last["series"]) == {"winner", "to the last rung"}
    assert set(last["trial"]) == set(result.trials.query("status == 'completed'")["trial"])
    assert set(data.loc[data["series"] == "winner", "trial"]) == {result.winner}
    figure = result.plot_survivors()
    assert [trace.name for trace in figure.data] == ["stopped", "to the last rung", "winner"]
    assert axis_titles(figure) == {"training tokens of the rung", "loss at the rung (nats per token)"}


def test_the_history_falls_at_each_rung(search: Search) -> None:
    data = history_data(search().rungs)
    assert data["spent_flops"].is_monotonic_increasing
    for n_tokens, part in data.groupby("n_tokens"):
        assert part["best"].dropna().is_monotonic_decreasing, n_tokens
        assert part["best"].iloc[-1] == part["loss"].min()


def test_parallel_axes_show_the_hyperparameters_own_values(search: Search) -> None:
    result = search()
    data = parallel_data(result.rungs, result.trials, result.space)
    assert data["trial"].nunique() == len(data) == int((result.trials["status"] != "diverged").sum())
    rates = result.trials.set_index("trial").loc[data["trial"], "learning_rate"]
    np.testing.assert_allclose(2 ** data["learning_rate"], rates)
    (lines,) = draw_parallel(data, result.space).data
    rate, scale, readout, loss = lines.dimensions
    assert (rate.ticktext[0], rate.ticktext[-1]) == ("0.001", "0.1")
    assert scale.label == "init_scale"
    assert readout.ticktext == ("True", "False")
    assert loss.label == "loss"


def test_the_curve_s_floor_is_the_optimum(search: Search) -> None:
    result = search("sweep.rungs=2")
    data = response_data(result.annealed, result.fitted, result.space, "learning_rate")
    for n_tokens, part in data.groupby("n_tokens"):
        curve, best = part[part["series"] == "curve"], part[part["series"] == "optimum"].iloc[0]
        assert best["loss"] <= curve["loss"].min() + 1e-3, n_tokens
        assert best["low"] < best["value"] < best["high"]
        assert len(part[part["series"] == "run"]) == len(result.annealed.query("n_tokens == @n_tokens"))
    titles = {"learning rate at the base shape", "annealed loss (nats per token)"}
    assert axis_titles(result.plot_rate()) == titles
    with pytest.raises(ValueError, match="must be a searched number, learning_rate, init_scale, got 'zero_readout'"):
        result.plot_rate("zero_readout")


def test_the_front_is_drawn_against_compute(search: Search) -> None:
    result = search("sweep.trials=6")
    assert axis_titles(result.plot_front()) == {"training compute 6·N·D (FLOPs)", "loss (nats per token)"}


def test_the_lineage_leads_from_a_first_generation_to_the_winner(search: Search) -> None:
    result = search(*POPULATION)
    data = lineage_data(result.rungs, result.winner, "learning_rate")
    path = data[data["on_path"]].sort_values("n_tokens")
    assert path["n_tokens"].tolist() == [1000, 2000, 4000, 8000]
    assert path["trial"].iloc[-1] == result.winner
    assert path["from_trial"].tolist()[1:] == path["trial"].tolist()[:-1]
    copies = data[data["series"] == "copy"]
    assert 0 < len(copies) <= len(result.copies)
    donors = {(row["trial"], row["donor"]) for row in result.copies.to_dict("records")}
    assert {(int(row["trial"]), int(row["from_trial"])) for row in copies.to_dict("records")} <= donors
    assert "the winner's path" in {trace.name for trace in result.plot_lineage().data}
    assert axis_titles(result.plot_lineage()) == {"training tokens", "member of the population"}
    with pytest.raises(StageError, match="only a population has a lineage"):
        search("sweep.trials=2").plot_lineage()


def test_a_lineage_without_a_searched_rate_is_coloured_by_what_changed_instead(search: Search) -> None:
    found = search(*POPULATION)
    rungs = found.rungs.rename(columns={"learning_rate": "beta1"})
    result = replace(found, rungs=rungs, space=Space({"beta1": Uniform(low=0.001, high=0.1)}))
    data = lineage_data(result.rungs, result.winner, coloured_by(result.space))
    assert data["value"].tolist() == rungs.dropna(subset="loss")["beta1"].tolist()
    assert result.plot_lineage().data[-1].marker.colorbar.title.text == "beta1"
    assert found.plot_lineage().data[-1].marker.colorbar.title.text == "log10 of the rate"


def test_the_report_shows_every_figure_for_which_there_is_data(search: Search, tmp_path: Path) -> None:
    columns = ["purpose", "label", "n_params", "n_tokens", "learning_rate", "loss", "seconds"]
    for name, wanted, result in (
        ("grown", {"Which hyperparameters matter", "Confidence in the winner"}, search("sweep.rungs=2")),
        ("population", {"The population&#39;s lineage", "Confidence in the winner"}, search(*POPULATION)),
        ("small", set[str](), search("sweep.trials=2", "sweep.rungs=2", repeats=0)),
    ):
        contents = ReportContents(
            name=name,
            created_at="2026-01-02T03:04:05+00:00",
            runs=pd.DataFrame(columns=columns),
            sweep=result,
        )
        text = write_report(contents, tmp_path / f"{name}.html").read_text()
        optional = {"Which hyperparameters matter", "Confidence in the winner", "The population&#39;s lineage"}
        assert {title for title in optional if f'aria-label="{title.lower()}"' in text} == wanted
        assert ("Importance can&#39;t be estimated: " in text) == ("Which hyperparameters matter" not in wanted)
        for section in search_sections(result):
            assert f"<h2>{section.title}</h2>".replace("'", "&#39;") in text
        assert "loss of each trial from rung to rung" in text
