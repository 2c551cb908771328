"""Contours over two hyperparameters say what the surface says."""

import numpy as np
import pandas as pd
import pytest

from scaling import ResponseSurface, SearchBox, fit_response

BOX = SearchBox(
    bounds={"log2_rate": (-13.0, -5.0), "log2_batch": (14.0, 20.0), "decay": (0.0, 1.0)},
    choices={"schedule": ("wsd", "cosine")},
    scales=("n_params", "n_tokens"),
)
SMALL, LARGE = {"n_params": 1e7, "n_tokens": 2e8}, {"n_params": 1e8, "n_tokens": 2e9}


@pytest.fixture(scope="module")
def surface() -> ResponseSurface:
    """Fitted to a parabola whose best rate is 2^-8, observed at one scale, with two diverged runs."""
    generator = np.random.default_rng(0)
    n = 40
    rows = pd.DataFrame(
        {
            "log2_rate": generator.uniform(-13, -5, n),
            "log2_batch": generator.uniform(14, 20, n),
            "decay": generator.uniform(0, 1, n),
            "schedule": ["wsd", "cosine"] * (n // 2),
            **SMALL,
        }
    )
    loss = 3 * np.exp(0.01 * (rows["log2_rate"] + 8) ** 2 + 0.004 * (rows["log2_batch"] - 17) ** 2)
    return fit_response(rows.assign(loss=loss.where(rows.index < n - 2)), box=BOX)


def test_response(surface: ResponseSurface) -> None:
    data = surface.contours(SMALL)
    best, grid, runs = (data[data["series"] == name] for name in ("optimum", "surface", "run"))
    optimum = surface.optimum(SMALL)
    assert best[["x", "y", "above"]].to_numpy().tolist() == [
        [optimum.point["log2_rate"], optimum.point["log2_batch"], 0.0]
    ]
    assert (best["x_low"].item(), best["x_high"].item()) == optimum.intervals["log2_rate"]
    assert best["x"].item() == pytest.approx(-8, abs=0.5)
    assert grid["above"].min() > -1e-4, "nothing on the grid is better than the optimum"
    at = grid.rename(columns={"x": "log2_rate", "y": "log2_batch"})[["log2_rate", "log2_batch"]]
    held = {"decay": optimum.point["decay"], "schedule": optimum.point["schedule"]}
    predicted = surface.predict(at.assign(**held, **SMALL))[0]
    np.testing.assert_allclose(grid["above"] - grid["above"].min(), predicted - predicted.min(), atol=1e-12)
    assert (len(runs), len(data[data["series"] == "diverged"])) == (38, 2)
    assert runs["above"].min() == pytest.approx(-surface.predict(pd.DataFrame([optimum.point | SMALL]))[0].item())


def test_response_is_drawn(surface: ResponseSurface) -> None:
    figure = surface.plot_contours(SMALL, titles={"log2_batch": "log2 of the batch (tokens)"})
    assert figure.layout.xaxis.title.text == "log2 of rate"
    assert figure.layout.yaxis.title.text == "log2 of the batch (tokens)"
    assert [trace.name for trace in figure.data[1:]] == ["runs", "diverged runs", "optimum, 90 % intervals"]
    elsewhere = surface.plot_contours(LARGE, over=("decay", "log2_rate"))
    assert (elsewhere.layout.xaxis.title.text, elsewhere.layout.yaxis.title.text) == ("decay", "log2 of rate")
    assert [trace.name for trace in elsewhere.data[1:]] == ["optimum, 90 % intervals"], "no run was observed there"


def test_what_is_not_numeric_can_not_be_an_axis(surface: ResponseSurface) -> None:
    for over in (("log2_rate", "schedule"), ("log2_rate", "log2_rate")):
        with pytest.raises(ValueError, match=r"numeric coordinates \(log2_rate, log2_batch, decay\), got log2_rate, "):
            surface.plot_contours(SMALL, over=over)
