"""A training state that was torn or in which a bit flipped is noticed, reported by name, and trained again to the recorded loss."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from muscale.actors.worker import Worker
from muscale.layout import LEDGER, STATES
from muscale.store.ledger import Ledger
from proxy_models.training.state import StateError, TrainState
from tests.faults.damage import flip, flip_the_middle, tear
from tests.faults.lean import chains, losses, rows


def same(one: TrainState, other: TrainState) -> bool:
    return (one.tokens, one.tensors.keys()) == (other.tokens, other.tensors.keys()) and all(
        torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors
    )


def test_no_flipped_bit_of_a_state_goes_unnoticed_unless_nothing_hangs_on_it(study: Path) -> None:
    path = sorted((study / STATES).glob("*.pt"))[0]
    whole, state, chance, counts = path.read_bytes(), TrainState.load(path), random.Random(0), Counter[str]()
    for _ in range(150):
        flip(path, chance.randrange(len(whole)), chance.randrange(8))
        try:
            counts["harmless" if same(TrainState.load(path), state) else "altered"] += 1
        except StateError:
            counts["noticed"] += 1
        path.write_bytes(whole)
    assert counts["altered"] == 0, counts
    assert counts["noticed"] > 100, counts
    with pytest.raises(FileNotFoundError):
        TrainState.load(study / "none.pt")


@pytest.mark.parametrize("damage", [tear, flip_the_middle])
def test_a_damaged_state_is_reported_and_trained_again_to_the_recorded_loss(
    study: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected, before = losses(study / LEDGER), rows(study / LEDGER)
    chain = chains(study)[1]
    assert chain.parent
    ledger = Ledger(study / LEDGER)
    with sqlite3.connect(study / LEDGER) as connection:  # the branch was never trained
        connection.execute("DELETE FROM segments WHERE key = ?", (chain.key,))
    damaged = study / STATES / f"{chain.parent.key}.pt"
    damage(damaged)
    outcome = Worker(ledger, compiled=False).reach(chain)
    assert outcome.loss == expected[chain.key]
    assert any(str(damaged) in message and "continuing without it" in message for message in caplog.messages)
    (again,) = ledger.retrained()
    assert again["key"] == chain.parent.key
    assert before["segments"] - rows(study / LEDGER)["segments"], "but for the row that was taken out"
    assert losses(study / LEDGER) == expected
