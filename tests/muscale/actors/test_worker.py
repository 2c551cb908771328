"""A worker trains nothing that the ledger knows, continues from the nearest state, and reports divergence as a result."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from muscale.actors.worker import Worker
from muscale.environment import device_name
from muscale.layout import CORPUS, CURVES, LEDGER
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus_writing import write_corpus, write_mixture
from proxy_models.data.mixture import Mixture
from proxy_models.data.sources import Source
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, branch, chain, stem
from proxy_models.training.numerics import Numerics
from tests.muscale.fake_gpus import H100

BATCH = 128


@pytest.fixture
def numerics(worker: Worker) -> Numerics:
    model = ModelConfig(d_model=16, n_layers=1, context_length=32)
    return Numerics(model=model, base=model, corpus_key=worker.trainer.corpus.key, seed=0, evaluation_tokens=512)


def run(numerics: Numerics, stable: int, *, learning_rate: float = 0.01) -> Chain:
    recipe = Hyperparameters(learning_rate=learning_rate, batch_tokens=BATCH).resolve(40 * BATCH)
    return Chain(numerics=numerics, segments=branch(recipe, stable * BATCH, (stable + 4) * BATCH))


def test_what_is_known_is_not_trained_again(worker: Worker, numerics: Numerics) -> None:
    first = worker.reach(run(numerics, 20))
    rows = [worker.ledger.segment(run(numerics, 20).key)]
    assert worker.reach(run(numerics, 20)) == first
    assert rows == [worker.ledger.segment(run(numerics, 20).key)]


def test_a_longer_run_continues_the_shorter_one_s_stem_and_equals_an_uninterrupted_one(
    worker: Worker, numerics: Numerics, make_study: Callable[..., Path]
) -> None:
    worker.reach(run(numerics, 10))
    longer = run(numerics, 20)
    outcome = worker.reach(longer)
    parent = longer.parent
    assert parent is not None
    row = worker.ledger.segment(parent.key)
    assert row is not None
    assert row["trained_from"] == 10 * BATCH
    directory = make_study("undisturbed").parent
    write_corpus(directory / CORPUS, str(directory / "text"))
    undisturbed = Worker(Ledger(directory / LEDGER), compiled=False).reach(longer)
    assert replace(undisturbed, seconds=outcome.seconds) == outcome


def test_a_worker_without_the_device_that_it_is_to_train_on_does_not_start(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device cuda: torch .* sees 0 CUDA devices here"):
        Worker(worker.ledger, compiled=False, device="cuda")


@pytest.mark.parametrize(("share", "taken"), [(0.5, [(0.5, "cuda:0")]), (1.0, [])])
def test_a_worker_on_a_part_of_a_gpu_may_allocate_that_share_of_its_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, share: float, taken: list[Any]
) -> None:
    limits: list[Any] = []
    gpus: dict[str, Any] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda _device: H100,
        "set_per_process_memory_fraction": lambda share, device: limits.append((share, str(device))),
    }
    for name, planted in gpus.items():
        monkeypatch.setattr(torch.cuda, name, planted)
    Worker(worker.ledger, compiled=False, device="cuda", device_share=share)
    assert limits == taken


def test_a_stem_may_end_within_the_averaged_part_of_a_longer_one(worker: Worker, numerics: Numerics) -> None:
    for stable in (18, 20):
        assert worker.reach(run(numerics, stable)).loss is not None
    alone = worker.trainer.train(numerics, run(numerics, 20).segments[0], averaged=True)
    parent = run(numerics, 20).parent
    assert parent is not None
    row = worker.ledger.segment(parent.key)
    assert row is not None
    assert (row["trained_from"], row["averaged_loss"]) == (0, alone.averaged_loss)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_device_that_trained_is_recorded(worker: Worker, numerics: Numerics, device: str) -> None:
    Worker(worker.ledger, compiled=False, device=device).reach(run(numerics, 4))
    row = worker.ledger.segment(run(numerics, 4).key)
    assert row is not None
    assert row["environment"]["device"] == (
        device_name(torch.device("cpu")) if device == "cpu" else torch.cuda.get_device_name()
    )


def test_a_pruned_state_is_trained_again_to_the_same_loss(worker: Worker, numerics: Numerics) -> None:
    chain = run(numerics, 20)
    parent = chain.parent
    assert parent is not None
    worker.reach(parent)
    row = worker.ledger.segment(parent.key)
    assert row is not None
    (worker.directory / row["state"]).unlink()
    worker.ledger.forget_states([parent.key])
    assert worker.reach(chain).loss is not None
    assert worker.ledger.segment(parent.key) == {**row, "state": None}
    (again,) = worker.ledger.retrained()
    assert (again["key"], again["tokens"]) == (parent.key, parent.last.end)
    assert again["seconds"] > 0


def test_a_cycle_continues_from_the_kept_end_of_the_one_before_it(worker: Worker, numerics: Numerics) -> None:
    values = Hyperparameters(
        learning_rate=0.01, batch_tokens=BATCH, schedule="cosine_cycles", batch_doublings=1, batch_ramp_tokens=BATCH
    )
    cycles = Chain(numerics=numerics, segments=chain(values, 20 * BATCH))
    assert cycles.anneals
    assert cycles.parent is not None
    assert cycles.parent.anneals
    assert worker.reach(cycles).loss is not None
    first, second = (worker.ledger.segment(part.key) for part in (cycles.parent, cycles))
    assert first is not None
    assert second is not None
    assert first["state"]
    assert second["state"] is None
    assert second["trained_from"] == 10 * BATCH
    curve = pd.read_parquet(worker.directory / CURVES / f"{cycles.parent.key}.parquet")
    assert curve["tokens"].tolist() == [BATCH // 2, *(BATCH * n for n in range(1, 11))]
    nats_per_bit_per_byte = math.log(2) * (worker.trainer.corpus.bytes_per_token or math.nan)
    assert curve["train_bits_per_byte"].to_numpy() == pytest.approx(
        curve["train_loss"].to_numpy() / nats_per_bit_per_byte
    )


@pytest.mark.parametrize("fraction", [0.5, 0.75, 0.9])
def test_a_run_goes_over_a_swap_of_the_optimizer(worker: Worker, numerics: Numerics, fraction: float) -> None:
    values = Hyperparameters(
        learning_rate=0.01,
        batch_tokens=BATCH,
        swap_optimizer="lion",
        swap_fraction=fraction,
        swap_learning_rate=0.001,
    )
    swapped = Chain(numerics=numerics, segments=chain(values, 40 * BATCH))
    assert swapped.anneals
    assert worker.reach(swapped).loss is not None
    rows = [worker.ledger.segment(Chain(numerics=numerics, segments=swapped.segments[: n + 1]).key) for n in range(3)]
    assert [row["segment"]["recipe"]["optimizer"] for row in rows if row] == [
        s.recipe.optimizer for s in swapped.segments
    ]
    assert [Segment.from_dict(row["segment"]) for row in rows if row] == list(swapped.segments)


def test_the_losses_of_a_mixture_s_sources_are_recorded(
    worker: Worker, numerics: Numerics, make_study: Callable[..., Path]
) -> None:
    worker.reach(run(numerics, 5))
    alone = worker.ledger.segment(run(numerics, 5).key)
    assert alone is not None
    assert alone["source_losses"] == {}
    directory = make_study("mixed").parent
    (directory / "digits").mkdir()
    for number in range(40):
        (directory / "digits" / f"{number}.txt").write_text(" ".join(str(number * n) for n in range(200)))
    sources = {name: Source(path=str(directory / name)) for name in ("text", "digits")}
    mixed = write_mixture(directory / CORPUS, sources, Mixture.constant({"text": 0.5, "digits": 0.5}))
    chain = run(replace(numerics, corpus_key=mixed.key), 5)
    other = Worker(Ledger(directory / LEDGER), compiled=False)
    other.reach(chain)
    row = other.ledger.segment(chain.key)
    assert row is not None
    assert row["source_losses"].keys() == {"text", "digits"}
    assert row["loss"] == pytest.approx(sum(row["source_losses"].values()) / 2)


def test_a_divergence_is_a_result_of_the_run_and_of_every_longer_one(worker: Worker, numerics: Numerics) -> None:
    short = worker.reach(run(numerics, 10, learning_rate=1e30))
    assert short.diverged
    assert short.loss is None
    assert "loss is" in str(short.diverged_because)
    assert worker.reach(run(numerics, 20, learning_rate=1e30)).diverged


def test_keys_differ_exactly_where_trainings_do(numerics: Numerics) -> None:
    chain = run(numerics, 20)
    assert chain.key == run(numerics, 20).key
    assert chain.stem == run(numerics, 10).stem
    assert chain.key != run(numerics, 10).key
    assert chain.key != run(replace(numerics, seed=1), 20).key
    assert chain.key != run(numerics, 20, learning_rate=0.02).key
    recipe = chain.last.recipe
    assert Chain(numerics=numerics, segments=(stem(recipe, 20 * BATCH),)).key == chain.parent.key  # type: ignore[union-attr]


def test_a_chain_has_no_gaps(numerics: Numerics) -> None:
    with pytest.raises(ValueError, match="starts at 0"):
        Chain(numerics=numerics, segments=run(numerics, 20).segments[1:])
