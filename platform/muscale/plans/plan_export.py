"""A plan for another framework: the value of every tensor's hyperparameters at the target shape, and the schedule, as JSON and CSV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from muscale.errors import StageError, refusing
from muscale.plans.plan import Plan
from muscale.programs.job import job_of
from proxy_models.architecture.families import build, family_of
from proxy_models.architecture.memory import MAX_ROTATED_DIM
from proxy_models.architecture.parametrization import ForwardMultipliers, Parametrization, TensorClass
from proxy_models.files import write_text
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import MARKS, initial_std, make_optimizer, multipliers_of

_MOST_ROWS = 10_000  # in the schedule's table
_WITHOUT_BETAS = ("muon", "adafactor")
_README = """\
# Plan {key} for another framework

N = {n_params} without the embedding table, {n_tokens:,} tokens, {n_steps:,} steps. Forecast {loss:.4f} {loss_unit},
{level:.0%} interval [{low:.4f}, {high:.4f}].

`plan.json` has everything, the CSV files the tables. All values are absolute: nothing is to be scaled by width or depth again, so
leave the framework's own muP switches off.

## tensors.csv

| column | meaning |
| --- | --- |
| from_tokens | the row holds from here on; more than one value where stages or a swap of the optimizer change the recipe |
| name, shape | as in the model's module; weights of `nn.Linear` are (out, in) |
| tensor_class | embedding, hidden, readout, norms, biases: what the rules distinguish |
| init_mean, init_std | initial values are normal with these; a standard deviation of 0 is a constant |
| learning_rate | at schedule factor 1: Megatron's `lr_mult` times `lr`, a parameter group's `lr` in torchtitan |
| multiplier | of the output of token embedding, readout (logits), and of the decoder's branches (`attention.output`, each `down`) |
| block_multiplier | x + block_multiplier · (block(x) - x) replaces block(x); 1 in the decoder, where `multiplier` does this |
| weight_decay | decoupled, as in torch.optim.AdamW: each step takes rate · decay · weight off; under LAMB part of the direction |
| beta1, beta2 | of the optimizer's averages; empty for an optimizer without |
| eps | of Adam's denominator; empty for an optimizer without |
| optimizer | of this tensor |

A Muon update is orthogonalised by five Newton-Schulz steps on the momentum (.95, Nesterov) and multiplied by its `learning_rate`
and by 0.2 · sqrt(max(rows, columns)). The matrix of a tensor (outputs, inputs, kernel) is (outputs, inputs · kernel); of a
`hidden_stack` (matrices, outputs, inputs) each matrix is orthogonalised.

A LAMB update is AdamW's direction, decay · weight included, times the norm of the tensor (of each matrix of a stack) over the norm of
the direction; 1 if either norm is 0. Adafactor's `learning_rate` is relative to the root mean square of the tensor (at least .001),
without the cap of 1/sqrt(step) in torch.optim.Adafactor; updates are clipped to a root mean square of 1, and step t has the weight
t^-.8 in the second moments. SOAP's first step only finds the eigenbasis, which one power iteration renews every 10 steps; a side above
{largest:,} is not rotated, and .01 of the root mean square of a matrix's second moments is added to their root.

`forward_multipliers` of plan.json has the four of them. The attention logits are (query · key) × `attention`, in place of
1/sqrt(head_dim). A tied table is multiplied by `embedding` where it embeds and by `readout` where it reads out. Learned positions are
added after the token embedding was multiplied. Gradients are clipped to a global norm of `clip_norm`.

## schedule.csv

| column | meaning |
| --- | --- |
| step | from 0 |
| tokens | seen before the step |
| batch_tokens | of the step, over all devices |
| rate_factor | times every tensor's `learning_rate` |

{thinned}
## Afterwards

`muscale watch --plan {key} --losses losses.csv` compares the run with the forecast. The file has a column `tokens` or `step`, and
`loss`, on the held-out text of the study, in {loss_unit}.
"""


def export(plan: Plan, numerics: Numerics, folder: Path, *, completed: Callable[[str], str] = str) -> Path:
    """Write plan.json, tensors.csv, schedule.csv and a README into a folder, and return it.

    Args:
        folder: Output folder; created if missing.
        completed: Completes the commands that the README names.

    Raises:
        StageError: If the run starts from given weights, which the files do not hold.
    """
    if numerics.initial_weights:
        raise StageError("plan: --export writes no weights, but the run starts from initial_weights")
    folder.mkdir(parents=True, exist_ok=True)
    tensors, schedule = tensor_table(plan, numerics), schedule_table(plan)
    recipe, last = plan.segments[0].recipe, plan.segments[-1]
    n_steps = last.recipe.ramp.n_steps(plan.n_tokens)
    whole = {
        "plan": plan.to_dict(),
        "n_steps": n_steps,
        "forward_multipliers": asdict(multipliers_of(_parametrization(plan, numerics, recipe), recipe)),
        "clip_norm": recipe.clip_norm,
        "betas": [recipe.beta1, recipe.beta2],
        "segments": [segment.to_dict() for segment in plan.segments],
        "tensors": json.loads(tensors.to_json(orient="records", double_precision=15)),
        "schedule": json.loads(schedule.to_json(orient="records", double_precision=15)),
    }
    forecast = plan.forecast
    thinned = (
        ""
        if len(schedule) == n_steps
        else f"It has {len(schedule):,} of the {n_steps:,} steps; in between, `segments` of plan.json has the phases as formulas.\n"
    )
    readme = _README.format(
        largest=MAX_ROTATED_DIM,
        key=plan.key,
        n_params=plan.model.shown_params,
        n_tokens=plan.n_tokens,
        n_steps=n_steps,
        thinned=thinned,
        **{name: getattr(forecast, name) for name in ("loss", "loss_unit", "level", "low", "high")},
    )
    texts = {
        "tensors.csv": tensors.to_csv(index=False),
        "schedule.csv": schedule.to_csv(index=False),
        "plan.json": json.dumps(whole, indent=1) + "\n",
        "README.md": completed(readme),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return folder


def export_job(plan: Plan, numerics: Numerics, folder: Path) -> Path:
    """Write the full run's job for a study's [trainer] program, and return its file.

    Args:
        folder: Output folder; created if missing, with the empty folder `state` for the program.

    Raises:
        StageError: If the plan changes its recipe during the run.
    """
    chain, path = plan.chain(numerics), folder / "job.json"
    with refusing("plan: --export"):
        job = job_of(chain.numerics, chain.segments)
    (folder / "state").mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(job.to_dict(), indent=1) + "\n")
    return path


def tensor_table(plan: Plan, numerics: Numerics) -> pd.DataFrame:
    """Return a row for each tensor, and again for each change of the recipe, with the columns that the README lists."""
    rows, before = [], None
    for segment in plan.segments:
        if segment.recipe != before:
            rows += [{"from_tokens": segment.start, **row} for row in _tensors(plan, numerics, segment.recipe)]
        before = segment.recipe
    return pd.DataFrame(rows)


def _tensors(plan: Plan, numerics: Numerics, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Generate the rows of one recipe; rates, decays and eps come from the optimizer itself, built for a model on the meta device."""
    parametrization = _parametrization(plan, numerics, recipe)
    with torch.device("meta"):
        model = build(plan.model)
    optimizer = make_optimizer(model, parametrization, recipe)
    groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    multipliers = multipliers_of(parametrization, recipe)
    applied = _applied(plan, parametrization, multipliers, dict(model.named_parameters()))
    family = family_of(plan.model)
    blocks = "" if family.branch_ends else f"{family.blocks}."
    for name, tensor in model.named_parameters():
        rule, group = parametrization.rules[name], groups[id(tensor)]
        used = recipe.optimizer if group.get(MARKS.get(recipe.optimizer, ""), True) else "adamw"
        beta1, beta2 = (None, None) if used in _WITHOUT_BETAS else (recipe.beta1, recipe.beta2)
        yield {
            "name": name,
            "shape": "x".join(map(str, tensor.shape)),
            "tensor_class": rule.tensor_class.value,
            "init_mean": rule.init_mean,
            "init_std": initial_std(rule, recipe),
            "learning_rate": group["peak_lr"],
            "multiplier": applied.get(name, 1.0),
            "block_multiplier": multipliers.branch if blocks and name.startswith(blocks) else 1.0,
            "weight_decay": group["weight_decay"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": None if used == "muon" else group.get("eps"),  # Muon's belongs to its iteration
            "optimizer": used,
        }


def _parametrization(plan: Plan, numerics: Numerics, recipe: Recipe) -> Parametrization:
    return plan.chain(numerics).numerics.parametrization(recipe.optimizer)


def _applied(
    plan: Plan, parametrization: Parametrization, multipliers: ForwardMultipliers, tensors: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return the factor on the output of each tensor's layer by the tensor's name, if it has one."""
    classes = {name: rule.tensor_class for name, rule in parametrization.rules.items()}
    applied = {name: multipliers.readout for name, found in classes.items() if found is TensorClass.READOUT}
    # Learned positions are also embeddings, but are not multiplied: the token table is tied, or has a row for each token.
    tables = [name for name, found in classes.items() if found is TensorClass.TIED]
    tables = tables or [name for name, found in classes.items() if found is TensorClass.EMBEDDING]
    if tables:
        token_table = min(tables, key=lambda name: len(tensors[name]) != plan.model.vocab_size)
        applied[token_table] = multipliers.embedding
    branch_ends = family_of(plan.model).branch_ends
    ends = [name for name in classes if name.endswith(branch_ends) or name.rpartition(".")[0].endswith(branch_ends)]
    return applied | dict.fromkeys(ends, multipliers.branch)


def schedule_table(plan: Plan) -> pd.DataFrame:
    """Return step, tokens, batch_tokens and rate_factor of every step; a long run has evenly spaced steps and segment ends."""
    n_steps = plan.segments[0].recipe.ramp.n_steps(plan.n_tokens)
    every = max(1, n_steps // _MOST_ROWS)
    rows, step = [], 0
    for segment in plan.segments:
        for tokens, batch in segment.steps():
            if step % every == 0 or tokens == segment.start or tokens + batch == segment.end:
                rows.append((step, tokens, batch, segment.rate_factor(tokens)))
            step += 1
    return pd.DataFrame(rows, columns=["step", "tokens", "batch_tokens", "rate_factor"])
