"""Rows of one size and length with different hyperparameters: only the best recipe of each size and length is a tuned run."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scaling.checks import plain

_RECIPE = """lr learning_rate max_lr peak_lr base_lr min_lr matrix_lr embedding_lr lr_max lr_min lr_peak lr_schedule schedule scheduler
lr_scheduler bs batch batch_size global_batch_size batch_tokens tokens_per_batch wd weight_decay warmup warmup_steps
warmup_tokens warmup_fraction warmup_ratio optimizer optim variant arm recipe method beta1 beta2 beta_1 beta_2 adam_beta1
adam_beta2 momentum eps epsilon adam_eps dropout clip grad_clip gradient_clip max_grad_norm init_std label_smoothing z_loss ema
decay_fraction"""
RECIPE_COLUMNS = frozenset(_RECIPE.split())
"""Names of hyperparameter columns, without capitals and punctuation. A seed is no hyperparameter: runs of other seeds are repeats."""
_ENDINGS = ("lr", "learning_rate", "bs", "batch_size", "batch_size_tokens", "weight_decay", "wd")
"""Last words of further names of rates, batches and decays, such as `adam_lr`."""
_NOT_TRAINING = frozenset(
    ("eval", "val", "valid", "validation", "test", "inference", "micro", "mini", "local", "device", "gpu")
)
"""Words of names that end so and change no loss, such as `eval_batch_size`."""


def is_recipe(column: Hashable) -> bool:
    """Whether a column is named like a hyperparameter, with any prefix (`config/lr`, `optim.lr`)."""
    name = plain(str(column).split("/")[-1].split(".")[-1]).strip("_")
    ends_so = f"_{name}".endswith(tuple(f"_{ending}" for ending in _ENDINGS))
    return name in RECIPE_COLUMNS or (ends_so and not _NOT_TRAINING & {*name.split("_")})


def worse_recipes(
    table: pd.DataFrame, cells: pd.DataFrame, loss: pd.Series
) -> tuple[tuple[Hashable, ...], NDArray[np.bool_]]:
    """Return the hyperparameters that vary within a cell, and a mask of the rows outside their cell's best recipe, [K].

    Recipes are compared by the mean loss of their rows, which count as repeats.

    Args:
        table: Rows as found.
        cells: Checked columns that distinguish cells, such as N and D, of the same rows.
        loss: Checked losses of the same rows.
    """
    cell = cells.groupby([*cells.columns]).ngroup().to_numpy()
    found = [name for name in table.columns if is_recipe(name)]
    texts = {name: table[name].astype(str).to_numpy() for name in found}
    varying = tuple(
        name
        for name in found
        if pd.DataFrame({"cell": cell, "text": texts[name]}).drop_duplicates()["cell"].duplicated().any()
    )
    if not varying:
        return (), np.zeros(len(table), dtype=bool)
    recipe = pd.DataFrame({name: texts[name] for name in varying}).groupby([*varying]).ngroup().to_numpy()
    mean = pd.Series(loss.to_numpy()).groupby([cell, recipe]).transform("mean")
    best = recipe[mean.groupby(cell).transform("idxmin").to_numpy()]
    return varying, recipe != best
