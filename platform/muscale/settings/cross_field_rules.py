"""Rules across several keys of a study file: settings that are valid alone and not together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from muscale.settings.compare import corpus_errors, variant_errors
from muscale.settings.plan import BUDGETS, Shape, model_with_explicit, with_explicit
from muscale.settings.promote import PromoteSettings
from muscale.settings.tables import CheckSettings, StudyTables
from proxy_models.architecture.config import ModelConfig
from proxy_models.coordinates.check import require_seeds, require_sizes
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from search_spaces import Choice, Fixed, Ordinal, Space

_FIXED_IN_A_SWEEP = (
    "batch_doublings",
    "batch_ramp_tokens",
    "schedule",
    "cooldown_fraction",
    "stages",
)
_NO_SWAP = "a swap of the optimizer is for a single run; here runs of several lengths share a stem, and a law is fitted from them"


def cross_field_errors(config: StudyTables) -> list[str]:
    """The broken rules, a line each: `table.key: rule, got value`."""
    h, model = config.hyperparameters, config.model
    trainer = config.trainer
    problems = [*_trainer_errors(config)] if trainer else config.corpus.cross_field_errors(model.vocab_size)
    if invalid := list(_invalid_batches(config)):
        return problems + invalid  # everything else is counted in batches
    problems += _batch_errors(config)
    problems += _rank_errors(config)
    problems += _elastic_errors(config.promote)
    if not isinstance(model, ModelConfig):
        problems += [f"promote.{reason}" for reason in config.promote.parallelism.layout_errors(model)]
        if config.promote.evaluation == "async":
            problems.append('promote.evaluation: "async" is for the built-in decoder, use "sync" for another family')
    if config.full_run_precision == "fp16" and config.promote.workers > 1:
        problems.append(f"promote.precision: fp16 is for one worker, use bf16 for {config.promote.workers}")
    problems += _check_errors(config.check)
    for key, values in _given(config, "zero_readout").items():
        if isinstance(model, ModelConfig) and model.tied and True in values:
            problems.append(
                f"{key}: the readout is the embedding table under model.tied and can't start at zero, got true"
            )
    for key, values in _given(config, "optimizer").items():
        if config.decay_scaling == "sublayer_gain" and set(values) != {"adamw"}:
            problems.append(f'{key}: decay_scaling "sublayer_gain" is known for adamw only, got {", ".join(values)}')
    problems += config.transfer.cross_field_errors(h, model.context_length)
    if len(set(config.ladder.seeds)) != len(config.ladder.seeds):
        problems.append(f"ladder.seeds: must all differ, got {list(config.ladder.seeds)}")
    shapes = [("check.widths", Shape(width=width)) for width in config.check.widths if not trainer]
    shapes += [("transfer.widths", Shape(width=width)) for width in config.transfer.widths]
    shapes += [("ladder.stems", stem) for stem in config.ladder.stems]
    shapes += [("compare.stems", stem) for stem in config.compare.stems]
    shapes += [("compare.widths", Shape(width=width)) for width in config.compare.widths]
    shapes += [("plan.shapes", shape) for shape in config.plan.shapes]
    for key, shape in shapes:
        try:
            shape.of(config.family)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    horizons = [config.transfer.n_tokens * fraction for fraction in config.transfer.horizons]
    lengths = [("transfer.n_tokens", n) for n in horizons]
    if config.transfer.wide_horizon and not problems:
        wide = config.transfer.wide_horizon
        n_tokens = wide.tokens_per_param * config.family.at(width=wide.width).n_params
        if n_tokens <= (longest := config.transfer.n_tokens * max(config.transfer.shared_horizons)):
            rule = f"{n_tokens:,.0f} tokens at width {wide.width} must exceed the {longest:,.0f} that all widths share"
            problems.append(f"transfer.wide_horizon: {rule}; raise tokens_per_param or the width")
    lengths += [("ladder.stems.n_tokens", s.n_tokens / 2 ** ((s.branches - 1) / 2)) for s in config.ladder.stems]
    smallest_rung = config.rung_tokens()[0]
    for key, n_tokens in [("sweep.n_tokens", float(config.sweep.n_tokens)), *lengths]:
        try:
            chain(h, h.whole_batches(n_tokens))
        except (ValueError, OverflowError) as error:
            problems.append(f"{key}: {error}")
    for name in config.sweep.space:
        if name not in {field.name for field in dataclasses.fields(Hyperparameters)}:
            problems.append(f"sweep.space.{name}: not a hyperparameter of the training")
        elif name in _FIXED_IN_A_SWEEP:
            problems.append(f"sweep.space.{name}: rungs are compared at equal {name}; set it in [hyperparameters]")
        elif name in h.set_by_stages:
            problems.append(
                f"sweep.space.{name}: hyperparameters.stages change it during the run; remove it from one of the two"
            )
        elif name.startswith("swap_"):
            problems.append(f"sweep.space.{name}: {_NO_SWAP}")
        else:
            problems += _unsearchable(h, name, config.sweep.space)
    if h.swap_optimizer:
        problems.append(f"hyperparameters.swap_optimizer: {_NO_SWAP}, got {h.swap_optimizer!r}")
    searched = dataclasses.replace(h, batch_tokens=config.largest_batch)
    problems += config.sweep.cross_field_errors(searched, config.rung_tokens())
    too_short = any(problem.startswith("sweep.n_tokens:") for problem in problems)
    if not too_short and smallest_rung <= h.resolve(h.whole_batches(config.sweep.n_tokens)).warmup_tokens:
        problems.append(
            f"sweep.n_tokens: the smallest of {config.sweep.rungs} rungs would have {smallest_rung} tokens, no more than "
            f"the warmup; got {config.sweep.n_tokens}"
        )
    try:
        with_explicit(h, config.plan.explicit)
        model_with_explicit(model, config.plan.explicit)
    except ValueError as error:
        problems.append(f"plan.explicit: {error}")
    else:
        problems += _declared_errors(config)
    stems = config.compare.stems or config.ladder.stems
    for name, variant in config.variants.items():
        problems += variant_errors(
            name,
            variant,
            model,
            config._variant_models.get(name),
            h,
            stems,
            config.compare.widths or config.transfer.widths,
            trainer=trainer is not None,
        )
        if variant.corpus and trainer:
            problems.append(f"variants.{name}.corpus: the [trainer] program reads its own data; leave it out")
        elif variant.corpus and (ranks := config.resources.ranks_per_trial) > 1:
            problems.append(f"variants.{name}.corpus: needs resources.ranks_per_trial = 1, got {ranks}")
        elif variant.corpus:
            problems += corpus_errors(name, variant, config.corpus, model.vocab_size)
    largest = max(6.0 * s.of(config.family).n_params * s.n_tokens for s in config.ladder.stems) if not problems else 0
    if (budget := config.plan.budget).compute_flops <= largest:
        key = next(name for name in BUDGETS if getattr(config.plan, name) is not None)
        equal = f", which is {budget.terms}" if budget.terms else ""
        problems.append(
            f"plan.{key}: must exceed the largest ladder run's {largest:.3g} FLOPs, got {budget.compute_flops:.3g}{equal}"
        )
    return problems


def _trainer_errors(config: StudyTables) -> Iterator[str]:
    """Settings that a study whose [trainer] is a program can't have."""
    if "corpus" in config.model_fields_set:
        yield "corpus: the [trainer] program reads its own data; leave out [corpus], trainer.data names them"
    if (ranks := config.resources.ranks_per_trial) > 1:
        yield f"resources.ranks_per_trial: must be 1 with [trainer], whose program starts its own ranks, got {ranks}"
    if doublings := config.hyperparameters.batch_doublings:
        yield f"hyperparameters.batch_doublings: must be 0 with [trainer], whose jobs have one batch, got {doublings}"


def _invalid_batches(config: StudyTables) -> Iterator[str]:
    """Values of the sweep's batch that are not numbers of tokens."""
    match config.sweep.space.get("batch_tokens"):
        case Choice(values=values) | Ordinal(values=values):
            offered = values
        case Fixed(value=value):
            offered = (value,)
        case _:
            return
    for value in offered:
        if type(value) is not int or value < 1:
            yield f"sweep.space.batch_tokens: a batch must be a whole number of tokens, at least 1, got {value!r}"


def _batch_errors(config: StudyTables) -> Iterator[str]:
    """Reasons against the study's batch, or the batches that its sweep searches."""
    h, context, promote = config.hyperparameters, config.model.context_length, config.promote
    batches = [("hyperparameters.batch_tokens", h.batch_tokens)]
    if searched := config.sweep.space.get("batch_tokens"):
        key = "sweep.space.batch_tokens"
        if not isinstance(searched, Choice | Ordinal | Fixed):
            yield f'{key}: rungs lie at whole batches of every trial: list them, as "ordinal", got {searched}'
            return
        for batch in config.batches:
            if config.largest_batch % batch:
                yield f"{key}: each must divide the largest, {config.largest_batch}, got {batch}"
                return
            batches.append((key, batch))
    for key, batch in batches:
        first = batch >> h.batch_doublings
        if first % context:
            yield f"{key}: must be a multiple of model.context_length = {context}, got {first}"
            continue
        if promote.open_layout:
            continue
        reasons = promote.parallelism.unfit(promote.workers, sequences=first // context)
        yield from (f"promote.workers: {reason}" for reason in reasons)


def _declared_errors(config: StudyTables) -> Iterator[str]:
    """Reasons against the context, the rotary base and the batch of the full run alone."""
    explicit, model, h = config.plan.explicit, config.model, config.hyperparameters
    if "rope_theta" in explicit and isinstance(model, ModelConfig) and model.positions != "rotary":
        yield f'plan.explicit.rope_theta: is for model.positions = "rotary", got it with "{model.positions}"'
    context = explicit.get("context_length", model.context_length)
    if context < model.context_length:
        yield f"plan.explicit.context_length: must be at least the proxies' {model.context_length}, got {context}"
    stated = [name for name in ("batch_tokens", "batch_doublings", "context_length") if name in explicit]
    doublings = explicit.get("batch_doublings", h.batch_doublings)
    for batch in (explicit["batch_tokens"],) if "batch_tokens" in explicit else config.batches:
        if stated and (first := batch >> doublings) % context:
            yield f"plan.explicit.{stated[0]}: batches must be multiples of the context, got {first} and {context}"


def _rank_errors(config: StudyTables) -> Iterator[str]:
    """Reasons why the ranks of a trial could not share its batches."""
    h, context, ranks = config.hyperparameters, config.model.context_length, config.resources.ranks_per_trial
    if ranks == 1:
        return
    if config.precision == "fp16":
        yield f"numerics.precision: fp16 is for one rank, use bf16 with resources.ranks_per_trial = {ranks}"
    for batch in sorted({h.batch_tokens, *config.batches, *config.transfer.batches}):
        first = batch >> h.batch_doublings
        if first % (ranks * context):
            yield (
                f"resources.ranks_per_trial: must divide the {first // context} sequences of each batch of {first} tokens, "
                f"got {ranks}"
            )


def _elastic_errors(promote: PromoteSettings) -> Iterator[str]:
    """Reasons why a full run could not continue on promote.workers_min workers."""
    least = promote.workers_min
    if least is None or least == promote.workers or promote.open_layout:
        return
    yield from (f"promote.workers_min: {reason}" for reason in promote.parallelism.unfit(least))
    if promote.sharding == "hybrid" and promote.shard_ranks is None:
        yield (
            f'promote.workers_min: with promote.sharding = "hybrid" it needs promote.shard_ranks, as the workers of a node may '
            f"be fewer too, got {least}"
        )


def _check_errors(check: CheckSettings) -> list[str]:
    rules: list[tuple[str, Callable[[], None]]] = [
        ("check.widths", lambda: require_sizes("width", check.widths)),
        ("check.seeds", lambda: require_seeds(check.seeds)),
    ]
    if check.depths:
        rules.append(("check.depths", lambda: require_sizes("depth", check.depths)))
    problems = []
    for key, rule in rules:
        try:
            rule()
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return problems


def _unsearchable(h: Hyperparameters, name: str, space: Space) -> list[str]:
    """Reasons why a hyperparameter can't take its space's bounds, or each of its choices, under an optimizer of its trials."""
    offered = space["optimizer"].grid(2) if "optimizer" in space and name != "optimizer" else [h.optimizer]
    for optimizer in offered:
        if not _may_be_active(name, optimizer, space) or (optimizer != h.optimizer and _reason(h, optimizer=optimizer)):
            continue
        for value in space[name].grid(2):  # both bounds, or every value
            if reason := _reason(h, **{"optimizer": optimizer, name: value}):
                remedy = (
                    '; give it a "when" with the optimizers that read it'
                    if "would ignore" in reason and len(offered) > 1
                    else ""
                )
                return [f"sweep.space.{name}: {reason}{remedy}"]
    return []


def _reason(h: Hyperparameters, **given: Any) -> str:
    """Why hyperparameters can't have these values, "" if they can."""
    try:
        dataclasses.replace(h, **given)
    except ValueError as error:
        return str(error)
    except TypeError:
        return f"each of its values must be one that [hyperparameters] takes, got {list(given.values())[-1]!r}"
    return ""


def _may_be_active(name: str, optimizer: Any, space: Space) -> bool:
    """Whether some trial with this optimizer has the hyperparameter."""
    condition = space[name].when
    return condition is None or all(
        allowed.holds(optimizer) if parent == "optimizer" else _may_be_active(parent, optimizer, space)
        for parent, allowed in condition.parents
    )


def _given(config: StudyTables, name: str) -> dict[str, tuple[Any, ...]]:
    """The values of a hyperparameter without an order, by the key of the file that gives them."""
    given: dict[str, tuple[Any, ...]] = {f"hyperparameters.{name}": (getattr(config.hyperparameters, name),)}
    match config.sweep.space.get(name):
        case Choice(values=values):
            given[f"sweep.space.{name}"] = values
        case Fixed(value=value):
            given[f"sweep.space.{name}"] = (value,)
    return given
