"""Bundle of a promoted run, gathered from the study; trains nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from muscale.bundles.bundle import Bundle
from muscale.bundles.bundle_writing import FinishedRun, write_bundle
from muscale.errors import StageError
from muscale.findings import Findings, StudyContents, findings
from muscale.full_runs.promote.promotion import Promotion, recorded_promotion
from muscale.layout import BUNDLES, FULL_RUNS
from muscale.plans.planning import Plan
from muscale.store.lineage import Chain
from muscale.store.tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.training.numerics import Numerics
from scaling import Forecast, ScalingFit


def preserve(study: StudyContents, known: Findings, *, average: int = 1) -> Bundle:
    """The bundle of the run promoted last, below the study's directory; written once, later only verified.

    Args:
        study: Whose run it is.
        known: Results that are worked out already.
        average: Write the average of so many last checkpoints beside the last weights; 1 for none.

    Raises:
        StageError: If no run was promoted to its end, its last checkpoint is gone, or its weights do not give its loss.
        BundleError: If there is a bundle already, and it is damaged.
    """
    plan, promotion = _promoted(study)
    name = plan.key if average == 1 else f"{plan.key}-average-{average}"
    path = study.directory / BUNDLES / name
    if path.exists():
        return Bundle.open(path)
    corpus = study.corpus
    if corpus is None:
        raise StageError(
            f"bundle: the study's corpus is gone from {study.directory}; run `muscale check` to write it again"
        )
    run = FinishedRun(
        name=study.config.name,
        plan=plan,
        promotion=promotion,
        chain=_chain_of(study, plan, corpus),
        directory=study.directory / FULL_RUNS / plan.key,
        corpus=corpus,
        config=study.config.to_dict(),
        lineage=_lineage(study, known, plan, promotion),
        runs=study.ledger.runs(),
    )
    return write_bundle(run, path, average=average)


def _promoted(study: StudyContents) -> tuple[Plan, Promotion]:
    found = study.ledger.latest_result(ResultKind.PROMOTION)
    promotion = recorded_promotion(study.ledger, found["key"]) if found else None
    if promotion is None:
        raise StageError("bundle: no run was promoted to its end yet; run `muscale promote` first")
    forecast = study.ledger.forecast(promotion.plan)
    if forecast is None:
        raise StageError(f"bundle: the ledger has no plan {promotion.plan}, though its run was promoted")
    return Plan.of_row(forecast), promotion


def _chain_of(study: StudyContents, plan: Plan, corpus: Corpus) -> Chain:
    """The run's chain with its numerics at the time, as settings of the study may have changed since."""
    runs = study.ledger.runs()
    own = runs[(runs["purpose"] == "full") & (runs["label"] == f"plan {plan.key}")]
    chain = plan.chain(study.config.shared_numerics(corpus))
    return replace(chain, numerics=Numerics.from_dict(own["numerics"].iloc[-1])) if len(own) else chain


def _lineage(study: StudyContents, known: Findings, plan: Plan, promotion: Promotion) -> dict[str, Any]:
    """Every stage as the ledger has it now, with caveats where that is not what the plan was made from."""
    recorded = {str(kind): study.ledger.latest_result(kind) for kind in (ResultKind.CHECK, ResultKind.TRANSFER)}
    stages: dict[str, Any] = {name: found and found["payload"] for name, found in recorded.items()}
    stages |= {"sweep": None, "fit": None}
    caveats: list[str] = []
    if stages["transfer"] and stages["transfer"]["verdict"] != promotion.verdict:
        caveats.append(f"the transfer check was repeated after the run was started: {stages['transfer']['verdict']!r}")
    found = findings(study, known)
    if found.sweep:
        stages["sweep"] = found.sweep.to_dict()
    if found.fit:
        stages["fit"] = _fit_of(found.fit, plan.forecast, caveats)
    missing = [name for name, found in stages.items() if found is None]
    if missing:
        caveats.append(f"no longer known: {', '.join(missing)}; runs were added or settings changed since")
    return {**stages, "plan": plan.to_dict(), "promotion": promotion.to_dict(), "caveats": caveats}


def _fit_of(fit: ScalingFit, registered: Forecast, caveats: list[str]) -> dict[str, Any]:
    again = fit.forecast(registered.n_params, registered.n_tokens, level=registered.level)
    if abs(again.loss / registered.loss - 1) > 1e-9:
        caveats.append(
            f"the fit has changed since the plan: it forecasts {again.loss:.6f}, registered was {registered.loss:.6f}"
        )
    return fit.to_dict()
