"""Rules across several keys of a study file, for settings that are each valid but not together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from muscale.settings.plan import BUDGETS, Shape, model_with_explicit, with_explicit
from muscale.settings.space_rules import invalid_batches, model_errors, space_errors
from muscale.settings.strict import broken
from muscale.settings.tables import CheckSettings, StudyTables
from muscale.settings.variant_rules import variants_errors
from proxy_models.architecture.families import ModelFamily, family_of, is_imported
from proxy_models.architecture.parametrization import CARRIED_EXPERTS
from proxy_models.coordinates.check import require_seeds, require_sizes
from proxy_models.evaluation.repeated_windows import CONTINUATION_TOKENS, PREFIX_TOKENS
from proxy_models.recipes.schedule import COOLING
from proxy_models.recipes.segments import chain
from scaling.mixtures.stage_law import MIN_STEMS
from scaling.optima.drift import OF_EXPERTS
from scaling.optima.tokens_law import plural
from search_spaces import Choice, Fixed, Ordinal

LEAST_UNTIL = 0.5
"""Least end of the first stage for branches: an octave shorter than their run (`scaling.mixtures.stage_law.MISTUNED`)."""
NO_STEP_SIZES = "the model's family has no sizes (step_sizes) from which the time of a step is predicted"


def cross_field_errors(config: StudyTables) -> list[str]:
    """The broken rules, one per line: `table.key: rule, got value`."""
    h, model = config.hyperparameters, config.model
    problems = [*_trainer_errors(config)] if config.trainer else config.corpus.cross_field_errors(model.vocab_size)
    if invalid := list(invalid_batches(config)):
        return problems + invalid  # all other rules count in batches
    problems += _batch_errors(config)
    problems += _rank_errors(config)
    problems += _promote_errors(config)
    problems += _check_errors(config.check)
    problems += model_errors(config)
    one_size = config.initial_weights is not None
    problems += config.transfer.cross_field_errors(h, model.context_length, one_size=one_size)
    problems += _axis_errors(config)
    problems += _shape_errors(config)
    problems += _mixture_errors(config)
    problems += _given_weights_errors(config)
    if not problems:
        problems += _wide_horizon_errors(config)
    problems += _stage_errors(config)
    problems += _length_errors(config)
    problems += space_errors(config)
    searched = replace(h, batch_tokens=config.largest_batch)
    problems += config.sweep.cross_field_errors(searched, config.rung_tokens())
    if not any(problem.startswith("sweep.n_tokens:") for problem in problems):
        problems += _warmup_errors(config)
    problems += _explicit_errors(config)
    if config.use_case:
        problems += config.use_case.cross_field_errors(config.plan, config.scores.tasks if config.scores else ())
    problems += _scores_errors(config)
    problems += variants_errors(config)
    if not problems:
        problems += budget_errors(config)
    return problems


def _scores_errors(config: StudyTables) -> Iterator[str]:
    """Workers of [scores] for which [promote] has no GPU each, and memorisation of prompts or of windows beyond a sequence."""
    promote, context = config.promote, config.model.context_length
    if config.scores and config.scores.memorisation and context < (least := PREFIX_TOKENS + CONTINUATION_TOKENS - 1):
        yield f"scores.memorisation: needs model.context_length of at least {least} for its windows, got {context}"
    if config.scores and config.scores.memorisation and config.corpus.has_prompts:
        yield "scores.memorisation: is measured on text that counts as a whole, but a source of [corpus] has prompts; got true"
    if config.scores and promote.evaluation == "async" and config.scores.workers > 1 and 0 < promote.evaluator_gpus < 1:
        yield (
            f"scores.workers: must be 1 with promote.evaluator_gpus = {promote.evaluator_gpus:g}, because workers that share weights "
            f"need a GPU each; got {config.scores.workers}"
        )


def _axis_errors(config: StudyTables) -> Iterator[str]:
    """Sizes of [transfer] along the axes of a mixture that the model can't have."""
    for axis, sizes in config.transfer.sizes.items():
        for size in sizes if axis in OF_EXPERTS else ():
            try:
                config.family.along(axis, size)
            except ValueError as error:
                yield f"transfer.{plural(axis)}: {error}; got {size:g}"


def _trainer_errors(config: StudyTables) -> Iterator[str]:
    """Settings that a study whose [trainer] is a program can't have."""
    if "corpus" in config.model_fields_set:
        yield "corpus: the [trainer] program reads its own data; leave out [corpus] and name the data in trainer.data"
    if config.scores:
        yield "scores: a study with [trainer] can't have it, because the weights are the program's; leave out [scores]"
    if (ranks := config.resources.ranks_per_trial) > 1:
        yield f"resources.ranks_per_trial: must be 1 with [trainer], because its program starts its own ranks; got {ranks}"
    if doublings := config.hyperparameters.batch_doublings:
        yield f"hyperparameters.batch_doublings: must be 0 with [trainer], because its jobs have one batch size; got {doublings}"


def _batch_errors(config: StudyTables) -> Iterator[str]:
    """Reasons against the study's batch, or against batches that its sweep searches."""
    h, context = config.hyperparameters, config.model.context_length
    batches = [("hyperparameters.batch_tokens", h.batch_tokens)]
    if searched := config.sweep.space.get("batch_tokens"):
        key = "sweep.space.batch_tokens"
        if not isinstance(searched, Choice | Ordinal | Fixed):
            yield f'{key}: rungs lie at whole batches of every trial, so list the batch sizes as an "ordinal"; got {searched}'
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


def _promote_errors(config: StudyTables) -> Iterator[str]:
    """Reasons why [promote] can't train the full run."""
    promote, model = config.promote, config.model
    yield from _elastic_errors(config)
    if is_imported(model):  # readers do not know a custom family's answers
        family = family_of(model)
        if promote.open_layout and family.step_sizes(model) is None:
            yield f'promote.{promote.open_layout[0]}: must be stated, since {NO_STEP_SIZES}, got "auto"'
        elif not promote.open_layout and not family.shared_sizes(model):
            yield from (f"promote.{reason}" for reason in promote.parallelism.layout_errors(model))
    if config.full_run_precision == "fp16" and promote.workers > 1:
        yield f"promote.precision: fp16 is for one worker, use bf16 for {promote.workers}"


def _shape_errors(config: StudyTables) -> Iterator[str]:
    """Shapes that the family does not have."""
    checked = () if config.trainer or config.initial_weights else config.check.widths
    shapes = [("check.widths", Shape(width=width)) for width in checked]
    for key, shape in (*shapes, *_shapes(config)):
        yield from broken(key, shape.of, config.family)
    explicit = {name: value for name, value in config.plan.explicit.items() if name in CARRIED_EXPERTS}
    try:
        family = ModelFamily(base=model_with_explicit(config.model, explicit))
    except ValueError:
        return  # named by `_explicit_errors`
    for planned in config.plan.shapes:
        yield from broken("plan.shapes", planned.of, family)


def _shapes(config: StudyTables) -> Iterator[tuple[str, Shape]]:
    """Shapes of the proxies, with the keys that name them."""
    yield from (("transfer.widths", Shape(width=width)) for width in config.transfer.widths)
    yield from (("ladder.stems", stem) for stem in config.ladder.stems)
    yield from (("compare.stems", stem) for stem in config.compare.stems)
    yield from (("compare.widths", Shape(width=width)) for width in config.compare.widths)


def _mixture_errors(config: StudyTables) -> Iterator[str]:
    """Settings that have no law of experts, if ladder or plan name several numbers of experts."""
    own = getattr(config.model, "n_experts", None)
    named = [stem.n_experts for stem in config.ladder.stems if stem.n_experts not in (None, own)]
    laws = {"scores": config.scores is not None, "ladder.stage_branches": config.ladder.stage_branches}
    if named:
        rule = "has no law of experts: leave n_experts out of ladder.stems"
        yield from (f"{key}: {rule}, got {named[0]}" for key, is_set in laws.items() if is_set)
    compared = config.compare.stems or config.ladder.stems
    if config.variants and any(stem.n_experts not in (None, own) for stem in compared):
        yield "compare.stems: variants are compared at one number of experts: list stems without n_experts"
    listed = [shape.n_experts for shape in config.plan.shapes if shape.n_experts]
    if listed and (stated := config.plan.explicit.get("n_experts")):
        yield f"plan.explicit.n_experts: plan.shapes have their own, got {stated} and {listed[0]}"


def _given_weights_errors(config: StudyTables) -> Iterator[str]:
    """Settings that need other shapes or other initial values than given weights have."""
    if config.initial_weights is None:
        return
    base, transfer, h = config.model, config.transfer, config.hyperparameters
    if config.trainer:
        yield f"initial_weights: the [trainer] program has its own initial values; leave it out, got {config.initial_weights!r}"
    if "check" in config.model_fields_set:
        yield "check: compares several widths, but initial_weights have one; leave out [check]"
    for key, shape in (*_shapes(config), *(("plan.shapes", shape) for shape in config.plan.shapes)):
        own = (base.d_model, base.n_layers, getattr(base, "n_experts", None))
        if (shape.width, shape.depth or base.n_layers, shape.n_experts or own[2]) != own:
            rule = f"must have the shape of initial_weights, width {base.d_model} and depth {base.n_layers}"
            yield f"{key}: {rule}, got {shape}"
    compared: dict[str, object] = {
        f"transfer.{plural(axis)}": sizes for axis, sizes in transfer.sizes.items() if axis != "width"
    }
    compared |= {"transfer.wide_horizon": transfer.wide_horizon, "transfer.over": transfer.over}
    for key, value in compared.items():
        if value:
            yield f"{key}: compares several sizes, but initial_weights have one; leave it out, got {value}"
    without_effect = "has no effect, since no value is drawn with initial_weights"
    for name, default in (("init_scale", 1.0), ("zero_readout", False)):
        stated = {"hyperparameters": getattr(h, name), "plan.explicit": config.plan.explicit.get(name, default)}
        stated |= {
            f"variants.{of}.hyperparameters": v.hyperparameters.get(name, default) for of, v in config.variants.items()
        }
        yield from (f"{key}.{name}: {without_effect}; got {value}" for key, value in stated.items() if value != default)
        if name in config.sweep.space:
            yield f"sweep.space.{name}: {without_effect}; leave it out"
    for name, variant in config.variants.items():
        if variant.model:
            yield f"variants.{name}.model: must be left out, since initial_weights have the shape of [model]; got {variant.model}"
        if variant.names_tokenizer(config.corpus):
            yield f"variants.{name}.corpus: must have the study's tokenizer, whose ids initial_weights know"
    for name in CARRIED_EXPERTS:
        if name in config.plan.explicit:
            yield f"plan.explicit.{name}: initial_weights have the experts of [model]; leave it out"
    context = config.plan.explicit.get("context_length", base.context_length)
    if context != base.context_length and getattr(base, "positions", None) == "learned":
        yield f"plan.explicit.context_length: initial_weights have {base.context_length} learned positions, got {context}"


def _wide_horizon_errors(config: StudyTables) -> Iterator[str]:
    """Reasons against the rate grid of one width over more tokens; all shapes must exist in the family."""
    if wide := config.transfer.wide_horizon:
        n_tokens = wide.tokens_per_param * config.family.at(width=wide.width).n_params
        if n_tokens <= (longest := config.transfer.n_tokens * max(config.transfer.shared_horizons)):
            rule = f"{n_tokens:,.0f} tokens at width {wide.width} must exceed the {longest:,.0f} that all widths share"
            yield f"transfer.wide_horizon: {rule}; raise tokens_per_param or the width"


def _length_errors(config: StudyTables) -> Iterator[str]:
    """Runs whose schedule does not fit into their tokens."""
    h = config.hyperparameters
    lengths = [("sweep.n_tokens", float(config.sweep.n_tokens))]
    lengths += [("transfer.n_tokens", config.transfer.n_tokens * fraction) for fraction in config.transfer.horizons]
    lengths += [("ladder.stems.n_tokens", s.n_tokens / 2 ** ((s.branches - 1) / 2)) for s in config.ladder.stems]
    for key, n_tokens in lengths:
        yield from broken(key, lambda n: chain(h, h.whole_batches(n)), n_tokens)


def _stage_errors(config: StudyTables) -> Iterator[str]:
    """Reasons against branches with other shares of tokens in the corpus's last stage."""
    if not (branches := config.ladder.stage_branches):
        return
    stages, h = config.corpus.stages, config.hyperparameters
    if len(stages) != 2 or not config.corpus.stages_by_fraction:
        rule = "needs two [[corpus.stages]], the first with until_fraction"
        yield f"ladder.stage_branches: {rule}; got {branches} with {len(stages)} stages"
    elif (until := stages[0].until_fraction or 1.0) < LEAST_UNTIL:
        rule = f"needs an until_fraction of at least {LEAST_UNTIL:g}: shorter branches are too far from what their stem is tuned for"
        yield f"ladder.stage_branches: {rule}; got {branches} with {until:g}"
    runs = sum(stem.branches for stem in config.ladder.stems) * len(config.ladder.seeds)
    if runs < MIN_STEMS:
        yield f"ladder.stage_branches: needs {MIN_STEMS} runs of the ladder, by stems, branches and seeds; got {runs}"
    if h.schedule not in COOLING or h.stages:
        rule = f"a run branches only under {' or '.join(map(repr, COOLING))} without hyperparameters.stages"
        yield f"ladder.stage_branches: {rule}; got {branches} under {h.schedule!r}"


def _warmup_errors(config: StudyTables) -> Iterator[str]:
    """A warmup that is at least as long as the smallest rung."""
    h, sweep, smallest = config.hyperparameters, config.sweep, config.rung_tokens()[0]
    if smallest <= h.resolve(h.whole_batches(sweep.n_tokens)).warmup_tokens:
        yield (
            f"sweep.n_tokens: the smallest of {sweep.rungs} rungs would have {smallest} tokens, no more than the warmup; got "
            f"{sweep.n_tokens}"
        )


def _explicit_errors(config: StudyTables) -> Iterator[str]:
    """Reasons against [plan.explicit]."""
    try:
        with_explicit(config.hyperparameters, config.plan.explicit)
        model_with_explicit(config.model, config.plan.explicit)
    except ValueError as error:
        yield f"plan.explicit: {error}"
    else:
        yield from _declared_errors(config)


def budget_errors(config: StudyTables) -> Iterator[str]:
    """A budget that the ladder's largest run would use up; all shapes must be the family's."""
    largest = max(6.0 * s.of(config.family).n_params * s.n_tokens for s in config.ladder.stems)
    if (budget := config.plan.budget).compute_flops <= largest:
        key = next(name for name in BUDGETS if getattr(config.plan, name) is not None)
        equal = f", which is {budget.terms}" if budget.terms else ""
        yield f"plan.{key}: must exceed the largest ladder run's {largest:.3g} FLOPs, got {budget.compute_flops:.3g}{equal}"


def _declared_errors(config: StudyTables) -> Iterator[str]:
    """Reasons against a context, rotary base, window or batch that only the full run has."""
    explicit, model, h = config.plan.explicit, config.model, config.hyperparameters
    if "rope_theta" in explicit and family_of(model).position_base is None:
        yield f"plan.explicit.rope_theta: is for a model with rotary positions; this one has none, got {explicit['rope_theta']:g}"
    if "attention_window" in explicit and family_of(model).attention_window is None:
        yield f"plan.explicit.attention_window: is for a model with model.attention_window, got {explicit['attention_window']}"
    of_experts = [name for name in CARRIED_EXPERTS if name in explicit]
    if of_experts and not getattr(model, "n_experts", None):
        name = of_experts[0]
        yield f"plan.explicit.{name}: is for a mixture of experts, a model with model.n_experts; got {explicit[name]:g}"
    context = explicit.get("context_length", model.context_length)
    if context < model.context_length:
        yield f"plan.explicit.context_length: must be at least the proxies' {model.context_length}, got {context}"
    stated = [name for name in ("batch_tokens", "batch_doublings", "context_length") if name in explicit]
    doublings = explicit.get("batch_doublings", h.batch_doublings)
    for batch in (explicit["batch_tokens"],) if "batch_tokens" in explicit else config.batches:
        if stated and (first := batch >> doublings) % context:
            yield f"plan.explicit.{stated[0]}: batches must be multiples of the context, got {first} and {context}"
    promote = config.promote
    if "batch_tokens" in explicit and not promote.open_layout:  # otherwise a law may choose it, and the gate compares
        reasons = promote.parallelism.unfit(
            promote.workers,
            sequences=(explicit["batch_tokens"] >> doublings) // context,
            doublings=doublings,
            micro_batch=promote.micro_batch,
        )
        yield from (f"promote.workers: {reason}" for reason in reasons)


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


def _elastic_errors(config: StudyTables) -> Iterator[str]:
    """Reasons why a full run could not continue on promote.workers_min workers."""
    promote = config.promote
    least = promote.workers_min
    if least is None or least == promote.workers or promote.open_layout:
        return
    yield from (f"promote.workers_min: {reason}" for reason in promote.parallelism.unfit(least))
    if promote.sharding == "hybrid" and promote.shard_ranks is None:
        yield (
            f'promote.workers_min: with promote.sharding = "hybrid" it needs promote.shard_ranks, because a node may '
            f"have fewer workers too; got {least}"
        )


def _check_errors(check: CheckSettings) -> Iterator[str]:
    """Widths, depths and seeds that a check can't compare."""
    yield from broken("check.widths", require_sizes, "width", check.widths)
    yield from broken("check.seeds", require_seeds, check.seeds)
    if check.depths:
        yield from broken("check.depths", require_sizes, "depth", check.depths)
