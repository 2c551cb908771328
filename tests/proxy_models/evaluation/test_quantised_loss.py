"""Rounding of weights: by hand, its memory, and weights that are the same bit for bit afterwards."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from proxy_models.architecture.families import build, load
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.held_out_loss import HeldOutLoss, HeldOutLosses, HeldOutSequences
from proxy_models.evaluation.measure import Subject
from proxy_models.evaluation.quantised_loss import QuantisedLoss, _matrices, n_bytes, round_to_nearest, rounded
from proxy_models.training.fsdp import shard
from tests.proxy_models.evaluation.conftest import assert_unchanged, numerics_of, snapshot
from tests.proxy_models.families import N_EXPERTS, TRANSFORMERS, Stacked


def test_int8_has_a_scale_for_each_row() -> None:
    rows = torch.tensor([[127.0, 1.4, -0.6, 0.0], [2.54, -1.27, 0.02, 0.01]])
    expected = torch.tensor([[127.0, 1.0, -1.0, 0.0], [127.0, -63.0, 1.0, 0.0]])
    expected[1] *= (torch.tensor(2.54) / 127).bfloat16().float()  # .02002, so that -1.27 is 63.4 steps
    assert torch.equal(round_to_nearest(rows, 8, 2), expected)


def test_int4_has_a_scale_for_each_group_also_a_shorter_last_one() -> None:
    rows = torch.tensor([[7.0, 3.4, 70.0, -34.0, 0.7], [0.0, 0.0, 14.0, 6.0, -7.0]])
    small = (torch.tensor(0.7) / 7).bfloat16().float()
    expected = torch.tensor([[7.0, 3.0, 70.0, -30.0, 7 * small], [0.0, 0.0, 14.0, 6.0, -7.0]])
    assert torch.equal(round_to_nearest(rows, 4, 2), expected)
    assert n_bytes(rows, 4, 2) == 5 + 2 * 6
    assert n_bytes(rows, 8, 2) == 10 + 2 * 2
    assert n_bytes(rows, 4, 128) == 5 + 2 * 2


def test_the_loss_rises_with_fewer_bits_and_the_weights_stay(subject: Subject) -> None:
    before = snapshot(subject.model)
    measure = QuantisedLoss(group=16)
    scores = {(score.name, score.metric): score for score in measure.measure(subject).scores}
    assert_unchanged(subject.model, before)
    loss = HeldOutLoss().measure(subject).scores[0]
    assert scores["bf16", "loss"].value == loss.value
    increases = {bits: scores[f"int{bits}", "loss_increase"] for bits in (8, 4)}
    assert abs(increases[8].value) < abs(increases[4].value)
    for bits, increase in increases.items():
        assert scores[f"int{bits}", "loss"].value - loss.value == pytest.approx(increase.value, abs=1e-9)
        assert increase.standard_error is not None
        assert loss.standard_error is not None
        assert increase.standard_error < loss.standard_error / 2
    model = subject.numerics.model
    matrices = _matrices(subject.model, subject.numerics, tables=False)
    n_matrix, n_rows = sum(rows.numel() for rows in matrices), sum(len(rows) for rows in matrices)
    n_rest, n_groups = model.n_params_total - n_matrix, sum(len(rows) * -(-rows.shape[1] // 16) for rows in matrices)
    assert scores["bf16", "memory_bytes"].value == 2 * model.n_params_total
    assert scores["int8", "memory_bytes"].value == n_matrix + 2 * n_rows + 2 * n_rest
    assert scores["int4", "memory_bytes"].value == n_matrix / 2 + 2 * n_groups + 2 * n_rest


def test_the_loss_is_that_of_weights_rounded_by_hand(subject: Subject) -> None:
    (_, _, loss, *_) = QuantisedLoss(bits=(3,), group=16, tables=True).measure(subject).scores
    with torch.no_grad():
        for parameter in subject.model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(round_to_nearest(parameter, 3, 16))
    assert HeldOutLoss().measure(subject).scores[0].value == loss.value


def test_tables_are_left_out_unless_wanted(subject: Subject) -> None:
    tables = sum(subject.model.get_parameter(f"{name}.weight").numel() for name in ("embedding", "readout"))
    some, every = (_matrices(subject.model, subject.numerics, tables=wanted) for wanted in (False, True))
    assert sum(rows.numel() for rows in every) - sum(rows.numel() for rows in some) == tables


def test_an_error_restores_the_weights(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    before, measure_losses, calls = snapshot(subject.model), HeldOutSequences.losses, []

    def fail_when_rounded(held_out: HeldOutSequences) -> HeldOutLosses:
        calls.append(held_out)
        if len(calls) == 2:
            assert any(not torch.equal(tensor, before[name]) for name, tensor in snapshot(subject.model).items())
            raise RuntimeError
        return measure_losses(held_out)

    monkeypatch.setattr(HeldOutSequences, "losses", fail_when_rounded)
    with pytest.raises(RuntimeError):
        QuantisedLoss().measure(subject)
    assert_unchanged(subject.model, before)


def test_an_output_channel_is_a_row_in_every_family(corpus: Corpus) -> None:
    member = Stacked(vocab_size=256, context_length=16).member(16, 1)
    model = build(member)
    shapes = {tuple(rows.shape) for rows in _matrices(model, numerics_of(member, corpus), tables=False)}
    assert shapes == {(16, 16 * 3), (N_EXPERTS * 32, 16), (16, 32)}


def test_a_matrix_with_its_inputs_first_is_turned(corpus: Corpus) -> None:
    pytest.importorskip("transformers")
    family = load("transformers:GPT2Config")(vocab_size=256, context_length=16, **TRANSFORMERS["GPT2Config"])
    member = family.member(32, 1)
    model = build(member)
    matrices = _matrices(model, numerics_of(member, corpus), tables=False)
    assert sorted(tuple(rows.shape) for rows in matrices) == [(32, 32), (32, 128), (96, 32), (128, 32)]
    (weight,) = (parameter for name, parameter in model.named_parameters() if name.endswith("c_attn.weight"))
    before = weight.detach().clone()
    with rounded(matrices, 8, 128):
        assert torch.equal(weight.detach(), round_to_nearest(before.T, 8, 128).T)
    assert torch.equal(weight.detach(), before)


def test_ranks_refuse_a_matrix_whose_inputs_they_would_share(corpus: Corpus) -> None:
    pytest.importorskip("transformers")
    family = load("transformers:GPT2Config")(vocab_size=256, context_length=16, **TRANSFORMERS["GPT2Config"])
    member = family.member(32, 1)
    subject = Subject(model=build(member).eval(), numerics=numerics_of(member, corpus), text=corpus, tokens=0)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        shard(subject.model, family, init_device_mesh("cpu", (1,)), min_unit_params=0)
        with pytest.raises(ValueError, match=r"quantised loss.*c_attn\.weight"):
            QuantisedLoss().measure(subject)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrong", [{"bits": ()}, {"bits": (8, 1)}, {"bits": (16,)}, {"group": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QuantisedLoss(**wrong)  # type: ignore[arg-type]


def test_the_measure_is_picklable_and_its_key_holds_its_settings() -> None:
    measure = QuantisedLoss()
    assert pickle.loads(pickle.dumps(measure)) == measure
    assert (
        len({replace(measure, **change).key for change in ({}, {"bits": (4,)}, {"group": 32}, {"tables": True})}) == 4
    )
