"""A law and a horizon law that are known, for what a study makes of them without training anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_mixture
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import Source
from scaling import HorizonLaw, ScalingFit, fit, fit_horizon_law

WIDTH_16, WIDTH_80 = 7_000, 63_000  # about N of the micro-study's smallest and largest ladder widths


def planted_fit(noise: float = 1e-3, n_bootstrap: int = 50) -> ScalingFit:
    """A fit of runs on 1.5 + 40 N^-.4 + 100 D^-.4 over the micro-study's sizes: N* is about .32·D at small budgets."""
    sizes = np.geomspace(WIDTH_16, WIDTH_80, 4)
    rows = pd.DataFrame(
        [(n, d) for n in sizes for d in np.geomspace(16_384, 262_144, 4)], columns=["n_params", "n_tokens"]
    )
    law = 1.5 + 40 / rows["n_params"] ** 0.4 + 100 / rows["n_tokens"] ** 0.4
    drawn = np.exp(noise * np.random.default_rng(0).standard_normal(len(rows)))
    runs = rows.assign(loss=law * drawn, annealed=True, regret=0.0, stem=[f"stem {i}" for i in range(len(rows))])
    return fit(runs, n_params_convention="as planted", n_bootstrap=n_bootstrap)


def planted_horizon() -> HorizonLaw:
    """A law of planted optima that fall as D^-.3."""
    generator = np.random.default_rng(0)
    rows = []
    for n_tokens in (8192, 16384, 32768):
        for octave in np.linspace(-2, 2, 7):
            off = octave + 0.3 * np.log2(n_tokens / 16384)
            loss = 2 * np.exp(0.02 * off**2 + 1e-4 * generator.standard_normal())
            rows.append({"n_tokens": n_tokens, "rate": 2.0 ** (octave - 7), "loss": loss, "width": 32})
    return fit_horizon_law(pd.DataFrame(rows))


def planted_check(growth: float = 0.0) -> CoordinateCheck:
    """Of one hidden module that is as large at every width, and whose updates grow with the width to this power."""
    rows = [
        {
            "axis": "width",
            "width": width,
            "depth": 2,
            "module": "blocks.0.mlp.down",
            "kind": "hidden",
            "quantity": quantity,
            "step": step,
            "rms": float(width) ** (growth if step else 0.0),
        }
        for width in (32, 64, 128, 256)
        for quantity in ("size", "change")
        for step in (0, 1, 2)
    ]
    return CoordinateCheck(measurements=pd.DataFrame(rows), seeds=(0, 1))


def large_and_small(folder: Path, *, large: float = 0.5) -> Corpus:
    """A mixture of two sources, of which one has ten times the other's text, and `large` of the weight."""
    for name, n_bytes in (("large", 4000), ("small", 400)):
        (folder / name).mkdir()
        for number in range(20):
            (folder / name / f"{number}.txt").write_text(name[0] * n_bytes)
    sources = {name: Source(path=str(folder / name)) for name in ("large", "small")}
    return write_mixture(folder / "corpus", sources, Mixture.constant({"large": large, "small": 1 - large}))
