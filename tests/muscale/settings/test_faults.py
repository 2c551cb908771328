"""Faults of a study file are refused with the file, the key and the value: a line each, `settings => key | words`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muscale import StudyConfig, StudyFileError
from muscale.settings.continuation_file import ContinuationFile
from tests.muscale.conftest import MICRO

STAGES = "hyperparameters.stages=[{after=0.4, learning_rate=0.5}, {after=0.8, learning_rate=1, beta2=0.98}]"
CHOICE = 'distribution="choice", values'
FAULTS = f"""
sweep.trails=3 => sweep.trails | value 3 | trials?
sweep.trials="many" => sweep.trials | 'many'
sweep.trials=0 => sweep.trials | got 0
sweep.reduction_factor=1e300 => sweep.reduction_factor | 1e+300
sweep.seed=[[[ => sweep.seed | '[[['
hyperparameters.clip_norm=inf => hyperparameters.clip_norm | got inf
hyperparameters.learning_rate=true => hyperparameters.learning_rate | got True
decay_scaling=gain => decay_scaling | timescale | 'gain'
sweep.learn_from=../other => sweep.learn_from | '../other'
extra.key=1 => extra | allowed are name
name= => name | got ''
model.d_modle=64 => model.d_modle | value 64 | d_model?
model.d_model=65 => model | head_dim=16 | got 65
model.attention_window=0 => model | attention_window | got 0
model.global_attention_every=2 => model | attention_window | got 2
model.vocab_size=100 => model.vocab_size | 256 | got 100
model.tied=true ;; hyperparameters.zero_readout=true => hyperparameters.zero_readout | model.tied
model.tied=true ;; sweep.space.zero_readout={{{CHOICE}=[true, false]}} => sweep.space.zero_readout | model.tied
model.tied=true ;; hyperparameters.embedding_rate=2.0 => hyperparameters.embedding_rate | model.tied | got 2.0
model.tied=true ;; sweep.space.embedding_rate={{distribution="log_uniform", low=0.25, high=4.0}} => \
sweep.space.embedding_rate | output_rate | got 0.25
model.tied=true ;; transfer.over.embedding_rate=[0.25, 0.5, 1, 2, 4] => transfer.over.embedding_rate | got 0.25
model.tied=true ;; transfer.over.embedding_rate={{points=5}} => transfer.over.embedding_rate
model.tied=true ;; plan.explicit.embedding_rate=2.0 => plan.explicit.embedding_rate | got 2.0
model.tied=true ;; hyperparameters.stages=[{{after=0.4, embedding_rate=0.5}}] => hyperparameters.stages | model.tied | got 0.5
decay_scaling=sublayer_gain ;; hyperparameters.optimizer=lion => hyperparameters.optimizer | sublayer_gain | got lion
hyperparameters.beta1=1.5 => hyperparameters | beta1 | got 1.5
hyperparameters.batch_tokens=100 => hyperparameters.batch_tokens | 32 | got 100
hyperparameters.cycles=3 => hyperparameters | cycles | cosine_cycles
hyperparameters.schedule=constant => sweep.schedule | "constant"
hyperparameters.swap_optimizer=muon ;; hyperparameters.swap_fraction=0.5 ;; hyperparameters.swap_learning_rate=0.01 => \
hyperparameters.swap_optimizer | 'muon'
sweep.space.swap_fraction={{distribution="log_uniform", low=0.1, high=0.9}} => sweep.space.swap_fraction
sweep.space.init_scale.low=-1 => sweep.space.init_scale | low = -1
sweep.space.colour.distribution="fixed" => sweep.space.colour
sweep.space.optimizer={{{CHOICE}=["adamw", "sgd"]}} => sweep.space.optimizer | transfer rules | got 'sgd'
sweep.space.optimizer={{{CHOICE}=["adamw", "adafactor"]}} ;; sweep.space.beta2={{distribution="uniform", low=0.9, high=0.99}} => \
sweep.space.beta2 | "adafactor" | "when"
sweep.space=mup_adam => sweep.space | 'mup_adam' | mup_adamw
sweep.space.learning_rate={{{CHOICE}=["a", "b"]}} => sweep.space.learning_rate | 'a'
sweep.space.beta1={{distribution="uniform", low=0.5, high=1.5}} => sweep.space.beta1 | got 1.5
hyperparameters.optimizer=adam ;; sweep.space.weight_decay_tau={{distribution="log_uniform", low=0.1, high=1.0}} => \
sweep.space.weight_decay_tau | "adam"
sweep.space.batch_tokens={{distribution="ordinal", values=[0, 256]}} => sweep.space.batch_tokens | got 0
sweep.space.batch_tokens={{{CHOICE}=[256.0, 512.0]}} => sweep.space.batch_tokens | got 256.0
sweep.space.batch_tokens={{distribution="integer", low=256, high=1024}} => sweep.space.batch_tokens | ordinal
sweep.space.batch_tokens={{distribution="ordinal", values=[256, 384]}} => sweep.space.batch_tokens | 384 | got 256
sweep.space.batch_tokens={{distribution="ordinal", values=[48, 96]}} => sweep.space.batch_tokens | 32 | got 48
ladder.stage_branches=2 => ladder.stage_branches | got 2
ladder.stage_branches=2 ;; corpus.sources={{a={{path="text"}}, b={{path="text"}}}} ;; \
corpus.stages=[{{weights={{a=1, b=0}}, until_fraction=0.4}}, {{weights={{a=0, b=1}}}}] => ladder.stage_branches | 0.5 | 0.4
sweep.n_tokens=768 => sweep.n_tokens | 256 tokens | got 768
sweep.n_tokens=10 => sweep.n_tokens | 256 tokens | 218
transfer.widths=[20] => transfer.widths | head_dim=16 | got 20
ladder.stems=[{{width=16, n_tokens=16384, branches=100000}}] => ladder.stems.0.branches | 100000
check.widths=[32, 64] => check.widths | at least 4 | [32, 64]
check.depths=[1, 2, 4] => check.depths | at least 4 | [1, 2, 4]
check.depths=[1, 2, 3, 4] => check.depths | factor of 8 | 1 to 4
check.seeds=[1] => check.seeds | at least 2 | [1]
corpus.feild=text => corpus.feild | 'text' | field?
corpus.dtype=uint8 => corpus | dtype | 'text'
corpus.clean={{languages=["english"]}} => corpus.clean.languages.0 | 'english'
corpus.kind=tokens => corpus | vocab_size | None
corpus.end_of_document=x => corpus.tokenizer | 'x' | 'bytes'
corpus.tokenizer=bpe => model.vocab_size | 257 | got 256
corpus.sources={{a={{path="text"}}}} => corpus.source | 'text'
corpus.stages=[{{weights={{a=1}}}}] => corpus.stages | corpus.sources
transfer.widths=[32] => transfer.widths | at least 2 | [32]
transfer.widths=[32, 32, 64] => transfer.widths | differ | [32, 32, 64]
transfer.depths=[2] => transfer.depths | at least 2 | [2]
transfer.horizons=[2.0] => transfer.horizons | at most 1 | [2.0]
transfer.batches=[128, 256, 512] => transfer.batches | at least 4 | [128, 256, 512]
transfer.batches=[100, 256, 512, 1024] => transfer.batches | 32 | got 100
transfer.batches=[128, 256, 512, 8192] => transfer.batches | warmup of 8192 | got 8192
transfer.over.beta2=[0.9, 0.95, 0.97, 0.98, 0.99] => transfer.over.beta2 | octaves
transfer.over.init_scale=[1, 2, 4] => transfer.over.init_scale | at least 5 | [1.0, 2
transfer.over.init_scale=[-1, 1, 2, 4, 8] => transfer.over.init_scale.at.0 | got -1
transfer.over.init_scale.pionts=5 => transfer.over.init_scale.pionts | points?
transfer.over.init_scale=5 => transfer.over.init_scale | got 5
transfer.over.warmup_fraction=[0.1, 0.2, 0.4, 0.8, 1.6] => transfer.over.warmup_fraction | got 1.6
transfer.over.init_scale={{at=[1, 2, 3, 4, 5], points=7}} => transfer.over.init_scale | points and octaves
ladder.stems=[{{width=16, n_tokens=16384}}, {{width=16, n_tokens=16384}}] => ladder.stems | differ
ladder.seeds=[3, 3] => ladder.seeds | differ | [3, 3]
compare.seeds=[1, 1] => compare.seeds | differ
compare.rates=2 => compare.rates | got 2
compare.widths=[20] => compare.widths | head_dim=16 | got 20
variants.baseline={{}} => variants.baseline | another
variants.a.tokenizer=bytes => variants.a.tokenizer | allowed are model, trainer, hyperparameters
variants.a.trainer={{command=["b"]}} => variants.a.trainer | 'b'
variants.a.corpus={{sauce="b"}} => variants.a.corpus.sauce | source?
variants.a.corpus={{evaluation_tokens=64}} => variants.a.corpus.evaluation_tokens | got 64
variants.a.corpus={{sources={{a={{path="b"}}}}}} => variants.a.corpus.sources.a.weight
variants.a.corpus={{source="b"}} ;; resources.ranks_per_trial=2 => variants.a.corpus | got 2
variants.a.model={{tide=true}} => variants.a.model | tide | tied?
variants.a.model={{d_model=20}} => variants.a.model | head_dim=16 | got 20
variants.a.model={{context_length=64}} => variants.a.model.context_length | held-out | got 64
variants.a.model={{tied=true}} ;; variants.a.hyperparameters={{zero_readout=true}} => variants.a.hyperparameters | zero_readout
variants.a.model={{tied=true}} ;; variants.a.hyperparameters={{embedding_rate=2.0}} => variants.a.hyperparameters | got 2.0
variants.a.hyperparameters={{beta1=2.0}} => variants.a.hyperparameters | beta1 | got 2
variants.a.hyperparameters={{batch_tokens=100}} => variants.a.hyperparameters | batch_tokens | got 100
variants.a.hyperparameters={{schedule="constant"}} => variants.a.hyperparameters | 'constant'
tracking.tensorbord=true => tracking.tensorbord | tensorboard
plan.explicit.warp=1.0 => plan.explicit | explicit.warp | attention_dropout | z_loss
plan.explicit.stages=[] => plan.explicit | explicit.stages
plan.explicit.DERIVED=1 => plan.explicit | explicit.DERIVED | allowed are attention_dropout
plan.explicit.zero_readout=true => plan.explicit | explicit.zero_readout | got True
plan.explicit.context_length=16 => plan.explicit.context_length | at least the proxies' | got 16
plan.explicit.context_length=384 => plan.explicit.context_length | multiples | 384
plan.explicit.batch_tokens=1000 => plan.explicit.batch_tokens | multiples | 1000
plan.explicit.attention_window=64 => plan.explicit.attention_window | model.attention_window | got 64
plan.explicit.rope_theta=-1.0 => plan.explicit | rope_theta | got -1.0
plan.explicit.cycles=2.5 => plan.explicit | explicit.cycles | got 2.5
plan.explicit.beta1=1.5 => plan.explicit | beta1 | got 1.5
fit.seed=-1 => fit.seed | got -1
plan.compute_flops=1e9 => plan.compute_flops | 1.95e+10 | got 1e+09
plan.accelerator="H100 SXM" ;; plan.dollars=5 => plan | exactly one of | dollars = 5
plan.n_devices=4 => plan | n_devices | plan.accelerator
plan.mfu=0.4 => plan | mfu | plan.accelerator
plan.accelerator=H100 => plan | 'H100' | did you mean H100 SXM
plan.explicit.batch_tokens=256 ;; promote.workers=9 => promote.workers | 9 ranks | got 8
plan.explicit.batch_tokens=256 ;; promote.workers=18 ;; promote.tensor_parallel=2 => promote.workers | 18 ranks | got 8
promote.workers=8 ;; promote.tensor_parallel=2 ;; promote.workers_min=3 => promote.workers_min | 3 ranks | got 2
promote.workers=8 ;; promote.sharding=hybrid ;; promote.workers_min=4 => promote.workers_min | shard_ranks | got 4
promote.workers=8 ;; promote.sharding=hybrid ;; promote.shard_ranks=4 ;; promote.workers_min=2 => \
promote.workers_min | shard_ranks | got 4
promote.tensor_parallel=3 => promote | 2 ranks | got 3
promote.context_parallel=3 => promote | context_parallel | 2 ranks | got 3
promote.expert_parallel=3 ;; promote.workers=4 => promote | expert_parallel | 4 ranks | got 3
promote.expert_parallel=2 ;; promote.context_parallel=2 ;; promote.sharding=auto => promote | expert_parallel | got 2
promote.expert_parallel=2 ;; promote.tensor_parallel=2 ;; promote.workers=4 => promote | expert_parallel | tensor_parallel | got 2
promote.expert_parallel=2 ;; promote.compile=true => promote | compile | expert_parallel | 2
promote.context_parallel=2 ;; promote.pipeline_parallel=2 ;; promote.workers=6 => promote | pipeline_parallel | 6 ranks | got 4
promote.shard_ranks=2 => promote | shard_ranks | "full"
promote.precision=fp16 => promote.precision | fp16 | 2
promote.evaluator_cpus=1.5 => promote | evaluator_cpus | 1.5
scores.tasks=["a", "a"] => scores.tasks | differ
scores.workers=0 => scores.workers | 0
scores.memorisation=true => scores.memorisation | context_length | 63 | got 32
scores.workers=2 ;; promote.evaluation=async ;; promote.evaluator_gpus=0.5 => scores.workers | evaluator_gpus = 0.5 | got 2
resources.cpus_per_worker=1.5 => resources | cpus_per_worker | 1.5
resources.ranks_per_trial=3 => resources.ranks_per_trial | 8 sequences | got 3
transfer.batches=[96, 256, 512, 1024] ;; resources.ranks_per_trial=2 => resources.ranks_per_trial | 3 sequences | 96 tokens | got 2
resources.ranks_per_trial=2 ;; resources.gpus_per_worker=0.5 => resources | gpus_per_worker | ranks_per_trial = 2 | got 0.5
resources.ranks_per_trial=2 ;; numerics.precision=fp16 => numerics.precision | fp16 | 2
storage.path="/x" => storage | storage.path | '/x' | "sqlite"
storage={{ledger="actor", path="x"}} => storage | absolute | 'x'
hyperparameters.stages=[{{after=0.4, learning_rat=1}}] => hyperparameters.stages.0.learning_rat | learning_rate?
hyperparameters.stages=[{{learning_rate=1}}] => hyperparameters.stages.0.after | missing
hyperparameters.stages=[{{after=0.5}}] => hyperparameters.stages.0 | 0.5
hyperparameters.stages=[{{after=2, beta1=0.8}}] => hyperparameters.stages.0 | got 2
hyperparameters.stages=3 => hyperparameters.stages | got 3
{STAGES} ;; hyperparameters.schedule=linear => hyperparameters | stages | "linear"
{STAGES} ;; sweep.schedule=linear => sweep.schedule | stages
{STAGES} ;; sweep.space.beta2={{distribution="uniform", low=0.9, high=0.99}} => sweep.space.beta2 | hyperparameters.stages
sweep.space.stages={{{CHOICE}=["a", "b"]}} => sweep.space.stages
hyperparameters.stages=[{{after=0.4, clip_norm=0.5}}] ;; transfer.over.clip_norm={{points=5}} => transfer.over.clip_norm
hyperparameters.stages=[{{after=0.4, beta1=0.8}}, {{after=0.45, beta1=0.7}}] ;; sweep.n_tokens=1024 => sweep.n_tokens | 768
hyperparameters.stages=[{{after=0.95, beta1=0.8}}] => sweep.rank_by | 11520 | "averaged"
{STAGES} ;; sweep.scheduler=pbt => hyperparameters.stages | "pbt"
sweep.scheduler=pbt ;; sweep.rungs=8 => sweep.rank_by | at most 6 rungs | "averaged"
sweep.scheduler=pbt ;; hyperparameters.schedule=linear ;; sweep.schedule=wsd => sweep.scheduler | "linear"
""".strip().splitlines()


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(MICRO)
    return path


def message(path: Path, *settings: str) -> str:
    with pytest.raises(StudyFileError) as error:
        StudyConfig.read(path, settings)
    return str(error.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_with_file_key_and_value(fault: str, study: Path) -> None:
    settings, _, expected = fault.rpartition(" => ")
    key, *words = expected.split(" | ")
    found = message(study, *settings.split(" ;; "))
    assert f"{study}: {key}: " in found
    assert [word for word in words if word not in found] == []


def test_a_tied_table_with_learned_positions_has_the_rate_of_embeddings(study: Path) -> None:
    settings = ("model.tied=true", 'model.positions="learned"', "hyperparameters.embedding_rate=2.0")
    assert StudyConfig.read(study, settings).hyperparameters.embedding_rate == 2


def test_every_fault_of_a_file_is_listed(study: Path) -> None:
    assert len(message(study, "sweep.trials=0", "model.head_dim=3", "fit.n_bootstrap=0").splitlines()) == 3
    assert message(study, "sweep.trials").startswith("--set sweep.trials: ")


def numbers(values: Any, key: str = "") -> Iterator[str]:
    """The keys of all numbers with a fraction, as --set takes them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{key}{name}.")
        elif isinstance(value, float):
            yield f"{key}{name}"


def test_numbers_are_finite(study: Path) -> None:
    found = {key for key in numbers(StudyConfig.read(study).to_dict()) if not key.startswith("sweep.space.")}
    assert len(found) > 40
    unbounded = {"fit.max_regret", "resources.stall_minutes"}  # where inf means without bound
    for value, keys in (("nan", found), ("inf", found - unbounded), ("-inf", found)):
        lines = message(study, *(f"{key}={value}" for key in keys))
        assert [key for key in keys if f"{key}: " not in lines] == []


FILES = {
    b"": "name",
    bytes(100): "TOML",
    b'name = "\xff\xfe"': "utf-8",
    b'name = "a"\nname = "b"': "TOML",
    b"name = 2026-02-31": "TOML",
    b"[model]\nd_model = 1" + b"0" * 400: "an integer must fit into 64 bits, got one of 1329",
    b'name = "x"\nnone = "' + b"y" * 100_000 + b'"': "none: unknown key",
    b"[run]\nn_tokens = 1\n[forecast]\nloss = 1.0\n": "",  # a plan's
}


@pytest.mark.parametrize(("content", "word"), FILES.items())
def test_a_file_that_is_no_study_and_no_stage_is_refused(content: bytes, word: str, tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_bytes(content)
    for read in (StudyConfig.read, lambda path: ContinuationFile.read(path, vocab_size=256)):
        with pytest.raises(StudyFileError) as error:
            read(path)
        assert str(error.value).startswith(f"{path}: ")
        assert word in str(error.value)
        assert len(str(error.value)) < 5_000


def test_a_missing_key_file_and_a_folder_are_refused(study: Path) -> None:
    study.write_text(MICRO.replace("batch_tokens = 256\n", ""))
    assert f"{study}: hyperparameters.batch_tokens: missing" in message(study)
    assert "muscale init" in message(study.with_name("nowhere.toml"))
    study.write_text('name = "part"\n[corpus]\nsource = "text"\n')
    assert f"{study}: sweep: missing" in message(study)
    assert "muscale init" in message(study)
    assert f"{study}" in message(study.parent)
