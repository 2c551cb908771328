"""Bundles of a study's finished runs: collected from its ledger and folders, and written once; trains nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from muscale.bundles.bundle import CONTINUED, FORECAST, Bundle
from muscale.bundles.bundle_writing import FinishedRun, write_bundle
from muscale.bundles.model_card import continuation_card, model_card
from muscale.errors import StageError
from muscale.findings import Findings, StudyContents, findings
from muscale.full_runs.amend.parent import find_amendment, plain
from muscale.full_runs.amend.train import Amended
from muscale.full_runs.checkpoints.evaluated_checkpoints import LOSS, evaluated_checkpoints
from muscale.full_runs.promote.promotion import Promotion, recorded_promotion
from muscale.layout import BUNDLES, FULL_RUNS
from muscale.plans.plan import Plan
from muscale.proxies.ladder import law_columns
from muscale.store.lease import full_run_lease, lease
from muscale.store.ledger_tables import ResultKind
from muscale.store.lineage import Chain
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.measure import Score
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics
from scaling import ScalingFit


def preserve(study: StudyContents, known: Findings, *, average: int = 1) -> Bundle:
    """The bundle of the run promoted last, below the study's directory; written once, later only verified.

    Args:
        known: Results that are computed already.
        average: Number of last checkpoints whose average is written next to the last weights; 1 for none.

    Raises:
        StageError: If no promoted run has finished, its last checkpoint is gone, or its weights do not reproduce its loss.
        BundleError: If the bundle exists and is damaged.
    """
    plan, promotion = _promoted(study)
    return _written_once(study, plan.key, average, lambda: _promoted_run(study, known, plan, promotion))


def preserve_amendment(study: StudyContents, continuation: str, *, average: int = 1) -> Bundle:
    """The bundle of a finished continuation, selected by key or name; as `preserve`.

    Raises:
        StageError: If there is no such continuation, it has not ended, or its last weights are gone.
        BundleError: If its bundle exists and is damaged.
    """
    key, started = find_amendment(continuation, study.ledger)
    result = study.ledger.result(ResultKind.AMENDMENT, key)
    if started is None or result is None:
        state = "has not ended yet" if started else "does not exist"
        raise StageError(
            f"bundle: --continuation must be a finished continuation of this study; {continuation!r} {state}"
        )
    return _written_once(study, key, average, lambda: _amended_run(study, started, Amended.from_dict(result)))


def _written_once(study: StudyContents, key: str, average: int, gather: Callable[[], FinishedRun]) -> Bundle:
    path = study.directory / BUNDLES / (key if average == 1 else f"{key}-average-{average}")
    with lease(study.ledger, full_run_lease(key)):
        return Bundle.open(path) if path.exists() else write_bundle(gather(), path, average=average)


def _promoted_run(study: StudyContents, known: Findings, plan: Plan, promotion: Promotion) -> FinishedRun:
    corpus = study.corpus
    if corpus is None:
        raise StageError(
            f"bundle: the study's corpus is gone from {study.directory}; run `muscale check` to write it again"
        )
    chain, lineage = _chain_of(study, plan, corpus), _lineage(study, known, plan, promotion)
    return FinishedRun(
        chain=chain,
        directory=study.directory / FULL_RUNS / plan.key,
        corpus=corpus,
        n_tokens=plan.n_tokens,
        loss=promotion.loss,
        outcome=(FORECAST, {**promotion.to_dict(), "outside_support": list(plan.forecast.reasons)}),
        facts={"plan": plan.key, "finished_at": promotion.finished_at},
        card=partial(
            model_card,
            name=study.config.name,
            plan=plan,
            promotion=promotion,
            numerics=chain.numerics,
            corpus=corpus,
            lineage=lineage,
            scores=_scores(study, plan.key, plan.n_tokens),
        ),
        config=study.config.to_dict(),
        lineage=lineage,
        runs=study.ledger.runs(),
    )


def _amended_run(study: StudyContents, started: dict[str, Any], done: Amended) -> FinishedRun:
    numerics, corpus = Numerics.from_dict(started["numerics"]), Corpus.open(study.directory / started["folder"])
    n_tokens = done.lineage[-1].position + done.n_tokens
    registered = study.ledger.forecast(done.lineage[0].run)
    return FinishedRun(
        chain=Chain(numerics=numerics, segments=tuple(map(Segment.from_dict, started["segments"]))),
        directory=study.directory / FULL_RUNS / done.key,
        corpus=corpus,
        n_tokens=n_tokens,
        loss=done.after.own,
        outcome=(CONTINUED, done.to_dict()),
        facts={"continuation": done.key, "finished_at": done.finished_at},
        card=partial(
            continuation_card,
            study=study.config.name,
            done=done,
            numerics=numerics,
            corpus=corpus,
            n_tokens=n_tokens,
            scores=_scores(study, done.key, done.n_tokens),
        ),
        config=study.config.to_dict(),
        lineage={"segments": plain(done.lineage), "plan": registered and registered["payload"]},
        runs=study.ledger.runs(),
        position=done.lineage[-1].position,
    )


def _scores(study: StudyContents, run: str, tokens: int) -> list[Score]:
    """Scores of a run's last weights, without those of the held-out text, which every evaluation has."""
    last = [one for one in evaluated_checkpoints(study.ledger) if (one.run, one.tokens) == (run, tokens)]
    scores = {(score.measure, score.name, score.metric): score for one in last for score in one.scores}
    return [score for score in scores.values() if score.measure != LOSS[0]]


def _promoted(study: StudyContents) -> tuple[Plan, Promotion]:
    found = study.ledger.latest_result(ResultKind.PROMOTION)
    promotion = recorded_promotion(study.ledger, found["key"]) if found else None
    if promotion is None:
        raise StageError("bundle: no promoted run has finished yet; run `muscale promote` first")
    forecast = study.ledger.forecast(promotion.plan)
    if forecast is None:
        raise StageError(f"bundle: the ledger has no plan {promotion.plan}, though its run was promoted")
    return Plan.of_row(forecast), promotion


def _chain_of(study: StudyContents, plan: Plan, corpus: Corpus) -> Chain:
    """The run's chain with the numerics of that time, since settings of the study may have changed."""
    runs = study.ledger.runs()
    own = runs[(runs["purpose"] == "full") & (runs["label"] == f"plan {plan.key}")]
    chain = plan.chain(study.config.shared_numerics(corpus, study.directory))
    return replace(chain, numerics=Numerics.from_dict(own["numerics"].iloc[-1])) if len(own) else chain


def _lineage(study: StudyContents, known: Findings, plan: Plan, promotion: Promotion) -> dict[str, Any]:
    """Every stage as the ledger has it now, with caveats where the plan was made from something else."""
    check, found = study.coordinate_check, findings(study, known)
    stages: dict[str, Any] = {"check": check and check.to_dict(), "transfer": None, "sweep": None, "fit": None}
    caveats: list[str] = []
    if found.transfer:
        stages["transfer"] = found.transfer.to_dict()
        if (now := found.transfer.of_axes(()).verdict) != promotion.verdict:
            caveats.append(f"the transfer check was repeated after the run was started: {now!r}")
    if found.sweep:
        stages["sweep"] = found.sweep.to_dict()
    if found.fit:
        stages["fit"] = _fit_of(found.fit, plan, caveats)
    missing = [name for name, found in stages.items() if found is None]
    if missing:
        caveats.append(f"no longer known: {', '.join(missing)}; runs were added or settings changed since")
    return {**stages, "plan": plan.to_dict(), "promotion": promotion.to_dict(), "caveats": caveats}


def _fit_of(fit: ScalingFit, plan: Plan, caveats: list[str]) -> dict[str, Any]:
    registered, columns = plan.forecast, law_columns(fit, plan.model)
    again = fit.forecast(registered.n_params, registered.n_tokens, level=registered.level, **columns)
    if abs(again.loss / registered.loss - 1) > 1e-9:
        caveats.append(
            f"the fit has changed since the plan: it now forecasts {again.loss:.6f}, not {registered.loss:.6f}"
        )
    return fit.to_dict()
