"""A dry run holds a plan against the corpus, the devices and the disk that are there, and writes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from muscale import Plan, StageError, StudyConfig
from muscale.full_runs.promote.dry_run import DryRun, dry_run
from muscale.full_runs.promote.planned_worker import PlannedWorker
from muscale.plans.gate import context_line
from muscale.plans.layouts import with_layout
from muscale.plans.planning import Planner
from muscale.settings.space_rules import model_errors
from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.decoder_memory import training_memory
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member, StepSizes
from proxy_models.architecture.memory import MemoryEstimate
from proxy_models.architecture.pipeline_counts import PipelineShare
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.training.numerics import Numerics
from scaling import Verdict, fit_transfer
from tests.muscale.planted import planted_check, planted_fit, planted_horizon
from tests.proxy_models.families import Network, Recurrent

UNSETTLED = Verdict(transfers=(), n_tokens=16384.0, horizons=(), missing={"rate along width": "planted: no grid"})
Look = Callable[..., DryRun]


@pytest.fixture
def look(make_study: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Look:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    path = make_study()
    directory = path.parent
    corpus: Corpus = write_corpus(directory / "corpus", str(directory / "text"))
    law, horizon = planted_fit(), planted_horizon()

    def made(
        *overrides: str,
        model: Member | None = None,
        check: CoordinateCheck | None = None,
        verdict: Verdict = UNSETTLED,
    ) -> DryRun:
        config = StudyConfig.read(path, overrides)
        config = config.model_copy(update={"model": model or config.model})
        plan: Plan = Planner(config, config.hyperparameters, horizon, law, corpus=corpus, winner=0).plan()
        before = sorted(directory.rglob("*"))
        found = dry_run(
            plan,
            with_layout(plan, config, corpus),
            corpus,
            check=check,
            leaks=None,
            verdict=verdict,
            directory=directory,
        )
        assert sorted(directory.rglob("*")) == before
        return found

    return made


def statuses(found: DryRun) -> dict[str, str]:
    return {line.name: line.status for line in found.gate.lines}


def test_it_shows_the_gate_the_memory_of_a_worker_and_what_would_be_launched(look: Look) -> None:
    found = look("promote.workers=4")
    assert statuses(found) == {
        "transfer": "failed",
        "coordinate check": "unknown",
        "forecast": "passed",
        "data": "passed",
        "leaks": "unknown",
        "hyperparameters": "passed",
        "batch": "passed",
        "by law": "passed",
        "memory": "passed",
        "evaluation": "passed",
        "layout": "passed",
        "precision": "passed",
        "context": "passed",
        "cadence": "passed",
        "disk": "passed",
    }
    assert not found.passed
    expected = training_memory(as_decoder(found.plan.model), micro_batch=2, sharding="full", world_size=4)
    assert found.memory == expected
    capped = look("promote.workers=4", "promote.micro_batch=64")
    assert (capped.launch.micro_batch, capped.memory) == (2, expected), "a pass has at most the worker's share"
    launch = found.launch
    assert (launch.workers, launch.micro_batch, launch.resumed_from) == (4, 2, 0)
    assert launch.n_steps == found.plan.n_tokens // 256
    assert launch.checkpoint_bytes == 3 * 4 * found.plan.model.n_params_total, "weights and two moments in fp32"
    assert json.loads(json.dumps(found.to_dict()))["launch"] == asdict(launch)
    for text in (
        "gate CLOSED",
        "for 3 checkpoints",
        "every 20,480 tokens",
        "launch: 4 workers with 1 CPU each on this machine",
    ):
        assert text in str(found)


@pytest.mark.parametrize(
    ("kind", "widest", "warns"), [("tied matrix", 12, True), ("tied matrix", 16, False), ("readout matrix", 12, False)]
)
def test_a_tied_table_far_beyond_the_widest_grid_is_warned_of(look: Look, kind: str, widest: int, warns: bool) -> None:
    grid = [(width, octave) for width in (4, 8, 16) for octave in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    flat = fit_transfer(
        pd.DataFrame([{"width": w, "rate": 2.0 ** (x - 7), "loss": 2 + 0.02 * x**2 - w / 1e3} for w, x in grid])
    )
    passing = Verdict(transfers=(flat,), n_tokens=16384.0, horizons=(16384.0,), missing={})
    planted = planted_check()
    check = replace(planted, measurements=planted.measurements.assign(kind=kind))
    found = look("model.head_dim=4", f"transfer.widths=[4, 8, {widest}]", check=check, verdict=passing)
    line = found.gate.lines[0]
    assert (line.name, line.status) == ("transfer", "passed")
    assert found.plan.model.d_model == 32
    assert bool(line.advice) == warns


def test_a_checkpoint_that_stands_there_is_gone_on_from(look: Look) -> None:
    first = look()
    checkpoint = Path(first.launch.directory) / "checkpoints" / "tokens=20480"
    checkpoint.mkdir(parents=True)
    (checkpoint / "shard").write_bytes(bytes(100))
    again = look()
    assert again.launch.resumed_from == 20480
    assert "20,480 tokens" in str(again.launch).splitlines()[1]


def test_a_gpu_that_nobody_named_is_unknown_and_a_named_one_is_held_to_its_memory(look: Look) -> None:
    named = look("resources.gpus_per_worker=1.0", 'plan.accelerator="H200"')
    found = statuses(named)
    assert found["memory"] == found["evaluation"] == found["attention"] == found["communication"] == "passed"
    assert "fastest predicted layout: sharding = " in str(named.launch)
    assert "with 1 CPU and 1 GPU each on H200" in str(named.launch)
    shared = look("resources.gpus_per_worker=1.0", 'plan.accelerator="H200"', "promote.context_parallel=2")
    assert next(line for line in shared.gate.lines if line.name == "attention").compared.startswith("the flex kernel")
    assert "communication" not in statuses(look()), "between processes on a CPU nothing is predicted"
    assert statuses(look("resources.gpus_per_worker=1.0"))["communication"] == "unknown"
    seen = statuses(look("resources.gpus_per_worker=1.0"))["memory"]
    assert seen == ("passed" if torch.cuda.is_available() else "unknown")


def test_the_workers_share_the_batch_of_the_full_run_not_that_of_its_proxies(look: Look) -> None:
    assert statuses(look("promote.workers=9"))["layout"] == "failed"  # eight sequences
    assert statuses(look("promote.workers=9", "plan.explicit.batch_tokens=512"))["layout"] == "passed"


def test_the_layout_over_the_workers_counts_in_memory_and_launch(look: Look) -> None:
    found = look("promote.workers=4", "promote.tensor_parallel=2", 'promote.sharding="zero2"', "promote.micro_batch=2")
    assert statuses(found)["layout"] == "passed"
    layout: dict[str, Any] = {"sharding": "zero2", "world_size": 2, "tensor_parallel": 2}
    assert found.memory == training_memory(as_decoder(found.plan.model), micro_batch=2, **layout)
    assert (found.launch.sharding, found.launch.micro_batch) == ("zero2", 2)
    shared = look("promote.workers=4", "promote.context_parallel=2", "promote.micro_batch=2")
    assert statuses(shared)["layout"] == "passed"
    layout = {"sharding": "full", "world_size": 4, "context_parallel": 2}
    assert shared.memory == training_memory(as_decoder(shared.plan.model), micro_batch=2, **layout)
    odd = look("promote.workers=8", "promote.tensor_parallel=8")
    (line,) = [line for line in odd.gate.lines if line.name == "layout"]
    assert line.status == "failed"
    assert "tensor_parallel must divide the 2 query heads" in line.compared


def test_experts_that_workers_share_out_count_in_memory_micro_batch_and_step(look: Look) -> None:
    experts = ("model.head_dim=8", "model.n_experts=4", "model.expert_ratio=1.0", "promote.workers=2")
    on_cpu = look(*experts, "promote.expert_parallel=2", "promote.micro_batch=2")
    model = as_decoder(on_cpu.plan.model)
    layout: dict[str, Any] = {"sharding": "full", "world_size": 2, "expert_parallel": 2}
    assert on_cpu.memory == training_memory(model, micro_batch=2, **layout)
    assert statuses(on_cpu)["memory"] == statuses(on_cpu)["evaluation"] == statuses(on_cpu)["layout"] == "passed"
    on_gpus = ("resources.gpus_per_worker=1.0", 'plan.accelerator="H100 SXM"', *experts)
    shared = look(*on_gpus, "promote.expert_parallel=2")
    assert shared.launch.micro_batch * 2 == shared.plan.hyperparameters.batch_tokens // model.context_length
    assert statuses(shared)["memory"] == statuses(shared)["communication"] == "passed"
    assert "expert_parallel = 2" in shared.launch.proposed, "the stated number"
    alone = look(*on_gpus)
    lines = [next(line for line in one.gate.lines if line.name == "communication") for one in (alone, shared)]
    assert lines[0].compared != lines[1].compared


def test_a_pipeline_counts_in_memory_and_in_the_micro_batch(look: Look) -> None:
    deep = ("model.n_layers=2", "plan.compute_flops=1e11")
    on_gpus = ("resources.gpus_per_worker=1.0", 'plan.accelerator="H100 SXM"', "promote.workers=2", *deep)
    found = look(*on_gpus, "promote.pipeline_parallel=2", 'promote.sharding="zero2"')
    sequences = found.plan.hyperparameters.batch_tokens // found.plan.model.context_length
    assert found.launch.micro_batch == max(1, sequences // 8), (
        "four micro-batches for each worker, if there are as many"
    )
    pipeline = PipelineShare(schedule="1f1b", ranks=2, sequences=sequences)
    state: dict[str, Any] = {"precision": found.plan.precision, "sharding": "zero2", "pipeline": pipeline}
    model = as_decoder(found.plan.model)
    assert found.memory == training_memory(model, micro_batch=found.launch.micro_batch, **state)
    assert statuses(found)["layout"] == statuses(found)["memory"] == statuses(found)["evaluation"] == "passed"
    assert statuses(found)["communication"] == "passed"
    on_cpu = look(*deep, "promote.workers=2", "promote.pipeline_parallel=2")
    assert on_cpu.launch.micro_batch == found.launch.micro_batch
    too_few = look(*deep, "promote.workers=8", "promote.pipeline_parallel=8")
    assert statuses(too_few)["memory"] == "unknown", "the model has fewer blocks"


def test_an_open_layout_is_chosen_by_the_prediction_and_what_is_stated_stays(look: Look) -> None:
    on_gpus = ("resources.gpus_per_worker=1.0", 'plan.accelerator="H100 SXM"', "promote.workers=4")
    every = ("promote.sharding=auto", "promote.tensor_parallel=auto", "promote.activation_checkpointing=auto")
    chosen = look(*on_gpus, *every)
    assert chosen.launch.sharding in ("none", "zero2"), "the model is tiny"
    assert f'sharding = "{chosen.launch.sharding}"' in chosen.launch.proposed
    stated = look(*on_gpus, *every[:2], "promote.activation_checkpointing=full")
    full: dict[str, Any] = {
        "micro_batch": stated.launch.micro_batch,
        "precision": stated.plan.precision,
        "sharding": stated.launch.sharding,
        "checkpointing": "full",
    }
    layouts: list[dict[str, Any]] = [{"tensor_parallel": tensor, "world_size": 4 // tensor} for tensor in (1, 2)]
    assert stated.memory in [training_memory(as_decoder(stated.plan.model), **full, **layout) for layout in layouts]


def test_a_family_of_ones_own_is_planned_by_its_members_and_its_memory_is_traced(look: Look) -> None:
    base = Recurrent(vocab_size=256, context_length=32).member(32, 2)
    on_gpus = ("resources.gpus_per_worker=1.0", 'plan.accelerator="H100 SXM"')
    found = look(*on_gpus, model=base)
    assert found.plan.precision == "bf16"
    plan = found.plan
    assert plan.model == ModelFamily(base=base).for_params(plan.n_params)
    assert [plan.model.n_layers, plan.model.d_model % Recurrent.width_step] == [2, 0]
    assert abs(math.log(plan.n_params / plan.wanted_n_params)) < 0.2
    known = statuses(found)
    assert {name for name, status in known.items() if status == "unknown"} == {
        "coordinate check",
        "leaks",
        "communication",
    }
    assert (known["layout"], known["context"]) == ("passed", "passed")
    assert "attention" not in known
    assert found.memory is not None
    assert found.memory.parameters == 4 * plan.model.n_params_total // found.launch.workers
    assert found.memory.activations > 0
    assert found.launch.checkpoint_bytes == 3 * 4 * plan.model.n_params_total, "weights and two moments in fp32"
    assert Plan.from_dict(json.loads(json.dumps(found.to_dict()["plan"]))) == plan
    proxies = Numerics(model=base, base=base, corpus_key="", seed=0, evaluation_tokens=1024)
    assert plan.chain(proxies).numerics.base == base
    with pytest.raises(StageError, match=r"promote.sharding: "):
        look(*on_gpus, "promote.sharding=auto", model=base)


MEMORY = MemoryEstimate(parameters=1, gathered=2, gradients=3, optimizer=4, reduced=5, activations=6)


@dataclass(frozen=True, kw_only=True)
class Answering(Recurrent):
    """Networks with a tied table, whose family answers what the application asks."""

    base: float = 1e4

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        network.head.weight = network.symbols.weight
        return network

    @property
    def position_base(self) -> float:
        return self.base

    def training_memory(self, member: Member, **conditions: Any) -> MemoryEstimate:
        return replace(MEMORY, activations=conditions["micro_batch"])

    def evaluation_memory(self, member: Member, sequences: int, *_: Any, **layout: Any) -> int:
        return sequences

    def step_sizes(self, member: Member) -> StepSizes:
        entries = 6 * member.d_model**2
        return StepSizes(block_entries=entries, block_moves=member.d_model, attention_width=0, table_params=0)


def test_a_new_family_s_answers_reach_the_plan_the_gate_and_the_rules_of_the_study_file(
    look: Look, make_study: Callable[..., Path]
) -> None:
    family, other = (Answering(vocab_size=256, context_length=128, base=base) for base in (1e4, 5e5))
    model = family.member(32, 2)
    on_gpus = ("resources.gpus_per_worker=1.0", 'plan.accelerator="H100 SXM"', "promote.workers=2")
    found = look(*on_gpus, "promote.sharding=auto", model=model)
    assert found.memory == replace(MEMORY, activations=found.launch.micro_batch)
    assert found.launch.sharding in ("none", "zero2"), "chosen by the prediction, as the model is tiny"
    assert statuses(found)["communication"] != "unknown"
    worker = PlannedWorker(plan=found.plan, config=StudyConfig.read(make_study("worker"), on_gpus))
    assert worker.evaluation_memory(MEMORY) == worker.evaluation_batch
    assert "500,000" in context_line(other.member(32, 2), model).compared
    assert context_line(model, model).advice == ""
    config = StudyConfig.read(make_study("tied"))
    at_zero = config.model_copy(update={"hyperparameters": replace(config.hyperparameters, zero_readout=True)})
    assert not list(model_errors(at_zero))
    (error,) = model_errors(at_zero.model_copy(update={"model": model}))
    assert error.startswith("hyperparameters.zero_readout: ")


def test_an_open_layout_needs_devices_whose_links_are_known(look: Look) -> None:
    with pytest.raises(
        StageError, match=r'promote.sharding: "auto" needs .*plan.accelerator.*H100 SXM.* got 0 and None'
    ):
        look("promote.sharding=auto")
    with pytest.raises(StageError, match=r"promote.tensor_parallel.*TPU v5e"):
        look("promote.tensor_parallel=auto", "resources.gpus_per_worker=1.0", 'plan.accelerator="TPU v5e"')
