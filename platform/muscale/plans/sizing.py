"""Size and tokens of the full run: the law's decision among the shapes that can be built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from muscale.errors import StageError, refusing
from muscale.proxies.ladder import law_columns
from muscale.settings.config import StudyConfig
from muscale.settings.plan import PlanSettings, Shape, model_with_explicit
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.architecture.parametrization import CARRIED_EXPERTS
from proxy_models.data.corpus import Corpus
from proxy_models.data.mixture import MAX_EPOCHS
from scaling import Decision, Law, Limits, ScalingError, ScalingFit, decide
from scaling.fits.runs import LEAST_COUNT
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN
from scaling.forms.repeated import RepeatedTokens

REACH = 30.0
"""Factor above and below the compute-optimal size within which sizes are tried."""
WORTH_OF_REPEATS = 15.387756
"""R*_D as published (Muennighoff et al. 2305.16264, appendix A), not fitted to this study."""
LOSS_DIFFERENCE = 0.0085
"""Relative difference of losses in bf16 from fp32: root mean square of five pairs at the quickstart's width 64
(tests/benchmarks/precision_pair.py, 2026-11-23), without a common sign. Another seed moved those losses by 5.7 %."""
_HALVINGS = 60


def planned_family(config: StudyConfig) -> ModelFamily[Member]:
    """Return the members of which the full run's size is chosen: a mixture has the experts that plan.explicit states."""
    explicit = {name: value for name, value in config.plan.explicit.items() if name in CARRIED_EXPERTS}
    return ModelFamily(base=model_with_explicit(config.model, explicit))


def size_for(
    settings: PlanSettings,
    fit: ScalingFit,
    family: ModelFamily[Member],
    corpus: Corpus | None = None,
    *,
    proxies: Precision = "fp32",
    precision: Precision = "fp32",
    shapes: Iterable[Shape] = (),
) -> Decision:
    """Return the decision for the budget; its `config` is the best member of the family, or the best of the named shapes.

    If the ladder does not determine the best D/N, the size nearest to the ladder's own D/N is taken, with a warning. If the run
    would see its corpus more than once, the law with the published worth of repeats decides. Without a corpus of token files no
    epochs are counted. `proxies` and `precision` are the precisions of the fitted runs and of the full run, `shapes` the ladder's.

    If the ladder has one size, the plan keeps it, and the budget determines the tokens.

    Raises:
        StageError: If serving alone costs the budget, or `plan.shapes` name another size than the ladder's only one.
    """
    budget, law, columns = settings.budget, fit.ensemble.law, law_columns(fit, family.base)
    named = [shape.of(family) for shape in settings.shapes]
    if fit.one_size is not None:
        named = [_kept(fit.one_size, family, named, shapes)]
    doubt = fit.unidentified(budget.compute_flops) if len(named) != 1 else None
    ratio = doubt.tokens_per_param if doubt else None
    best = fit.one_size or law.allocate(budget.compute_flops, **columns).n_params
    wanted = float((budget.compute_flops / FLOPS_PER_PARAM_TOKEN / ratio) ** 0.5) if ratio else best

    def decided(law: Law | ScalingFit, reach: float, unique: float | None = None) -> Decision:
        limits = Limits(
            sizes=named or family.between(max(wanted / REACH, LEAST_COUNT), wanted * reach),
            unique_tokens=unique,
            max_epochs=settings.max_epochs if unique else None,
        )
        with refusing("plan", ScalingError):
            return decide(
                law,
                budget,
                served_tokens=settings.served_tokens,
                limits=limits,
                tokens_per_param=ratio,
                tolerance=settings.tolerance,
                level=settings.level,
            )

    # A second decision is needed if text repeats, and only the first tells: the epochs, and the unique tokens of a mixture, follow
    # from its D. The fit, which has intervals, knows no repeats; the law with them has no intervals.
    free = decided(fit, REACH)
    seen = epochs(corpus, free.n_tokens, family.base.context_length)
    unique = free.n_tokens / seen if seen else None
    repeats = seen > 1
    chosen = decided(with_repeats(law), max(REACH, 2 * seen), unique) if repeats else free
    without = (
        f"data: if every token were new, {free.n_params:.4g} parameters and {free.n_tokens:.4g} tokens would be best"
    )
    return replace(
        chosen,
        unique_tokens=unique,
        limits=(*chosen.limits, *([without] if chosen.n_params != free.n_params else [])),
        warnings=(*chosen.warnings, *([str(doubt)] if doubt else [])),
        assumptions=(
            *chosen.assumptions,
            *([_worth_of_repeats(chosen, law)] if repeats else []),
            *(["all runs of the ladder have this size: it is kept, not decided"] if fit.one_size else []),
            *_assumptions(settings, proxies, precision),
        ),
    )


def _kept(n_params: float, family: ModelFamily[Member], named: Sequence[Member], shapes: Iterable[Shape]) -> Member:
    """Return the member of a ladder of one size; raise StageError if `named`, of plan.shapes, has others or there is none."""
    if others := [model for model in named if model.n_params != n_params]:
        raise StageError(
            f"plan.shapes: must have the N of the ladder's runs, {n_params:,.0f}, which say nothing of other sizes; "
            f"got {others[0].n_params:,}"
        )
    found = (
        model for model in (*named, family.base, *(shape.of(family) for shape in shapes)) if model.n_params == n_params
    )
    if (model := next(found, None)) is None:
        raise StageError(
            f"plan: no shape of ladder.stems has the N of the ladder's runs, {n_params:,.0f}; name it in plan.shapes"
        )
    return model


def with_repeats(law: Law) -> Law:
    """Return the law with repeated tokens at their published worth."""
    return replace(law, form=RepeatedTokens(law.form), parameters={**law.parameters, "rd_star": WORTH_OF_REPEATS})


def _worth_of_repeats(chosen: Decision, law: Law) -> str:
    columns = {} if chosen.sparsity is None else {SPARSITY: chosen.sparsity}
    higher = chosen.loss / float(law.loss(chosen.n_params, chosen.n_tokens, **columns)) - 1
    return (
        f"the value of {chosen.epochs:.3g} epochs over {chosen.unique_tokens:.4g} unique tokens is the published one (Muennighoff "
        f"et al. 2305.16264, appendix A), by which the loss is {higher:.2%} higher; the forecast counts every token as new"
    )


def _assumptions(settings: PlanSettings, proxies: Precision, precision: Precision) -> list[str]:
    assumed = []
    if (device := settings.budget.accelerator) is not None:
        assumed.append(f"{device}: share of the peak and price are assumed unless you set them")
        if device.precision != precision and settings.peak_flops is None:
            assumed.append(
                f"hours and dollars assume the {device.precision} peak, the full run is in {precision}: see plan.peak_flops"
            )
    if proxies != precision:
        assumed.append(
            f"the forecast is for losses in {proxies}, the full run is in {precision}: {LOSS_DIFFERENCE:.2%} apart in measured pairs"
        )
    return assumed


def repeats(seen: float | None) -> tuple[str, ...]:
    """Return the reason against a forecast for so many epochs over the corpus, if they are too many."""
    if seen is None or seen <= MAX_EPOCHS:
        return ()
    return (
        f"{seen:.3g} epochs over the corpus: tested with new tokens, which up to {MAX_EPOCHS:g} are nearly equalled",
    )


def epochs(corpus: Corpus | None, n_tokens: float, context_length: int) -> float:
    """Return how many times a run of `n_tokens` sees its source, or for a mixture the mean over the run's tokens.

    Without a corpus of token files it is 0.
    """
    if corpus is None or not corpus.sources:
        return 0.0
    run_tokens = max(1, round(n_tokens))
    seen = corpus.epochs(run_tokens, context_length)
    shares = corpus.mixture.tokens(run_tokens) if corpus.mixture else dict.fromkeys(seen, 1.0)
    return sum(shares[name] * times for name, times in seen.items()) / sum(shares[name] for name in seen)


def most_tokens(corpus: Corpus, max_epochs: float, context_length: int) -> float:
    """Return the length of the longest run of at most so many epochs."""
    low, high = 1.0, 1e18
    if epochs(corpus, high, context_length) <= max_epochs:
        return float("inf")
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if epochs(corpus, middle, context_length) <= max_epochs else (low, middle)
    return low
