"""Measurement for the coordinate check: a few steps on one fixed batch, at several widths and depths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from proxy_models.architecture.base_shapes import is_norm
from proxy_models.architecture.cross_entropy import sequence_loss
from proxy_models.architecture.experts import Router
from proxy_models.architecture.families import M, ModelFamily, build, family_of
from proxy_models.architecture.family import Family, FamilyError
from proxy_models.architecture.member import Member
from proxy_models.architecture.parametrization import Parametrization, Scheme, TensorClass
from proxy_models.coordinates.check import Axis, CoordinateCheck, require_seeds, require_sizes
from proxy_models.coordinates.tensors import Norms, acting_multipliers
from proxy_models.data.batches import training_stream
from proxy_models.data.corpus import Corpus
from proxy_models.data.uncounted import sequence_ids
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.optimizer import clip, initialize, make_optimizer, set_rates
from proxy_models.training.state import buffer_check

Key = tuple[str, str, str, int]  # module, kind, quantity, step
_NOISE = 0.1  # added to every weight before the causality test, since zero weights hide leaks; assumed
_ROUNDING = (
    1e-4  # relative to the change of the logits: a convolution by FFT mixes all positions, and rounds by about 1e-6
)


def coordinate_check(
    family: ModelFamily[M],
    hyperparameters: Hyperparameters,
    corpus: Corpus,
    *,
    widths: Sequence[int],
    depths: Sequence[int] | None = None,
    seeds: Sequence[int] = (0, 1),
    n_steps: int = 5,
    n_sequences: int = 4,
    scheme: Scheme = "mup",
    parametrization: Callable[[M, M], Parametrization] | None = None,
) -> CoordinateCheck:
    """Train on one fixed batch at every width for a few steps and fit activations and matrices' norms; optionally also in depth.

    Every step has the peak rate, without warmup and without weight decay; the rate should not lie above the tuned
    optimum.

    Args:
        family: Family whose base is the shape at which the hyperparameters are tuned.
        hyperparameters: Their rate, scales, betas and clipping are used.
        widths: At least 4 widths that span at least a factor of 8; trained at the base's depth.
        depths: At least 4 depths that span at least a factor of 8, trained at the base's width; None: no check in depth.
        seeds: At least 2 seeds of the initial values.
        scheme: "mup", or "standard" to see the check fail.
        parametrization: Function that makes the table of (member, base); None: the family's table under `scheme`.

    Raises:
        ValueError: If there are too few widths, depths or seeds, the sizes span too little, or there is no step.
        FamilyError: If the model's predictions depend on later tokens.
    """
    sizes: dict[Axis, Sequence[int]] = {"width": widths}
    if depths is not None:
        sizes["depth"] = depths
    for axis, values in sizes.items():
        require_sizes(axis, values)
    require_seeds(seeds)
    if n_steps < 1:
        raise ValueError(f"n_steps must be at least 1, got {n_steps}")
    of_family = partial(family_of(family.base).parametrization, scheme=scheme, optimizer=hyperparameters.optimizer)
    table = parametrization or of_family
    # Any long horizon works, since warmup, batch ramp and decay, which depend on it, are switched off.
    n_tokens = 10_000 * hyperparameters.batch_tokens
    plain = replace(hyperparameters, warmup_fraction=0.0, warmup_floor_tokens=0, batch_doublings=0, batch_ramp_tokens=0)
    recipe = replace(plain.resolve(n_tokens), warmup_tokens=0, weight_decay=0.0)
    stream = training_stream(corpus, family.base.context_length, seed=0, run_tokens=n_tokens)
    sequences = sequence_ids(stream.batch(0, n_sequences * family.base.context_length))
    narrowest = family.at(width=min(widths))
    model = build(narrowest).eval()
    initialize(model, table(narrowest, family.base), replace(recipe, zero_readout=False), seed=seeds[0])
    multipliers = acting_multipliers(model, sequences[:, :-1])
    require_causal(family_of(family.base), model, sequences[:1, :-1])
    rows: list[dict[str, Any]] = []
    for axis, values in sizes.items():
        for size in sorted(set(values)):
            config = family.at(**{axis: size})
            made = table(config, family.base)
            runs = [
                measure(config, made, recipe, sequences, seed=seed, n_steps=n_steps, matrices=axis == "width")
                for seed in seeds
            ]
            if axis == "depth":
                last = f"{family_of(family.base).blocks}.{size - 1}"
                runs = [_comparable_in_depth(run, last) for run in runs]
            for key in runs[0]:
                place = dict(zip(("module", "kind", "quantity", "step"), key, strict=True))
                mean = float(np.prod([run[key] for run in runs]) ** (1 / len(runs)))
                rows.append({"axis": axis, "width": config.d_model, "depth": config.n_layers, **place, "rms": mean})
    return CoordinateCheck(measurements=pd.DataFrame(rows), seeds=tuple(seeds), multipliers=multipliers)


def measure(
    config: Member,
    parametrization: Parametrization,
    recipe: Recipe,
    sequences: Tensor,
    *,
    seed: int,
    n_steps: int,
    matrices: bool = False,
) -> dict[Key, float]:
    """Return the root mean square of each module's output, and of its change since step 0, after 0, 1, …, n_steps steps.

    With `matrices`, also return each matrix's initial norm, and the norm of its change at its first step, as `Norms` computes them.
    """
    model = build(config).eval()  # nothing is dropped
    initialize(model, parametrization, recipe, seed=seed)
    _hold_routing(model)
    norms = Norms(model, parametrization, config.d_model) if matrices else None
    optimizer = make_optimizer(model, parametrization, recipe)
    set_rates(optimizer, 1.0)
    readout = family_of(config).readout
    kinds: dict[str, str] = {}
    measured: dict[Key, float] = {}
    first: dict[str, Tensor] = {}
    for step in range(n_steps + 1):
        nodes: dict[str, Any] = {}
        check_buffers = buffer_check(model)
        with recorded_outputs(model, nodes) as outputs:
            loss = sequence_loss(model, sequences)  # the readout returns logits here, so that they are recorded
        check_buffers()
        first, kinds = first or outputs, kinds or _kinds(model, readout, parametrization, nodes)
        for name, output in outputs.items():
            measured[name, kinds[name], "size", step] = rms(output)
            if step:
                measured[name, kinds[name], "change", step] = rms(output - first[name])
        if step < n_steps:
            loss.backward()  # type: ignore[no-untyped-call]
            clip(model.parameters(), recipe.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if norms:
                updates = norms.updates(last=step == n_steps - 1)
                measured |= {(*key, step + 1): norm for key, norm in updates.items()}
    return measured | ({(*key, 0): norm for key, norm in norms.initial().items()} if norms else {})


def _hold_routing(model: nn.Module) -> None:
    """Hold each token's experts as in the first forward pass: one that changes moves an output by its whole size, at any rate."""
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda router, _, routing: setattr(router, "held", routing.chosen))


@contextmanager
def recorded_outputs(model: nn.Module, nodes: dict[str, Any] | None = None) -> Iterator[dict[str, Tensor]]:
    """Yield detached outputs of the modules by name, in the forward passes inside; `nodes` receives each output's `grad_fn`.

    A module that hands on a submodule's output unchanged (a readout's model, a projection's attention) is not listed
    a second time, nor is one whose output no parameter enters (rotary angles). A tuple's output is its first entry: torch's
    recurrent layers and its attention put their values there, in addition to states and weights.
    """
    outputs: dict[str, Tensor] = {}
    seen: list[Tensor] = []

    def record(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        values = output[0] if isinstance(output, tuple) and output else output
        if isinstance(values, Tensor) and values.requires_grad and not any(values is other for other in seen):
            seen.append(values)
            outputs[name] = values.detach()
            if nodes is not None and values.grad_fn is not None:
                nodes[name] = values.grad_fn

    handles = [module.register_forward_hook(partial(record, name)) for name, module in model.named_modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _comparable_in_depth(measured: dict[Key, float], stream: str) -> dict[Key, float]:
    """Keep the values that correspond at every depth: the stream after the last block, and the readout."""
    return {
        ("last block", "stream", quantity, step) if module == stream else (module, kind, quantity, step): rms
        for (module, kind, quantity, step), rms in measured.items()
        if module == stream or kind == "readout"
    }


def _kinds(model: nn.Module, readout: str, parametrization: Parametrization, nodes: dict[str, Any]) -> dict[str, str]:
    """Return each module's kind; the model, and modules that compute from a readout's output, have the readout's kind.

    The output of a router of experts is its logits.
    """
    rules = parametrization.rules.items()
    tables = {name.rpartition(".")[0] for name, rule in rules if rule.tensor_class is TensorClass.READOUT}
    readouts = {"", readout, *tables}
    logits = {nodes[name] for name in readouts & nodes.keys() if name}
    kinds = {name: "norm" if is_norm(module) else "hidden" for name, module in model.named_modules()}
    after = {name for name, node in nodes.items() if _is_computed_from(node, logits)}
    routers = {name.rpartition(".")[0] for name, rule in rules if rule.tensor_class is TensorClass.ROUTER}
    return kinds | dict.fromkeys(routers, "router") | dict.fromkeys(readouts | after, "readout")


def _is_computed_from(node: Any, others: set[Any]) -> bool:
    """Whether the graph of a node contains one of the others."""
    left, seen = [node], {node}
    while left:
        if (one := left.pop()) in others:
            return True
        left += {before for before, _ in one.next_functions if before is not None} - seen
        seen |= set(left)
    return False


@torch.no_grad()
def require_causal(family: Family, model: nn.Module, tokens: Tensor) -> None:
    """Require logits that do not depend on later tokens: change a token in the middle of a sequence. This changes the weights.

    A family with its own loss may predict something other than the next token, and is not tested.

    Args:
        model: A member on the CPU, in evaluation mode.
        tokens: Ids (batch, time).

    Raises:
        FamilyError: If logits before the token change by more than rounding; the loss of such a model would be meaningless.
    """
    if type(family).evaluation_loss is not Family.evaluation_loss or tokens.shape[1] < 2:
        return
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(_NOISE * torch.randn(parameter.shape, generator=generator))
    changed, place = tokens.clone(), tokens.shape[1] // 2
    changed[:, place] = (tokens[:, place] + 1) % family.vocab_size
    moved = (model(changed) - model(tokens)).abs().amax(dim=(0, 2))  # (time,)
    if moved[:place].max() > _ROUNDING * moved.max():
        first = int((moved > _ROUNDING * moved.max()).nonzero()[0])
        raise FamilyError(
            f"{type(model).__name__} must be causal, as its loss is of the next token: token {place} of a sequence, changed, moves "
            f"the logits from position {first} on, by {moved[:place].max() / moved.max():.2g} of the largest change"
        )


def rms(tensor: Tensor) -> float:
    """Root mean square of all entries, summed in double precision."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) / math.sqrt(tensor.numel())
