"""A worker imports the family that it trains and no other; readers of the ledger import none."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muscale.actors.worker import Worker
from muscale.pages.study_cost import spending
from muscale.store.lineage import Chain
from proxy_models.architecture.families import load
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import branch
from proxy_models.training.numerics import Numerics
from tests.proxy_models import families

MODULE = "planted_family"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's, on the path and not imported."""
    file = tmp_path / f"{MODULE}.py"
    file.write_text(inspect.getsource(families))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield file
    forget()


def forget() -> None:
    """The state of a process that did not import the family."""
    sys.modules.pop(MODULE, None)


@pytest.fixture
def chain(worker: Worker, file: Path) -> Chain:
    base = load(f"{MODULE}:Recurrent")(vocab_size=256, context_length=32).member(16, 1)
    numerics = Numerics(model=base, base=base, corpus_key=worker.trainer.corpus.key, seed=0, evaluation_tokens=512)
    forget()
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=128).resolve(40 * 128)
    return Chain(numerics=numerics, segments=branch(recipe, 8 * 128, 10 * 128))


def test_a_worker_imports_what_it_trains_and_readers_nothing(worker: Worker, chain: Chain) -> None:
    outcome = worker.reach(chain)
    assert outcome.loss is not None
    assert MODULE in sys.modules
    forget()
    row = worker.ledger.segment(chain.key)
    assert row is not None
    again = Numerics.from_dict(json.loads(json.dumps(row["numerics"])))
    assert again == chain.numerics
    assert again.model.n_params == chain.numerics.model.n_params > 0
    assert worker.reach(chain) == outcome
    assert spending(worker.ledger)["compute_flops"].sum() == pytest.approx(chain.compute_flops)
    assert MODULE not in sys.modules


def test_a_worker_with_another_source_refuses(worker: Worker, chain: Chain, file: Path) -> None:
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ValueError, match=rf"{MODULE}:Recurrent is '.*'.*'.*'"):
        worker.reach(chain)


def test_a_worker_without_the_module_refuses(worker: Worker, chain: Chain, file: Path) -> None:
    file.unlink()
    with pytest.raises(ValueError, match=rf"{MODULE} can't be imported"):
        worker.reach(chain)
