"""Runs of a related family: the offset of its optimum, and when they are left out."""

import numpy as np
import pandas as pd
import pytest

from scaling import SearchBox, fit_response
from scaling.search.excess import MAX_ROWS, SOURCE_SHARE, most_informative

BOUNDS = {"log2_rate": (-13.0, -5.0), "log2_batch": (4.0, 12.0)}
BEST, OFFSET = np.array([-9.0, 8.0]), np.array([1.5, -1.0])
TARGET = {"n_params": 8e8}


def runs(best: np.ndarray, curvature: tuple[float, float], n: int, source: str) -> pd.DataFrame:
    """`n` runs at each of three sizes, around an optimum that drifts by −.3 octaves of rate a doubling."""
    generator, rows = np.random.default_rng(len(source)), []
    for n_params in (1e8, 2e8, 4e8):
        for point in generator.uniform([-13, 4], [-5, 12], (n, 2)):
            away = point - best - np.array([-0.3 * np.log2(n_params / 1e8), 0.0])
            loss = (3.0 if source else 2.8) * np.exp(np.dot(curvature, away**2) + 5e-4 * generator.standard_normal())
            rows.append([*point, n_params, loss, source])
    return pd.DataFrame(rows, columns=[*BOUNDS, "n_params", "loss", "source"])


OWN = runs(BEST, (0.006, 0.003), 6, "")
OF_TARGET = BEST + np.array([-0.9, 0.0])


def missed(box: SearchBox, rows: pd.DataFrame) -> float:
    """Excess of the first suggestion at the target."""
    point = fit_response(rows, box=box).suggest(TARGET)
    return float(np.dot((0.006, 0.003), (np.array([point[name] for name in BOUNDS]) - OF_TARGET) ** 2))


def test_the_offset_of_a_source_is_estimated_and_does_not_mislead() -> None:
    together = pd.concat([OWN, runs(BEST + OFFSET, (0.006, 0.003), 25, "dense")])
    box = SearchBox(bounds=BOUNDS, scales=("n_params",), sources=("dense",))
    surface = fit_response(together, box=box)
    np.testing.assert_allclose(surface.offsets["dense"], OFFSET, atol=0.3)
    assert list(surface.drift.columns) == ["n_params"]
    assert surface.left_out == ()
    pooled = missed(SearchBox(bounds=BOUNDS, scales=("n_params",)), together.drop(columns="source"))
    assert missed(box, together) < 0.001 < pooled


def test_a_source_under_which_the_own_runs_are_less_likely_is_left_out() -> None:
    """Its loss rises where the family's falls least, in another shape."""
    other = runs(BEST, (0.0005, 0.03), 25, "dense")
    box = SearchBox(bounds=BOUNDS, scales=("n_params",), sources=("dense",))
    surface = fit_response(pd.concat([OWN, other]), box=box)
    assert surface.left_out == ("dense",)
    assert len(surface.process.data.w) == len(OWN)
    assert fit_response(other, box=box).left_out == (), "without runs of the family nothing disagrees with them"


def test_sources_take_a_share_of_the_rows_that_are_kept() -> None:
    own = np.arange(600) < 300
    kept = most_informative(np.linspace(0, 0.05, 600), np.arange(600) % 5, own)
    assert (len(kept), (~own[kept]).sum()) == (MAX_ROWS, SOURCE_SHARE * MAX_ROWS)
    few = np.arange(600) < 20
    assert few[most_informative(np.linspace(0, 0.05, 600), np.arange(600) % 5, few)].sum() == 20


def test_a_source_that_the_box_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="source.*got 'moe'"):
        fit_response(OWN.assign(source="moe"), box=SearchBox(bounds=BOUNDS, scales=("n_params",), sources=("dense",)))
