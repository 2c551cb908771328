"""Does a law of schedules in shares of a run, fitted to short runs, forecast the gain of a cooldown or a rate in runs far longer?

    nice -n 15 python -m tests.benchmarks.schedule_lengths [--seeds 1] [--folder runs/benchmarks/schedule_lengths]

Decoders of depth 2 and width 16, 32 and 64 (bytes, context 64, batch 1,024) are trained on the standard library's own source for 512,
2,048 and 8,192 steps: one run at a constant rate, from which the ladder's three branches leave, and the changes that are forecast. A
study's ladder of the two shorter lengths, or of the shortest alone, then forecasts the changes of the longest, where the run's own
curve is known up to the change. The folder keeps what is finished; the same command continues. Half an hour of one core.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from proxy_models.architecture.config import ModelConfig
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.schedule import Constant, Cooldown, Shifted
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from proxy_models.training.state import TrainState
from scaling import fit_schedules
from tests.benchmarks.kept_runs import parser_of, trained, trainer_of

BASE = ModelConfig(d_model=32, n_layers=2, head_dim=16, context_length=64)
BATCH, RATE, WINDOWS = 1024, 0.012, 50
COOLDOWN = 0.2
BRANCHES = (0.5, 0.5**0.5, 1.0)
WIDTHS, LENGTHS = (16, 32, 64), (512, 2048, 8192)
WARMUP = 0.06
"""Share of a run that its warmup lasts at most."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """All runs of one width and length."""

    width: int
    steps: int
    seed: int


def cut(share: float, steps: int) -> int:
    """Tokens at a share of a run."""
    return round(share * steps) * BATCH


def runs_of(steps: int) -> dict[str, list[tuple[float, float, float, str]]]:
    """Parts of each run by its name: begins at, ends at (shares of the steps), factor on the rate, phase."""
    found = {}
    for end in BRANCHES:
        found[f"ladder {end:.3f}"] = [((1 - COOLDOWN) * end, end, 1.0, "cooldown")]
    found["constant"] = [(0.8, 1.0, 1.0, "constant")]
    found["cooldown at 60 %"] = [(0.6, 1.0, 1.0, "cooldown")]
    for more in (0.1, 0.2, 0.3):
        found[f"now, {more:.0%}"] = [(0.6, 0.6 * (1 + more), 1.0, "cooldown")]
    for factor in (0.5, 2.0):
        found[f"rate × {factor:g}"] = [(0.5, 0.8, factor, "constant"), (0.8, 1.0, factor, "cooldown")]
    return found


def windows(tokens: Sequence[int], rates: Sequence[float], losses: Sequence[float]) -> dict[str, list[float]]:
    parts = np.array_split(np.arange(len(tokens)), min(WINDOWS, len(tokens)))
    return {
        "tokens": [float(np.mean([tokens[i] for i in part])) for part in parts],
        "lr": [float(np.mean([rates[i] for i in part])) for part in parts],
        "loss": [math.exp(float(np.mean([math.log(losses[i]) for i in part]))) for part in parts],
    }


def train(corpus: Path, task: Task) -> dict[str, Any]:
    trainer = trainer_of(corpus)
    numerics = Numerics(
        corpus_key=trainer.corpus.key,
        model=replace(BASE, d_model=task.width),
        base=BASE,
        seed=task.seed,
        evaluation_tokens=131_072,
    )
    recipe = Hyperparameters(learning_rate=RATE, batch_tokens=BATCH, warmup_floor_tokens=20 * BATCH).resolve(
        task.steps * BATCH
    )
    stem = Constant(warmup_tokens=recipe.warmup_tokens)
    plans = runs_of(task.steps)
    starts = sorted({cut(parts[0][0], task.steps) for parts in plans.values()})
    states: dict[int, TrainState] = {}
    curve: list[tuple[int, float, float]] = []
    at = 0
    held_out = {}
    for end in starts:
        result = trainer.train(numerics, Segment(recipe=recipe, phase=stem, start=at, end=end), states.get(at))
        assert result.state is not None
        assert result.loss is not None
        states[end], at, held_out[end] = result.state, end, result.loss
        c = result.curve
        before = [int(c.start), *map(int, c.tokens[:-1])]
        curve += [*zip(before, c.rate_factor.tolist(), c.train_loss.tolist(), strict=True)]
    kept: dict[str, Any] = {}
    for name, parts in plans.items():
        state: TrainState | None = None
        of_run: list[tuple[int, float, float]] = []
        loss = math.nan
        for begin, until, factor, kind in parts:
            first, last = cut(begin, task.steps), cut(until, task.steps)
            base = Cooldown(start=first, end=last) if kind == "cooldown" else stem
            phase = Shifted(phase=base, tokens=0, scale=factor)
            state = state or states[first]
            result = trainer.train(numerics, Segment(recipe=recipe, phase=phase, start=first, end=last), state)
            state, loss = result.state, math.nan if result.loss is None else result.loss
            if state is None:
                break
            c = result.curve
            before = [int(c.start), *map(int, c.tokens[:-1])]
            of_run += [*zip(before, c.rate_factor.tolist(), c.train_loss.tolist(), strict=True)]
        kept[name] = {
            "begins": cut(parts[0][0], task.steps),
            "end": cut(parts[-1][1], task.steps),
            "final": loss,
            **windows(*zip(*of_run, strict=True)),
        }
    return {
        "n_params": numerics.model.n_params,
        "warmup": recipe.warmup_tokens,
        "stem": windows(*zip(*curve, strict=True)),
        "held_out": {str(k): v for k, v in held_out.items()},
        "runs": kept,
    }


def offset(cell: pd.Series, upto: float) -> tuple[float, float]:
    """Log of held-out over training loss of the run at a constant rate, up to so many tokens, and its standard error."""
    tokens, logs = np.array(cell["stem"]["tokens"]), np.log(cell["stem"]["loss"])
    found = [
        math.log(loss) - np.interp(float(at), tokens, logs)
        for at, loss in cell["held_out"].items()
        if float(at) <= upto
    ]
    return float(np.mean(found)), float(np.std(found) / math.sqrt(len(found)))


def rows_of(cell: pd.Series, name: str, *, upto: float = math.inf) -> pd.DataFrame:
    """A run for `fit_schedules` after its warmup: windows of the training loss up to so many tokens, then only the rates."""
    run, stem, (shift, error) = cell["runs"][name], cell["stem"], offset(cell, upto)
    kept = np.array(stem["tokens"]) < run["begins"]
    parts = []
    for part, rows in ((stem, kept), (run, np.ones(len(run["tokens"]), bool))):
        late = np.diff(np.log(part["loss"]))[-len(part["loss"]) * 3 // 4 :]
        noise = np.median(np.abs(late)) / 0.6745 / math.sqrt(2)
        parts.append(
            pd.DataFrame({key: np.array(part[key])[rows] for key in ("tokens", "lr", "loss")}).assign(noise=noise)
        )
    table = pd.concat(parts, ignore_index=True)
    table["loss"] *= math.exp(shift)
    end = {"tokens": run["end"], "lr": 1.0 if name == "constant" else 0.0, "loss": run["final"], "noise": error}
    table = pd.concat([table, pd.DataFrame([end])], ignore_index=True)
    table["loss"] = table["loss"].where(table["tokens"] <= upto)
    length = cell["steps"] * BATCH
    table = table[table["tokens"] >= WARMUP * length].rename(columns={"tokens": "step"})
    return table.assign(run=f"{cell['seed']} {name}", schedule=name, n_params=cell["n_params"], length=length)


def forecasts(ladder: pd.DataFrame, target: pd.Series) -> list[dict[str, Any]]:
    """Forecasts of the target's changes by the ladder's branches, from where each change begins; logs in per cent."""
    branches = [f"ladder {end:.3f}" for end in BRANCHES]
    table = pd.concat([rows_of(cell, name) for _, cell in ladder.iterrows() for name in branches], ignore_index=True)
    fit, found = fit_schedules(table, warmup_share=WARMUP), []
    planned, whole = f"ladder {BRANCHES[-1]:.3f}", target["steps"] * BATCH
    n_params = float(target["n_params"])
    for name, run in target["runs"].items():
        if name in branches[:-1] or not math.isfinite(run["final"]):
            continue
        begins = cut(0.6, target["steps"]) if name in (planned, "constant") else run["begins"]
        paths = [rows_of(target, one, upto=begins) for one in (name, planned)]
        made = fit.forecast(paths[0], n_params=n_params, length=whole)
        ratio = fit.effect(*paths, n_params=n_params, length=whole)
        true_effect = math.log(run["final"] / target["runs"][planned]["final"])
        half = math.log(made.high / made.loss)
        off = math.log(made.loss / run["final"])
        found.append(
            {
                "width": target["width"],
                "steps": target["steps"],
                "change": name,
                "loss: error": 100 * off,
                "effect": 100 * true_effect,
                "error": 100 * (ratio.log_ratio - true_effect),
                "half width": 100 * half,
                "held": abs(off) <= half,
                "effect half width": 100 * ratio.half_width,
                "effect held": abs(ratio.log_ratio - true_effect) <= ratio.half_width,
                "widening": made.widening,
                "supported": made.supported,
                "reasons": "; ".join(made.reasons),
            }
        )
    return found


def main(options: argparse.Namespace) -> None:
    tasks = [
        Task(width=width, steps=steps, seed=seed)
        for seed in range(options.seeds)
        for steps in LENGTHS
        for width in WIDTHS
    ]
    rows = trained(options, tasks, train)
    cases = [(upto, steps, width) for steps in LENGTHS for upto in LENGTHS if upto < steps for width in WIDTHS]
    for seed, of_seed in rows.groupby("seed"):
        for upto, steps, width in cases:
            for widest in (WIDTHS[-1], WIDTHS[-2]):
                ladder = of_seed[(of_seed["steps"] <= upto) & (of_seed["width"] <= widest)]
                target = of_seed[(of_seed["steps"] == steps) & (of_seed["width"] == width)]
                if target.empty or len(ladder) < 2 or (widest < WIDTHS[-1] and width <= widest):
                    continue
                shown = pd.DataFrame(forecasts(ladder, target.iloc[0]))
                print(f"seed {seed}: widths to {widest}, to {upto} steps, forecast width {width} at {steps}")
                print(shown.drop(columns="reasons").round(2).to_string(index=False))
                print("reasons:", *sorted(set(shown["reasons"])), sep="\n  ")
                known = shown[shown["change"] != "rate × 2"]
                errors = known[["loss: error", "error"]].abs().mean()
                print(
                    f"mean error without rate × 2: loss {errors.iloc[0]:.2f}, effect {errors.iloc[1]:.2f}, "
                    f"half width {known['half width'].mean():.1f}, held {known['held'].mean():.0%}\n"
                )


if __name__ == "__main__":
    main(parser_of(__doc__, "schedule_lengths", seeds=1, workers=1).parse_args())
