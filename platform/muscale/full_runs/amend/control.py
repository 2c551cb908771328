"""A paired control: the parent's recipe, trained for some steps on the text of an amended run, and the difference of their losses.

Both start from the same checkpoint. Over equal batches the two losses rise and fall together, so that their difference has far less
noise than either.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t as student

from muscale import json_lines
from muscale.errors import StageError
from muscale.full_runs.amend.amendment import Amendment
from muscale.full_runs.checkpoints.folder import CHECKPOINTS
from muscale.full_runs.full_run import FullRun
from muscale.full_runs.promote.launch import Launcher
from muscale.full_runs.records.retries import divergence
from muscale.full_runs.records.run_records import RunRecords
from muscale.layout import CONTROL, METRICS
from muscale.serialization import Recorded
from muscale.settings.config import StudyConfig
from muscale.settings.plan import REGULARIZERS
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.continued import amended

LEVEL = 0.95
"""Level of the interval beyond which a difference exceeds its noise."""
_MOST_BLOCKS = 6
"""Longer blocks contain more of the autocorrelation. Simulated over 200 pairs, 95 % intervals then contain the mean in 95, 93 and 87 %
of cases if neighbours correlate by .5, .8 and .95; with √n blocks it is 94, 90 and 70 %."""
_IN_TRAINING_LOSS = (*REGULARIZERS, "balance_loss", "router_z_loss")


@dataclass(frozen=True, kw_only=True)
class Control(Recorded):
    """The difference in loss between an amended run and its parent's recipe from the same checkpoint; losses in nats per token.

    Attributes:
        steps: Steps of the parent's recipe.
        n_tokens: Tokens of these steps.
        n_pairs: Pairs of losses on the same tokens: of single steps, or with another batch of the steps between common ends.
        difference: Mean of child minus control of the training loss over the pairs; None if there is no pair.
        standard_error: Of the mean, from the means of `n_blocks` blocks of pairs in a row, which contain the pairs'
            autocorrelation (batch means: Law and Carson, Operations Research 27, 1979). None below four pairs.
        low, high: Interval of the mean at `LEVEL`, by Student's t of the blocks; None without a standard error.
        unpaired: Why there is no pair.
        evaluated_at: Tokens after the checkpoint at which both were last evaluated; None if they never were at the same tokens.
        child, control: Held-out losses on the parent's corpus there.
        diverged: Why the control diverged; the pairs are of the steps before. Empty if it did not.
    """

    DERIVED = ("exceeds_noise",)

    steps: int
    n_tokens: int
    n_pairs: int
    difference: float | None
    standard_error: float | None
    n_blocks: int
    low: float | None
    high: float | None
    unpaired: str
    evaluated_at: int | None
    child: float | None
    control: float | None
    diverged: str = ""

    @property
    def exceeds_noise(self) -> bool | None:
        """Whether the interval of the mean difference leaves out zero; None without an interval."""
        return None if self.low is None or self.high is None else not self.low <= 0.0 <= self.high

    def __str__(self) -> str:
        lines = [f"control: {self.steps} steps of the parent's recipe, {self.n_tokens:,} tokens"]
        if self.diverged:
            lines.append(f"  it did not reach its end: {self.diverged}")
        if self.difference is None:
            lines.append(f"  training losses are not compared: {self.unpaired}")
        else:
            error = "" if self.standard_error is None else f" ± {self.standard_error:.2g} (standard error)"
            lines.append(
                f"  training loss less the control's: {self.difference:+.3g}{error} over {self.n_pairs} pairs: {self.verdict}"
            )
        if self.child is not None and self.control is not None:
            change = f"{self.child / self.control - 1:+.2%}"
            lines.append(
                f"  held-out loss after {self.evaluated_at:,} tokens: {self.child:.4f}, the control's {self.control:.4f} ({change}); "
                "the noise of a single pair is not known"
            )
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """Whether the difference exceeds its noise, in words."""
        if self.exceeds_noise is None:
            return "too few pairs to tell noise"
        return f"{'exceeds' if self.exceeds_noise else 'does not exceed'} its noise at {LEVEL:.0%}"


def require_control(child: Amendment, steps: int) -> None:
    """Refuse a control that is longer than the rest of the parent or than the amended run; raise StageError with the rule."""
    batch = child.parent.recipe.batch_tokens
    left = child.parent.segments[-1].end - child.parent.tokens
    most = min(left, child.n_tokens) // batch
    if not 1 <= steps <= most:
        raise StageError(
            f"control: must be from 1 to {most} steps of {batch} tokens, because the parent has {left} tokens left and the amended "
            f"run {child.n_tokens}, got {steps}"
        )


def control_run(child: Amendment, steps: int, config: StudyConfig, manifest_hash: str) -> FullRun:
    """The parent's recipe for some steps from the child's checkpoint, as an amendment without changes would train it."""
    parent = child.parent
    last = parent.lineage[-1]
    unchanged = replace(
        child,
        numerics=replace(parent.numerics, guard=child.numerics.guard),
        segments=amended(parent.segments, parent.tokens, {}, before=parent.tokens_before - parent.tokens),
        corpus=Corpus.open(child.directory / last.folder),
        position=last.position + parent.tokens,
        changes={},
    )
    n_tokens = steps * unchanged.segments[0].recipe.batch_tokens
    folder = child.folder / f"{CONTROL}={n_tokens}"
    return unchanged.full_run(config, manifest_hash).up_to(n_tokens, folder)


def train_control(run: FullRun, train: Launcher) -> None:
    """Train a control to its end or its divergence, from its last checkpoint if there is one; only its records stay."""
    if divergence(run.directory):
        return
    try:
        train(run)
    except StageError:
        if not divergence(run.directory):
            raise
    shutil.rmtree(run.directory / CHECKPOINTS, ignore_errors=True)


def compare(child: Amendment, run: FullRun, steps: int) -> Control:
    """Compare a child that has been trained with its control."""
    unpaired = _unpaired(child, run)
    differences = np.array([]) if unpaired else _differences(child.folder, run.directory)
    n_blocks = min(math.isqrt(len(differences)), _MOST_BLOCKS)
    error, reach = None, math.nan
    if n_blocks >= 2:
        means = np.array([block.mean() for block in np.array_split(differences, n_blocks)])
        error = float(means.std(ddof=1) / math.sqrt(n_blocks))
        reach = error * float(student.ppf((1 + LEVEL) / 2, n_blocks - 1))
    mean = float(differences.mean()) if len(differences) else None
    ours_held, theirs_held = _held_out_of_parent(child), _held_out(run.directory)
    common = max((tokens for tokens in ours_held.keys() & theirs_held.keys() if tokens), default=None)
    return Control(
        steps=steps,
        n_tokens=run.n_tokens,
        n_pairs=len(differences),
        difference=mean,
        standard_error=error,
        n_blocks=n_blocks,
        low=None if error is None or mean is None else mean - reach,
        high=None if error is None or mean is None else mean + reach,
        unpaired=unpaired or ("" if len(differences) else "no steps of both end at the same tokens"),
        evaluated_at=common,
        child=None if common is None else ours_held[common],
        control=None if common is None else theirs_held[common],
        diverged=divergence(run.directory),
    )


def _unpaired(child: Amendment, run: FullRun) -> str:
    """Why the two training losses can't be compared; empty if they can."""
    ours, theirs = child.numerics, run.numerics

    def text(numerics: Any, position: int) -> tuple[Any, ...]:
        return numerics.corpus_key, numerics.seed, numerics.model.context_length, position

    if text(ours, child.position) != text(theirs, run.position):
        return "the two read other text"
    if changed := [
        name for name in _IN_TRAINING_LOSS if getattr(ours.model, name, 0) != getattr(theirs.model, name, 0)
    ]:
        return f"{', '.join(changed)} changes the training loss of the same weights"
    return ""


def _differences(ours: Path, theirs: Path) -> NDArray[np.float64]:
    """Differences of two runs' mean training losses over the tokens between the ends of steps that they share."""
    totals = [_totals(folder) for folder in (ours, theirs)]
    common = totals[0].index.intersection(totals[1].index)
    mine, other = (np.diff(total[common].to_numpy(), prepend=0.0) for total in totals)
    return np.asarray((mine - other) / np.diff(common.to_numpy(), prepend=0), dtype=float)


def _totals(folder: Path) -> pd.Series:
    """Sum of the training loss over all tokens up to each step's end, by these tokens."""
    rows = RunRecords(folder).steps().dropna(subset=["train_loss"])
    tokens = rows["tokens"].to_numpy()
    return pd.Series(np.cumsum(rows["train_loss"].to_numpy() * np.diff(tokens, prepend=0)), index=tokens)


def _held_out(folder: Path) -> dict[int, float]:
    """Held-out losses of a run by tokens."""
    table = RunRecords(folder).evaluations()
    return dict(zip(table["tokens"].tolist(), table["val_loss"].tolist(), strict=True))


def _held_out_of_parent(child: Amendment) -> dict[int, float]:
    """Held-out losses of a child on its parent's corpus by tokens."""
    last = child.parent.lineage[-1]
    if child.corpus.key == last.corpus:
        return _held_out(child.folder)
    rows = json_lines.read(child.folder / METRICS)
    return {
        row["tokens"]: row["earlier_losses"][last.label] for row in rows if last.label in row.get("earlier_losses", {})
    }
