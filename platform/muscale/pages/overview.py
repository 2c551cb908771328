"""Summary of a study, read from the ledger: nothing is fitted or trained."""

from __future__ import annotations

from collections.abc import Iterator

from muscale.findings import StudyContents
from muscale.pages.study_cost import PURPOSES
from muscale.store.ledger_tables import ResultKind
from scaling.presentation import lines


def overview(study: StudyContents) -> str:
    """Return the study's directory, the runs of each stage, the latest registered forecast and the measured loss."""
    return lines(dict(_rows(study)))


def _rows(study: StudyContents) -> Iterator[tuple[str, str]]:
    yield "study", f"{study.config.name}, in {study.directory}"
    runs, check = study.ledger.least_losses(), study.coordinate_check
    yield "check", ("passed" if check.passed else "failed") if check else "not yet"
    for purpose, name in PURPOSES.items():
        if purpose in runs:
            n, best = runs[purpose]  # NaN if all diverged
            yield (
                name,
                f"{n} finished" + (f", lowest loss {best:.4f} {study.config.model.loss_unit}" if best == best else ""),
            )
    forecast = study.ledger.latest_forecast()
    if forecast is None:
        yield "forecast", "not yet"
        return
    yield (
        "forecast",
        f"{forecast['loss']:.4f}, {forecast['level']:.0%} interval [{forecast['low']:.4f}, {forecast['high']:.4f}], "
        f"registered {forecast['registered_at']:.16}",
    )
    promotion = study.ledger.result(ResultKind.PROMOTION, forecast["plan"])
    if promotion is None:
        yield "measured", "not yet"
        return
    place = "inside" if promotion["low"] <= promotion["loss"] <= promotion["high"] else "OUTSIDE"
    yield "measured", f"{promotion['loss']:.4f}, {place} the interval"
