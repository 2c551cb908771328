"""The front of loss against cost is what its definition says, ties and diverged runs included."""

import numpy as np
import pandas as pd
import pytest

from scaling import pareto_front
from scaling.search.search_figures import draw_pareto, pareto_data


def by_definition(rows: pd.DataFrame) -> set[int]:
    """Rows that no other dominates, one by one."""
    pairs = rows[["compute_flops", "loss"]].to_numpy()
    finite = [i for i in range(len(pairs)) if np.isfinite(pairs[i, 1])]
    return {i for i in finite if not any((pairs[j] <= pairs[i]).all() and (pairs[j] < pairs[i]).any() for j in finite)}


def test_it_agrees_with_the_definition_where_values_repeat() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        rows = pd.DataFrame(
            {"compute_flops": generator.integers(1, 6, 25) * 1e15, "loss": generator.integers(2, 8, 25) / 2}
        )
        rows.loc[generator.random(25) < 0.2, "loss"] = np.nan
        front = pareto_front(rows)
        assert set(front.index) == by_definition(rows)
        assert front["compute_flops"].is_monotonic_increasing
        assert front["loss"].is_monotonic_decreasing


def test_ties_and_diverged_runs() -> None:
    rows = pd.DataFrame(
        {
            "hours": [1.0, 1.0, 2.0, 2.0, 3.0, 0.5, 4.0],
            "loss": [4.0, 3.5, 3.0, 3.0, 3.0, np.nan, np.inf],
            "name": list("abcdefg"),
        }
    )
    front = pareto_front(rows, cost="hours")
    assert front["name"].tolist() == ["b", "c", "d"]  # a: dearer at its cost; c, d: twins; e: dearer at its loss
    assert front.columns.tolist() == rows.columns.tolist()


def test_nothing_finished_gives_an_empty_front() -> None:
    assert pareto_front(pd.DataFrame({"compute_flops": [1e15], "loss": [np.nan]})).empty


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="missing column compute_flops, loss"):
        pareto_front(pd.DataFrame({"x": [1]}))
    with pytest.raises(ValueError, match="compute_flops .*got -1 in row 0"):
        pareto_front(pd.DataFrame({"compute_flops": [-1.0], "loss": [3.0]}))
    with pytest.raises(ValueError, match="loss .*got"):
        pareto_front(pd.DataFrame({"compute_flops": [1.0], "loss": [-3.0]}))


def test_the_figure_shows_runs_and_front() -> None:
    rows = pd.DataFrame({"compute_flops": [1e15, 2e15, 3e15, 4e15], "loss": [4.0, 3.0, 3.5, np.nan]})
    figure = draw_pareto(pareto_data(rows, pareto_front(rows)))
    assert {trace.name: len(trace.x) for trace in figure.data} == {"runs": 3, "front": 2}
    assert figure.layout.xaxis.title.text == "training compute 6·N·D (FLOPs)"
    assert figure.layout.xaxis.type == "log"
    rows = rows.assign(gpu_hours=[0.0, 1.0, 2.0, 3.0])
    free = draw_pareto(pareto_data(rows, pareto_front(rows, "gpu_hours"), "gpu_hours"), "gpu_hours")
    assert (free.layout.xaxis.title.text, free.layout.xaxis.type) == ("gpu hours", None)
