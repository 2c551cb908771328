"""Everything that a report may show, planted: no training, and every figure has something to draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from muscale import StudyConfig
from muscale.pages.contents import ReportContents
from muscale.pages.reproduction import reproduction
from muscale.plans.band import make_band
from muscale.plans.gate import Gate, transfer_line
from muscale.plans.planning import Planner
from muscale.plans.use_case_card import card_of
from muscale.search.search_so_far import search_so_far
from muscale.store.ledger import Ledger
from scaling import fit_verdict
from tests.muscale.conftest import MICRO, write_text
from tests.muscale.planted import planted_check, planted_fit, planted_horizon
from tests.muscale.planted_ladder import planted_curve
from tests.muscale.search.conftest import PLANTED, planted_result

RUNS = ["purpose", "label", "n_params", "n_tokens", "learning_rate", "loss", "seconds"]

USE_CASE = {"use_case.targets.loss": 2.4, "use_case.serving_device": "H100 SXM", "use_case.max_params": 90_000.0}


def planted_contents(folder: Path, name: str) -> ReportContents:
    """A study that was promoted, its loss inside the interval."""
    write_text(folder / "text", documents=2)
    path = folder / "study.toml"
    path.write_text(MICRO)
    config = StudyConfig.read(path, PLANTED)
    ledger = Ledger(folder / "ledger.sqlite")
    law = planted_fit(noise=3e-3)
    plan = Planner(config, config.hyperparameters, planted_horizon(), law).plan()
    forecast = {name: getattr(plan.forecast, name) for name in ("loss", "low", "high", "level")}
    generator = np.random.default_rng(0)
    curves = [planted_curve(generator, stem=str(number)) for number in range(4)]
    band = make_band(curves, warmup_tokens=256, ends=[round(0.85 * plan.n_tokens), plan.n_tokens], **forecast)
    share = np.linspace(0.01, 1, 200)
    tokens = share * plan.n_tokens
    losses = plan.forecast.loss * (1 + 0.3 * (1 - share) + 0.01 * generator.standard_normal(200))
    stamp = "2026-01-02T03:04:05.000006+00:00"
    promotion = {
        **forecast,
        "plan": plan.key,
        "forecast": plan.forecast.loss,
        "loss": plan.forecast.loss * 1.001,
        "source_losses": {},
        "inside": True,
        "relative_error": 0.001,
        **dict.fromkeys(("registered_at", "started_at", "finished_at"), stamp),
        "world_size": 2,
        "seconds": 100.0,
        "forced": False,
        "verdict": "pass",
    }
    trained = [("sweep", "trial 0", 1000, 2000 - i, 0.01, 2.0 + i / 10, 1.0) for i in range(30)]
    return ReportContents(
        name=name,
        created_at=stamp,
        runs=pd.DataFrame(trained, columns=RUNS),
        check=planted_check(),
        sweep=planted_result(ledger, config, "s", runs=None),
        so_far=search_so_far(ledger, config.rung_tokens()),
        transfer=fit_verdict(_grid()),
        fit=law,
        plan=plan.to_dict(),
        forecast={**forecast, "registered_at": stamp, "reasons": []},
        use_case=card_of(StudyConfig.read(path, USE_CASE), law, plan),
        gate=Gate(plan=plan.key, lines=(transfer_line("pass", ()),)).to_dict(),
        promotion=promotion,
        curve=pd.DataFrame({"tokens": tokens, "train_loss": losses}),
        evaluations=pd.DataFrame({"tokens": tokens[::20], "val_loss": losses[::20]}),
        band=band,
        run_events=pd.DataFrame([{"at": stamp, "kind": "restart", "message": "a worker was lost"}]),
        spending=pd.DataFrame(
            [("sweep", 30, 60000, 3.6e8, 30.0, 0.1), ("full", 1, 600000, 3.6e9, 100.0, 1.0)],
            columns=["purpose", "runs", "n_tokens", "compute_flops", "seconds", "of_full_run"],
        ),
        reproduction=reproduction(path, (), {"corpus.source": "text"}, {"plan": plan.key}, ()),
    )


def _grid() -> pd.DataFrame:
    """A grid of rates at four widths and three horizons, whose optimum stays put in the width and falls as D^-.3."""
    generator = np.random.default_rng(0)
    rows = []
    for i, width in enumerate((32, 64, 128, 256)):
        for n_tokens in (1e6, 2e6, 4e6):
            for octave in np.arange(-9.0, -4.0, 0.5):
                for seed in (0, 1):
                    off = octave + 6.7 - 0.3 * np.log2(4e6 / n_tokens)
                    loss = np.exp(1 - 0.05 * i + 0.02 * off**2 + 0.003 * generator.standard_normal())
                    rows.append(("width", width, "rate", 2.0**octave, n_tokens, seed, loss))
    return pd.DataFrame(rows, columns=["along", "size", "over", "value", "n_tokens", "seed", "loss"])
