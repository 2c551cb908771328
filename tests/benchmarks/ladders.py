"""Public ladders of runs, read from $MUSCALE_REFERENCE_DATA or ../shared/data, as the benchmarks of `scaling` take them.

One ladder is one recipe on one corpus; ladders of one family share runs, authors or models, so that what is tuned on one of
them is tested on other families only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

DATA = Path(os.environ.get("MUSCALE_REFERENCE_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Runs: n_params, n_tokens, loss (nats per token), stem; whether their rate had decayed when the loss was taken."""

    name: str
    family: str
    runs: pd.DataFrame
    annealed: bool


def ladders() -> list[Ladder]:
    found: list[Ladder] = []

    def add(
        name: str, family: str, rows: pd.DataFrame, loss: str = "loss", stem: str | None = None, annealed: bool = True
    ) -> None:
        rows = rows.reset_index(drop=True)
        runs = rows[["n_params", "n_tokens"]].astype(np.float64).assign(loss=rows[loss].astype(np.float64))
        found.append(
            Ladder(
                name=name, family=family, runs=runs.assign(stem=rows[stem] if stem else rows.index), annealed=annealed
            )
        )

    rows = table("besiroglu_chinchilla")
    add("besiroglu", "hoffmann", rows[rows["is_outlier"] == 0])
    for name, family in (("ml_scalefit_massivetext", "hoffmann"), ("llama3_isoflop_exp_loss", "llama3")):
        add(name.split("_")[0], family, table(name))
    rows = table("marin_dclm")
    add("marin", "marin", rows)
    add("gemstones", "gemstones", table("gemstones_cool_end"), stem="run_name")
    for train_set, rows in table("gadre_overtraining_c4val").groupby("train_set"):
        add(f"gadre {train_set}", "gadre", rows)
    rows = table("olmo_ladder_c4en")
    add("olmo c4", "olmo", rows)
    add("olmo pile", "olmo", rows, loss="loss_pile")
    rows = table("porian_rw")
    rows = rows[rows["param_count"] == "standard"]
    for setting, part in rows.groupby(["hparams", "warmup", "decay"]):
        add("porian " + " ".join(setting), "porian", part, annealed=setting[2] == "chinchilla")
    rows = table("datablations_notebook")
    rows = rows[(rows["epochs"] <= 1.01) & (rows["name"] != "4b284b12b2")]
    add("datablations", "datablations", rows)
    add("steplaw", "steplaw", table("steplaw_dense_best"))
    return found


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(DATA / f"{name}.csv")
