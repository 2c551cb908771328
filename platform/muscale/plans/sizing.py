"""Which member of the family the budget buys, and on how many tokens: the law's decision among the shapes that can be built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from muscale.errors import StageError
from muscale.settings.plan import PlanSettings
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.architecture.memory import Precision
from proxy_models.data.corpus import Corpus
from scaling import Decision, Law, ScalingError, ScalingFit, decide
from scaling.forms.law import FLOPS_PER_PARAM_TOKEN
from scaling.forms.repeated import RepeatedTokens

REACH = 30.0
"""Sizes are looked at up to so many times the compute-optimal one, and from as far below it."""
WORTH_OF_REPEATS = 15.387756
"""R*_D: published, not fitted to this study (Muennighoff et al. 2305.16264, appendix A)."""
LOSS_DIFFERENCE = 0.0085
"""Relative, of bf16 from fp32: root mean square of five pairs at the quickstart's width 64 (tests/benchmarks/precision_pair.py,
2026-11-23), without a common sign. Another seed moved those losses by 5.7 %."""
_HALVINGS = 60


def size_for(
    settings: PlanSettings,
    fit: ScalingFit,
    family: ModelFamily[Member],
    corpus: Corpus | None = None,
    *,
    proxies: Precision = "fp32",
    precision: Precision = "fp32",
) -> Decision:
    """The member of the family with the least loss for the budget, or of the shapes named, in the decision's `config`.

    Where the ladder does not tell the best D/N, the size is the one nearest to the ladder's own, with a warning.

    Where that would see the corpus more than once, it is decided again with the published worth of repeats. Without a
    corpus of token files no epochs are counted. `proxies` and `precision` are those of the fitted runs and of the full run.

    Raises:
        StageError: If serving alone costs the budget.
    """
    budget = settings.budget
    conditions: dict[str, Any] = {
        "served_tokens": settings.served_tokens,
        "tolerance": settings.tolerance,
        "level": settings.level,
    }
    law = fit.ensemble.law
    given = [shape.of(family) for shape in settings.shapes]
    doubt = fit.unidentified(budget.compute_flops) if len(given) != 1 else None
    if doubt:
        conditions["tokens_per_param"] = doubt.tokens_per_param
        wanted = float((budget.compute_flops / FLOPS_PER_PARAM_TOKEN / doubt.tokens_per_param) ** 0.5)
    else:
        wanted = law.allocate(budget.compute_flops).n_params
    try:
        sizes = given or family.between(wanted / REACH, wanted * REACH)
        chosen = decide(fit, budget, sizes=sizes, **conditions)
        if corpus is not None and corpus.sources:
            seen = epochs(corpus, chosen.n_tokens)
            unique = chosen.n_tokens / seen
            if seen <= 1:
                chosen = replace(chosen, unique_tokens=unique)
            else:
                sizes = given or family.between(wanted / REACH, wanted * max(REACH, 2 * seen))
                limited: dict[str, Any] = {"unique_tokens": unique, "max_epochs": settings.max_epochs}
                again = decide(with_repeats(law), budget, sizes=sizes, **limited, **conditions)
                chosen = _telling(again, chosen, law)
    except ScalingError as error:
        raise StageError(f"plan: {error}") from error
    said = list(chosen.assumptions)
    if (device := budget.accelerator) is not None:
        said.append(f"{device}: share of the peak and price are assumed unless you set them")
        if device.precision != precision and settings.peak_flops is None:
            said.append(
                f"hours and dollars are at the {device.precision} peak, the full run is in {precision}: see plan.peak_flops"
            )
    if proxies != precision:
        said.append(
            f"the forecast is of losses in {proxies}, the full run is in {precision}: {LOSS_DIFFERENCE:.2%} apart in measured pairs"
        )
    return replace(chosen, assumptions=tuple(said), warnings=(*chosen.warnings, *([str(doubt)] if doubt else [])))


def with_repeats(law: Law) -> Law:
    """The law where tokens are seen again, with the published worth of that."""
    return replace(law, form=RepeatedTokens(law.form), parameters={**law.parameters, "rd_star": WORTH_OF_REPEATS})


def _telling(chosen: Decision, free: Decision, law: Law) -> Decision:
    """The decision with repeats, saying what it would be without, and what repeats are taken to cost."""
    unique = chosen.unique_tokens or chosen.n_tokens
    higher = chosen.loss / float(law.loss(chosen.n_params, chosen.n_tokens)) - 1
    said = (
        f"the worth of {chosen.n_tokens / unique:.3g} epochs over {unique:.4g} unique tokens is the published one (Muennighoff "
        f"et al. 2305.16264, appendix A), by which the loss is {higher:.2%} higher; the forecast takes every token for a new one"
    )
    without = (
        f"data: if every token were new, {free.n_params:.4g} parameters and {free.n_tokens:.4g} tokens would be best"
    )
    limits = chosen.limits if chosen.n_params == free.n_params else (*chosen.limits, without)
    general = [line for line in chosen.assumptions if "what repeats of a token are worth" not in line]
    return replace(chosen, limits=limits, assumptions=(*general, said))


def epochs(corpus: Corpus, n_tokens: float) -> float:
    """Times that a run of `n_tokens` sees its source, of a mixture the mean over the run's tokens; 0 where nothing is known."""
    if not corpus.sources:
        return 0.0
    seen = corpus.epochs(max(1, round(n_tokens)))
    shares = {name: times * corpus.sources[name].n_tokens for name, times in seen.items()}
    return sum(shares[name] * times for name, times in seen.items()) / sum(shares.values())


def most_tokens(corpus: Corpus, max_epochs: float) -> float:
    """The longest run of at most so many epochs."""
    low, high = 1.0, 1e18
    if epochs(corpus, high) <= max_epochs:
        return float("inf")
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if epochs(corpus, middle) <= max_epochs else (low, middle)
    return low
