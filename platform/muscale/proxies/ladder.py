"""Runs at several sizes and lengths: the ladder to which the law is fitted.

The ladder and the full run follow one policy: muP across size, the horizon law across tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from muscale.actors.jobs import Job
from muscale.errors import refusing
from muscale.proxies.expert_axes import NO_LAWS, AxisLaws, rate_factor
from muscale.proxies.ladder_stages import stage_branches
from muscale.proxies.measures import Measures
from muscale.search.prior_runs import differs_in
from muscale.settings.config import StudyConfig
from muscale.settings.plan import Stem
from muscale.settings.tables import FitSettings
from muscale.store.evaluations import Evaluated
from muscale.store.lineage import Chain, stems
from proxy_models.architecture.member import Member
from proxy_models.architecture.parametrization import CARRIED_EXPERTS
from proxy_models.hashing import content_key
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.schedule import COOLING
from proxy_models.recipes.segments import branch
from proxy_models.recipes.segments import chain as chain_of
from proxy_models.training.numerics import Numerics
from scaling import HorizonLaw, MixtureOfExperts, RegretSurface, ScalingError, ScalingFit, fit, fit_regret_surface
from scaling.forms.expert_law import SPARSITY
from search_spaces import Choice, Distribution, Fixed, Integer, LogUniform, Ordinal, Space, Uniform, is_log

MAX_WARMUP = 2.1
"""Largest warmup of a fitted run, relative to the study's own fraction: a branch at half its stem's length has twice the
fraction (plus rounding to a batch); a shorter branch is mostly warmup, and so its loss belongs to another recipe (assumed)."""
SPACING = 2**0.5
"""Ratio of successive lengths of a ladder's stem. Its warmup and decay are resolved once, so the weight-decay timescale of each
branch, which is relative to its length, is off: by a quarter octave for two branches. A whole octave costs .7 to 1.9 % of the
loss (measured: widths 32 and 64, 0.5M tokens, two seeds each)."""


def design(config: StudyConfig) -> pd.DataFrame:
    """Return the runs of [ladder], a row each, for `scaling.simulate`: n_params, n_tokens, stem; with several mixtures, sparsity."""
    rows = [
        (model.n_params, length, number, model.sparsity)
        for number, (stem, _) in enumerate(product(config.ladder.stems, config.ladder.seeds))
        for model in [stem.of(config.family)]
        for length in stem_lengths(stem)
    ]
    table = pd.DataFrame(rows, columns=["n_params", "n_tokens", "stem", SPARSITY])
    return table if len(mixtures_of(ladder_models(config))) > 1 else table.drop(columns=SPARSITY)


def ladder_models(config: StudyConfig) -> list[Member]:
    """Return the base and the models of the ladder, whose depths and numbers of experts the law covers."""
    return [config.model, *(stem.of(config.family) for stem in config.ladder.stems)]


def mixtures_of(models: Iterable[Member]) -> set[int | None]:
    """Return the numbers of experts of these models; None for a dense model."""
    return {getattr(model, "n_experts", None) for model in models}


def law_columns(fit: ScalingFit, model: Member) -> dict[str, float]:
    """Return the law's columns at a model other than its parameters and tokens: its sparsity under a law of experts."""
    return {SPARSITY: model.sparsity} if SPARSITY in fit.law.form.columns else {}


def stem_lengths(stem: Stem) -> list[float]:
    """Return the tokens at which a stem is annealed, the longest first."""
    return [stem.n_tokens / SPACING**k for k in range(stem.branches)]


def branches(
    numerics: Numerics,
    hyperparameters: Hyperparameters,
    lengths: Sequence[float],
    *,
    tuned_at: float,
    purpose: str,
    label: str,
) -> list[Job]:
    """Return runs of these lengths; under a schedule with a cooldown, warmup and decay are resolved for `tuned_at` tokens.

    Such runs share one stem, unless the corpus's stages end at fractions of the run: then each sees other data from early on. A
    schedule that decays all the way, or has stages at shares of the run, needs a separate run for each length.
    """
    h = hyperparameters
    recipe = h.resolve(h.whole_batches(tuned_at))
    jobs = []
    for length in sorted(lengths):
        n_tokens = h.whole_batches(length)
        shares = h.schedule in COOLING and not h.stages
        segments = branch(recipe, h.stable_tokens(n_tokens), n_tokens, h.schedule) if shares else chain_of(h, n_tokens)
        chain = Chain(numerics=numerics.for_run(n_tokens), segments=segments)
        jobs.append(Job(purpose=purpose, label=f"{label}, {n_tokens} tokens", hyperparameters=h, chain=chain))
    return jobs


def tuned_for(best: Hyperparameters, horizon: HorizonLaw, n_tokens: float, *, factor: float = 1.0) -> Hyperparameters:
    """Return the sweep's best with the rate that the horizon law gives for a run of `n_tokens`, times a factor."""
    return replace(best, learning_rate=float(horizon.rate(n_tokens)) * factor)


def ladder_jobs(
    config: StudyConfig,
    numerics: Numerics,
    best: Hyperparameters,
    horizon: HorizonLaw | None,
    axis_laws: AxisLaws = NO_LAWS,
) -> list[Job]:
    """Return the ladder's runs. Each stem is tuned for the geometric mean of its branches' lengths, which is near all of them.

    Args:
        horizon: None where only the runs' cost matters; then all have the rate of `best`.
        axis_laws: As of `Planner`, for stems with other experts than the base.
    """
    jobs = []
    for stem, seed in product(config.ladder.stems, config.ladder.seeds):
        lengths = stem_lengths(stem)
        middle = float(np.exp(np.mean(np.log(lengths))))
        member = replace(numerics, model=stem.of(config.family), seed=seed)
        factor = rate_factor(member.model, config.model, axis_laws)
        of_stem = branches(
            member,
            tuned_for(best, horizon, middle, factor=factor) if horizon else best,
            lengths,
            tuned_at=middle,
            purpose="ladder",
            label=str(stem) if len(config.ladder.seeds) == 1 else f"{stem}, seed {seed}",
        )
        jobs += of_stem
        if number := config.ladder.stage_branches:
            jobs += [branched for job in of_stem for branched in stage_branches(config.corpus, number, job)]
    return jobs


def planned_warmup_warning(config: StudyConfig, numerics: Numerics) -> str:
    """Return `warmup_warning` of the ladder before the search; "" if the search decides the warmup."""
    if {"warmup_fraction", "warmup_floor_tokens"} & config.sweep.space.keys():
        return ""
    return warmup_warning(ladder_jobs(config, numerics, config.hyperparameters, horizon=None))


def warmup_warning(jobs: Iterable[Job]) -> str:
    """Return a message about runs that the law will leave out because of their warmups; "" if there are none."""
    reasons = {
        job.label: reason
        for job in jobs
        if (
            reason := _long_warmup(
                job.chain.last.recipe.warmup_tokens, job.chain.last.end, job.hyperparameters.warmup_fraction
            )
        )
    }
    if not reasons:
        return ""
    (label, reason), *others = reasons.items()
    more = f" (and {len(others)} more)" if others else ""
    return f"the law will leave out the run {label}{more}: {reason}"


def evaluated(jobs: Sequence[Job], measures: Measures, checkpoints: int) -> list[Job]:
    """Return the jobs with so many points of each run at which measures are taken, its end the last.

    Back from where a run's cooldown begins, or from its end, the lengths fall by `SPACING`, as do those of a stem's branches: so they
    share these points. A run has fewer points if earlier ones would lie in its warmup. Branches for the law of stages have none.
    """
    by_key = {job.chain.key: job for job in jobs if job.chain.numerics.run_tokens in (None, job.chain.last.end)}
    found = [job for job in jobs if job.chain.key not in by_key]
    for runs in stems([job.chain for job in by_key.values()]).values():
        whole, warmup = by_key[runs[0].key].hyperparameters.whole_batches, runs[0].segments[0].recipe.warmup_tokens
        before = [chain.last.start or whole(chain.last.end / SPACING) for chain in runs]
        while len(before) < len(runs) + checkpoints - 2 and warmup < whole(before[0] / SPACING) < before[0]:
            before.insert(0, whole(before[0] / SPACING))
        for end, chain in enumerate(runs, start=len(before) - len(runs) + 1):
            own = before[max(0, end - checkpoints + 1) : end]
            points = [Evaluated(chain=chain.until(tokens), measures=measures.always) for tokens in own]
            points.append(Evaluated(chain=chain, measures=measures.final))
            found.append(replace(by_key[chain.key], evaluated=tuple(points)))
    return found


def law_rows(
    runs: pd.DataFrame,
    best: Hyperparameters,
    space: Space,
    horizon: HorizonLaw,
    numerics: Numerics,
    models: Sequence[Member] = (),
    axis_laws: AxisLaws = NO_LAWS,
) -> pd.DataFrame:
    """Return every annealed run with the columns for `scaling.fit`; `left_out` says why a run is not fitted ("" if it is).

    If the models have several numbers of experts, the rows have a sparsity.

    The law describes the policy that the full run follows. `regret` is therefore the predicted distance of a run's loss from the
    policy's loss at the same size and length, in either direction. It is read from a surface fitted to the sweep and the rate
    grid. If these runs are too few for a surface, only the rate's regret is known, from the horizon law. Runs of an earlier
    revision of the study whose other settings differ from `best` and `numerics` are used for neither.

    Args:
        models: Models of the ladder (`ladder_models`); the runs of their depths and numbers of experts are fitted.
        axis_laws: As of `ladder_jobs`.
    """
    rows = (
        runs[runs["loss"].notna() & ~runs["purpose"].isin(["full", "compare"])]
        .drop_duplicates("key")
        .reset_index(drop=True)
    )
    fitted, rates = [numerics.model, *models], rows["learning_rate"].to_numpy()
    columns = ["key", "purpose", "stem", "d_model", "learning_rate", "n_params", "n_tokens", "loss", "regret"]
    if len(mixtures_of(fitted)) > 1:
        trained = [Numerics.from_dict(row).model for row in rows["numerics"]]
        # those of the base's experts
        rates = rates / [rate_factor(model, numerics.model, axis_laws) for model in trained]
        rows[SPARSITY] = [model.sparsity for model in trained]
        columns.append(SPARSITY)
    at = _coordinates(rows.assign(learning_rate=rates), space, horizon)
    policy = _policy(best, space)
    foreign = [differs_in(row, best, space, numerics) for row in rows.to_dict("records")]
    tells = rows["purpose"].isin(["sweep", "transfer", "tune"]) & (np.array(foreign, dtype=object) == "")
    surface = _surface(at.assign(loss=rows["loss"])[tells], rows[tells])
    if surface:
        rows["regret"] = np.abs(surface.regret(at, policy))
    else:
        rows["regret"] = horizon.regret(rates, rows["n_tokens"].to_numpy())
    rows["annealed"] = True
    searched = rows["purpose"].isin(["sweep", "tune"])
    allowed = {
        name: [*dict.fromkeys(model.to_dict().get(name) for model in fitted)] for name in ("n_layers", *CARRIED_EXPERTS)
    }
    rows["left_out"] = [
        reason
        or ("the regret of its searched hyperparameters is not known" if unknown and surface is None else "")
        or _left_out(row, best, space, allowed)
        for row, reason, unknown in zip(rows.to_dict("records"), foreign, searched, strict=True)
    ]
    return rows[[*columns, "annealed", "left_out"]]


def fit_law(rows: pd.DataFrame, settings: FitSettings, model: Member) -> ScalingFit:
    """Fit the law L(N, D), or with a sparsity the law of experts, to the rows of `law_rows` of models like this.

    Raises:
        StageError: If no law can be fitted.
    """
    with refusing("fit", ScalingError, ValueError):
        return fit(
            rows,
            form=MixtureOfExperts() if SPARSITY in rows else None,
            n_params_convention=model.n_params_convention,
            loss_unit=model.loss_unit,
            n_bootstrap=settings.n_bootstrap,
            seed=settings.seed,
            max_regret=settings.max_regret,
        )


def _coordinates(rows: pd.DataFrame, space: Space, horizon: HorizonLaw) -> pd.DataFrame:
    """Return each run's searched hyperparameters on scales on which optima do not move with size and length."""
    at = pd.DataFrame(index=rows.index)
    for name, distribution in _numeric(space).items():
        if name == "learning_rate":
            at[name] = np.log2(rows[name] / horizon.rate(rows["n_tokens"].to_numpy()))
        elif name == "weight_decay_tau":
            recipes = [Recipe(**segment["recipe"]) for segment in rows["segment"]]
            taus = (r.weight_decay_tau(n) for r, n in zip(recipes, rows["n_tokens"], strict=True))
            at[name] = [_place(name, tau, distribution) for tau in taus]
        else:
            at[name] = [_place(name, h[name], distribution) for h in rows["hyperparameters"]]
    return at


def _policy(best: Hyperparameters, space: Space) -> dict[str, float]:
    """Return the hyperparameters of ladder and full run on the scales of `_coordinates`; the rate lies on the horizon law.

    The timescale of the decay is that of the last stage, as for each run.
    """
    values = best.to_dict() | {"weight_decay_tau": best.stretches[-1].weight_decay_tau}
    numeric = _numeric(space).items()
    return {name: 0.0 if name == "learning_rate" else _place(name, values[name], d) for name, d in numeric}


def _numeric(space: Space) -> dict[str, Distribution]:
    """Return the searched numbers. The rate always counts, since the horizon law's rates are on no list."""
    return {name: d for name, d in space.items() if isinstance(d, Uniform | LogUniform | Integer) or _is_rate(name, d)}


def _is_rate(name: str, distribution: Distribution) -> bool:
    return name == "learning_rate" and not isinstance(distribution, Fixed)


def _place(name: str, value: float, distribution: Distribution) -> float:
    is_octaves = name == "weight_decay_tau" or is_log(distribution)
    return float(np.log2(value)) if is_octaves else float(value)


def _surface(at: pd.DataFrame, rows: pd.DataFrame) -> RegretSurface | None:
    """Fit the regret surface; None if the runs are too few."""
    groups = list(zip(rows["numerics"].map(content_key), rows["n_tokens"], strict=True))
    try:
        return fit_regret_surface(at, coordinates=[name for name in at if name != "loss"], groups=groups)
    except ScalingError:
        return None


def _left_out(row: dict[str, Any], best: Hyperparameters, space: Space, allowed: Mapping[str, list[Any]]) -> str:
    """Return why a run is not one of the policy; `allowed` has the values of the model that the ladder has."""
    for name, values in allowed.items():
        if (value := row["numerics"]["model"].get(name)) not in values:
            called = "depth" if name == "n_layers" else name
            return f"its {called} is {value}, the policy's is {' or '.join(map(str, values))}"
    for name, distribution in space.items():
        is_listed = isinstance(distribution, Choice | Ordinal) and not _is_rate(name, distribution)
        if is_listed and row["hyperparameters"][name] != getattr(best, name):
            return f"its {name} is {row['hyperparameters'][name]!r}, the policy's is {getattr(best, name)!r}"
    if row["numerics"]["run_tokens"] not in (None, row["n_tokens"]):
        return f"its data are those of a run of {row['numerics']['run_tokens']} tokens"
    warmup_tokens = row["segment"]["recipe"]["warmup_tokens"]
    return _long_warmup(warmup_tokens, row["n_tokens"], row["hyperparameters"]["warmup_fraction"])


def _long_warmup(warmup_tokens: int, n_tokens: int, warmup_fraction: float) -> str:
    """Return why the law leaves out a run with this warmup; "" if it does not."""
    allowed = MAX_WARMUP * warmup_fraction
    if warmup_tokens <= allowed * n_tokens:
        return ""
    return (
        f"its warmup takes {warmup_tokens:,} of its {n_tokens:,} tokens, more than {allowed:.1%}: lower "
        "hyperparameters.warmup_floor_tokens, give the run more tokens, or give its stem fewer branches"
    )
