"""What a study has spent is counted once, at the first purpose that wanted it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StudyConfig
from muscale.actors.jobs import Job
from muscale.pages.study_cost import draw_spending, format_spending, spending
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import runs, segments
from muscale.store.lineage import Chain
from proxy_models.recipes.segments import chain
from tests.muscale.planted_ladder import numerics_of

MakeStudy = Callable[..., Path]


def test_what_two_purposes_share_is_the_first_one_s_and_stopped_trials_are_the_sweep_s(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study())
    ledger, h, numerics = (
        Ledger(make_study("ledger").parent / "ledger.sqlite"),
        config.hyperparameters,
        numerics_of(config),
    )
    assert spending(ledger).empty
    whole = Chain(numerics=numerics, segments=chain(h, 64 * h.batch_tokens))
    full = Chain(numerics=numerics, segments=chain(h, 1024 * h.batch_tokens))
    assert whole.parent is not None
    assert full.parent is not None
    stopped = Chain(numerics=numerics, segments=chain(h, 32 * h.batch_tokens)).parent
    assert stopped is not None
    for number, part in enumerate((whole.parent, whole, full.parent, full, stopped)):
        start = part.parent.last.end if part.parent else 0
        ledger.insert(
            segments,
            **part.row(),
            trained_from=start,
            loss=2.0,
            source_losses={},
            seconds=10.0 + number,
            environment={},
        )
    for purpose, trained in (("ladder", whole), ("sweep", whole), ("full", full)):
        outcome = ledger.outcome(trained)
        assert outcome is not None
        job = Job(purpose=purpose, label="", hyperparameters=h, chain=trained)
        ledger.insert(runs, **job.row(outcome.key))
    table = spending(ledger).set_index("purpose")
    n_params = config.model.n_params
    assert list(table.index) == ["sweep", "full"], "the ladder's only run was paid for by the sweep"
    assert table.loc["sweep", "n_tokens"] == whole.last.end + stopped.last.end
    assert table.loc["sweep", "seconds"] == 10 + 11 + 14
    assert table.loc["full", "compute_flops"] == pytest.approx(6.0 * n_params * full.last.end)
    assert table.loc["sweep", "of_full_run"] == pytest.approx((whole.last.end + stopped.last.end) / full.last.end)
    text = format_spending(table.reset_index())
    assert text is not None
    assert f"{table.loc['sweep', 'of_full_run']:.3g} times the full run's" in text
    figure = draw_spending(table.reset_index())
    assert [bar.name for bar in figure.data] == ["sweep", "full"]
    assert [sum(bar.x[place] for bar in figure.data) for place in (0, 1)] == pytest.approx([100, 100])
