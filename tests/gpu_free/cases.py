"""Steps of full runs on GPUs that are not there: shapes, layouts, and what one rank holds and sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule

from muscale.full_runs.train.sharding import Meshes, build_model, build_pipeline
from muscale.settings.parallelism import Parallelism
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import next_token_loss
from proxy_models.architecture.decoder_memory import StageRank, evaluation_memory, training_memory
from proxy_models.architecture.memory import Checkpointing, MemoryEstimate, Precision
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.architecture.stage_layout import PipelineSchedule
from proxy_models.data.batches import EvaluationSet
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.training import soap
from proxy_models.training.fsdp import between_parts, settle
from proxy_models.training.held_out_passes import source_losses
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import make_optimizer
from proxy_models.training.step import Stepper
from tests.gpu_free.fake_device import fake_gpu
from tests.gpu_free.memory_trace import MemoryTrace
from tests.muscale.collectives import Collectives
from tests.muscale.fake_ranks import fullest_rank, rank_of

NODE = 8
SHAPES = {
    # GPT-3 XL's width and depth (Brown et al., arXiv 2005.14165, table 2.1); Llama 3's (arXiv 2407.21783, table 3).
    "1.3B": ModelConfig(d_model=2048, n_layers=24, head_dim=64, mlp_ratio=2.75, vocab_size=50_304, context_length=2048),
    "8B": ModelConfig(
        d_model=4096,
        n_layers=32,
        head_dim=128,
        queries_per_kv=4,
        mlp_ratio=3.5,
        vocab_size=128_256,
        context_length=8192,
    ),
    "70B": ModelConfig(
        d_model=8192,
        n_layers=80,
        head_dim=128,
        queries_per_kv=8,
        mlp_ratio=3.5,
        vocab_size=128_256,
        context_length=8192,
    ),
    "405B": ModelConfig(
        d_model=16_384,
        n_layers=126,
        head_dim=128,
        queries_per_kv=16,
        mlp_ratio=3.25,
        vocab_size=128_256,
        context_length=8192,
    ),
    # Mixtral's (arXiv 2401.04088, table 1) and DeepSeekMoE 16B's (arXiv 2401.06066, section 5.1), whose first MLP is 10,944 wide.
    "8x7B": ModelConfig(
        d_model=4096,
        n_layers=32,
        head_dim=128,
        queries_per_kv=4,
        mlp_ratio=3.5,
        vocab_size=32_000,
        context_length=8192,
        n_experts=8,
        router_scores="softmax",
    ),
    "64x16B": ModelConfig(
        d_model=2048,
        n_layers=28,
        head_dim=128,
        mlp_ratio=5.34375,
        vocab_size=102_400,
        context_length=4096,
        n_experts=64,
        experts_per_token=6,
        expert_ratio=0.6875,
        n_shared_experts=2,
        first_dense_layers=1,
        router_scores="softmax",
    ),
}
LAYOUTS = {
    "full": Parallelism(),
    "hybrid": Parallelism(sharding="hybrid", shard_ranks=NODE),
    "tensor": Parallelism(tensor_parallel=NODE),
    "context": Parallelism(context_parallel=NODE),
}
EXPERTS = {
    "experts": Parallelism(expert_parallel=NODE),
    "experts, zero2": Parallelism(expert_parallel=NODE, sharding="zero2"),
    "experts, none": Parallelism(expert_parallel=NODE, sharding="none"),
    "experts, hybrid": Parallelism(expert_parallel=NODE, sharding="hybrid", shard_ranks=NODE),
}
"""Layouts of mixtures alone."""
RANKS, STAGES = 4, 8
"""Ranks of a pipeline, and the most stages that they have."""
_PIPELINE = Parallelism(sharding="zero2", tensor_parallel=NODE, pipeline_parallel=RANKS)
_OTHERS: tuple[PipelineSchedule, ...] = (
    "gpipe",
    "looped_bfs",
    "interleaved",
    "zero_bubble",
    "zero_bubble_v",
    "dualpipe_v",
)
PIPELINES: dict[str, Parallelism] = {
    "1f1b": _PIPELINE,
    "1f1b, full": replace(_PIPELINE, sharding="full"),
    "1f1b, context": replace(_PIPELINE, context_parallel=2),
    **{schedule: replace(_PIPELINE, pipeline_schedule=schedule) for schedule in _OTHERS},
}
SEQUENCES = {"1.3B": 8, "8B": 1, "70B": 1, "405B": 1, "8x7B": 1, "64x16B": 2}
"""Sequences of a pass."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of two passes on the first of `ranks` ranks, or of `passes` micro-batches for each rank of a pipeline.

    Attributes:
        layers: Number of blocks besides the first dense ones of a mixture; None: all.
        stage: Rank of the pipeline that is traced.
        passes: With as many micro-batches as ranks, 1, activations reach their peak before there are gradients.
    """

    shape: str
    layout: str
    checkpointing: Checkpointing = "none"
    ranks: int = 64
    layers: int | None = None
    precision: Precision = "bf16"
    optimizer: OptimizerName = "adamw"
    stage: int = 0
    passes: int = 2

    def __str__(self) -> str:
        optimizer = "" if self.optimizer == "adamw" else f", {self.optimizer}"
        return f"{self.shape}, {self.place}, {self.checkpointing}, {self.ranks} ranks{optimizer}"

    @property
    def place(self) -> str:
        """The layout, with the traced rank of a pipeline."""
        once = "" if self.passes > 1 else ", a micro-batch a rank"
        return f"{self.layout} rank {self.stage}{once}" if self.layout in PIPELINES else self.layout

    @property
    def model(self) -> ModelConfig:
        shape = SHAPES[self.shape]
        return replace(shape, n_layers=self.layers + shape.first_dense_layers) if self.layers else shape

    @property
    def parallelism(self) -> Parallelism:
        layout = replace((LAYOUTS | EXPERTS | PIPELINES)[self.layout], checkpointing=self.checkpointing)
        return replace(layout, tensor_parallel=1) if self.model.n_experts else layout  # ranks share no expert

    @property
    def share(self) -> int:
        """Sequences of a rank's share of the batch."""
        return self.passes * self.parallelism.pipeline_parallel * SEQUENCES[self.shape]

    @property
    def estimate(self) -> MemoryEstimate:
        conditions = self._conditions
        if pipeline := conditions.pop("pipeline", None):
            whole = conditions["sharding"] in ("none", "zero2")
            tensor, context = conditions["tensor_parallel"], conditions["context_parallel"]
            of_stages = StageRank.all_of(
                self.model, self.precision, tensor, context, pipeline, shards=conditions["world_size"]
            )
            traced = next(one for one in of_stages if one.rank == self.stage)
            return traced.memory(
                SEQUENCES[self.shape],
                self.optimizer,
                conditions["world_size"] * conditions["tensor_parallel"],
                self.checkpointing,
                compiled=False,
                again=not whole,
            )
        return training_memory(
            self.model,
            micro_batch=SEQUENCES[self.shape],
            precision=self.precision,
            optimizer=self.optimizer,
            **conditions,
        )

    @property
    def evaluation_estimate(self) -> int:
        """Bytes of an evaluation in the run, as the gate has them."""
        layout = {name: value for name, value in self._conditions.items() if name != "checkpointing"}
        return evaluation_memory(self.model, SEQUENCES[self.shape], self.estimate, self.precision, **layout)

    @property
    def _conditions(self) -> dict[str, Any]:
        return self.parallelism.memory_conditions(self.parallelism.grid(self.ranks), self.share)


def traced(
    case: Case, *, order: tuple[str, ...] = ("evaluate", "step", "evaluate")
) -> tuple[int, Counter[tuple[str, torch.dtype, int]], int]:
    """Peak and collectives of a step, and the peak of an evaluation, as a full run takes them in this order; the last of each.

    The step is all passes, clipping and the optimizer, by `Stepper`; an evaluation two passes on each rank, or one of a pipeline.
    """
    model, parallelism, device, size = case.model, case.parallelism, torch.device("cpu"), SEQUENCES[case.shape]
    grid = parallelism.grid(case.ranks)
    shares = grid.replicas * grid.shards
    batch = case.share * shares * model.context_length
    recipe = Hyperparameters(learning_rate=0.01, batch_tokens=batch, optimizer=case.optimizer).resolve(100 * batch)
    numerics = Numerics(model=model, base=model, corpus_key="", seed=0, evaluation_tokens=64, precision=case.precision)
    with rank_of(case.stage * case.ranks // grid.stages, case.ranks):
        meshes = Meshes.of(parallelism, grid, device.type)
        with (
            fake_gpu(),
            patch.object(_PipelineSchedule, "_warmup_p2p", agree),
            patch.object(soap, "_FREQUENCY", 1),  # each step renews eigenbases, which takes the most
            fullest_rank(parallelism.expert_parallel, size * model.context_length * model.experts_per_token),
        ):
            arguments: dict[str, Any] = {"device": device, "meshes": meshes, "initial_values": False}
            pipeline = None
            if case.layout in PIPELINES:
                pipeline = build_pipeline(numerics, recipe, parallelism, micro_batch=size, **arguments)
                built = pipeline.module
            else:
                built = build_model(numerics, recipe, parallelism, **arguments)
            optimizer = make_optimizer(built, numerics.parametrization(recipe.optimizer), recipe)
            stepper = Stepper(
                built,
                optimizer,
                numerics,
                recipe,
                micro_batch=size,
                ranks=shares,
                before_part=lambda last: between_parts(built, parallelism.sharding, last=last),
                pipeline=pipeline,
            )
            for parameter in built.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes its state
            optimizer.zero_grad()
            sequences = torch.zeros(case.share, model.context_length + 1, dtype=torch.int64)
            memory, collectives, peaks = MemoryTrace(), Collectives(), dict[str, int]()
            memory.hold("parameters", built.parameters())
            memory.hold("buffers", built.buffers())
            memory.hold("optimizer", (value for state in optimizer.state.values() for value in state.values()))
            held_out = {"": EvaluationSet(sequences=sequences[:1].expand(2 * size * shares, -1), weight=1.0)}

            def step() -> None:
                with collectives:
                    stepper.step(sequences, number=1, tokens=batch, rate_factor=1.0)

            @torch.no_grad()
            def evaluate() -> None:
                if pipeline:
                    pipeline.held_out_loss(sequences[: size * pipeline.n_ranks])
                else:
                    source_losses(built, next_token_loss, held_out, device=device, batch=size, ranks=shares)
                settle(*(pipeline.stages.values() if pipeline else (built,)))

            with memory.tracing():
                for name in order:
                    memory.most = 0
                    {"step": step, "evaluate": evaluate}[name]()
                    peaks[name] = memory.most
    return peaks["step"], collectives.calls, peaks["evaluate"]


def agree(_schedule: Any, stages: list[PipelineStage], *_: Any) -> None:
    """Stand for the messages by which ranks agree that the shapes of all stages are stated."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
