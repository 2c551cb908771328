"""Every line of the gate passes, fails with what to do, or is unknown; what was forced is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from muscale import StageError, StudyConfig
from muscale.actors.corpus_hashes import changed_files
from muscale.full_runs.promote.dry_run import device_of
from muscale.plans.gate import (
    Gate,
    GateLine,
    attention_line,
    check_line,
    communication_line,
    context_line,
    data_line,
    disk_line,
    evaluation_line,
    forced_lines,
    hyperparameters_line,
    layout_line,
    memory_line,
    precision_line,
    require_check,
    transfer_line,
)
from muscale.plans.layouts import fitting_layouts, propose_layout
from muscale.plans.provenance import HyperparameterProvenance
from muscale.settings.parallelism import Parallelism
from muscale.store.ledger import Ledger
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.memory import MEMORY_SHARE, training_memory
from proxy_models.coordinates.check import CoordinateCheck
from proxy_models.data.corpus import Corpus, write_corpus
from tests.muscale.conftest import write_text

HASHES = {"corpus": "aa", "tokenizer": "bytes"}
ESTIMATE = training_memory(ModelConfig(d_model=64, n_layers=2), micro_batch=4, sharding="full", world_size=2)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def checked(*, growth: float) -> CoordinateCheck:
    """A check of one hidden module whose updates grow with the width to this power."""
    rows = [
        {
            "axis": "width",
            "width": width,
            "depth": 2,
            "module": "blocks.0.mlp.down",
            "kind": "hidden",
            "quantity": quantity,
            "step": step,
            "rms": float(width) ** (growth if step else 0.0),
        }
        for width in (32, 64, 128, 256)
        for quantity in ("size", "change")
        for step in (0, 1, 2)
    ]
    return CoordinateCheck(measurements=pd.DataFrame(rows), seeds=(0, 1))


def test_only_a_passed_transfer_check_passes() -> None:
    assert transfer_line("pass", ()) == GateLine(name="transfer", status="passed", compared="the verdict is 'pass'")
    drifts = transfer_line("fail", ("the optimum drifts by 1.2 octaves",))
    assert drifts.status == "failed"
    assert "drifts by 1.2 octaves" in drifts.compared
    assert "does not hold when large" in drifts.advice
    unsettled = transfer_line("not enough evidence", ("two widths",), "--set transfer.seeds=[0,1]")
    assert unsettled.status == "failed"
    assert unsettled.advice == "settle it: muscale transfer --set transfer.seeds=[0,1]"


def test_the_coordinate_check_fails_where_a_module_breaks_its_bound() -> None:
    assert check_line(checked(growth=0.0)).status == "passed"
    broken = check_line(checked(growth=1.0))
    assert broken.status == "failed"
    assert "`muscale check` names the modules" in broken.advice
    missing = check_line(None)
    assert (missing.status, missing.advice) == ("unknown", "run `muscale check`")
    require_check(checked(growth=0.0), force=False)
    require_check(checked(growth=1.0), force=True)
    with pytest.raises(StageError, match=r"coordinate check: FAILED.*nothing tuned small would hold(.|\n)*--force"):
        require_check(checked(growth=1.0), force=False)


def test_data_and_tokenizer_are_compared_by_hash() -> None:
    same = data_line(HASHES, HASHES, [], 10**9)
    assert (same.status, same.compared) == ("passed", "corpus aa, tokenizer bytes, 1 GB hashed again")
    other = data_line(HASHES, {"corpus": "bb", "tokenizer": "t"}, [], 1)
    assert other.status == "failed"
    assert other.compared == "corpus aa planned, bb here; tokenizer bytes planned, t here"
    assert "put the planned corpus back" in other.advice
    damaged = data_line(HASHES, HASHES, ["train.bin"], 1)
    assert (damaged.status, damaged.compared) == ("failed", "train.bin not as hashed when the corpus was written")
    assert "written again" in damaged.advice
    large = data_line(HASHES, HASHES, None, 10**12)
    assert large.status == "unknown"
    assert "1e+03 GB of tokens were not hashed again" in large.compared


def test_a_token_that_changed_on_disk_is_found(tmp_path: Path) -> None:
    write_text(tmp_path / "text", words=50)
    corpus: Corpus = write_corpus(tmp_path / "corpus", str(tmp_path / "text"))
    changed, n_bytes = changed_files(corpus)
    assert (changed, n_bytes) == ([], corpus.n_tokens + corpus.n_validation_tokens)
    tokens = tmp_path / "corpus" / "train.bin"
    content = bytearray(tokens.read_bytes())
    content[7] ^= 1
    tokens.write_bytes(content)
    assert changed_files(Corpus.open(tmp_path / "corpus"))[0] == ["train.bin"]


def test_what_no_rule_carries_must_be_stated() -> None:
    rate = HyperparameterProvenance(
        name="learning_rate", value=0.01, rules=("muP width", "horizon law"), source="trial 3"
    )
    dropout = HyperparameterProvenance(name="mlp_dropout", value=0.1, rules=("fixed",), source="trial 3", searched=True)
    silent = hyperparameters_line([rate, dropout])
    assert silent.status == "failed"
    assert silent.compared == "mlp_dropout = 0.1 from trial 3: no transfer rule covers it"
    assert silent.advice == "state it: muscale plan --set plan.explicit.mlp_dropout=VALUE"
    foreign = HyperparameterProvenance(name="my_own", value=2.0, rules=("fixed",), source="trial 3")
    assert "my_own = 2.0" in hyperparameters_line([foreign]).compared
    assert hyperparameters_line([foreign]).status == "failed"
    stated = HyperparameterProvenance(name="mlp_dropout", value=0.2, rules=("explicit",), source="[plan.explicit]")
    of_study = HyperparameterProvenance(name="z_loss", value=1e-4, rules=("fixed",), source="the study file")
    none_of_it = HyperparameterProvenance(
        name="label_smoothing", value=0.0, rules=("fixed",), source="trial 3", searched=True
    )
    line = hyperparameters_line([rate, stated, of_study, none_of_it])
    assert line.status == "passed"
    assert line.compared == (
        "2 by rule or fixed; explicit: mlp_dropout = 0.2; the study file's at every size: z_loss = 0.0001"
    )


def test_the_estimate_must_fit_the_devices() -> None:
    limit = ESTIMATE.total / MEMORY_SHARE
    assert memory_line(ESTIMATE, memory_bytes=limit * 1.01, device="H200").status == "passed"
    full = memory_line(ESTIMATE, memory_bytes=limit * 0.99, device="H200")
    assert full.status == "failed"
    assert "on H200" in full.compared
    assert "most of it are activations" in full.advice
    assert "smaller micro-batch" in full.advice
    shared = memory_line(ESTIMATE, memory_bytes=limit * 1.01, device="this machine", workers_on_it=2)
    assert shared.status == "failed"
    assert "for 2 workers" in shared.compared
    state = training_memory(ModelConfig(d_model=512, n_layers=8, context_length=16), micro_batch=1)
    assert "more workers to cut the state over" in memory_line(state, memory_bytes=1e6, device="H200").advice
    unknown = memory_line(ESTIMATE, memory_bytes=None, device="a GPU")
    assert unknown.status == "unknown"
    assert "--smoke-test" in unknown.advice


def test_the_device_is_the_accelerator_that_is_named_or_this_machine(
    make_study: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_study()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = device_of(StudyConfig.read(path))
    assert (here.name, here.workers_on_it) == ("this machine", 2)
    assert here.memory_bytes is not None
    assert here.memory_bytes > 2**28
    named = device_of(StudyConfig.read(path, ["resources.gpus_per_worker=1.0", 'plan.accelerator="H100 SXM"']))
    assert (named.name, named.memory_bytes) == ("H100 SXM", 80e9)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert device_of(StudyConfig.read(path)).memory_bytes is None


def test_shapes_divide_over_the_workers_and_a_batch_has_a_sequence_for_each_share() -> None:
    shapes = {"heads": 12, "columns of the MLP": 2048}
    line = layout_line(shapes, sequences=64, workers=16, parallelism=Parallelism(tensor_parallel=4))
    assert (line.status, line.compared) == (
        "passed",
        "64 sequences over 4 workers × 4, 12 heads, 2048 columns of the MLP",
    )
    cases = [
        (9, Parallelism(), "9 ranks need a sequence of a batch for each share, got 8", "take 4 or 8 workers"),
        (18, Parallelism(tensor_parallel=2), "18 ranks in groups of tensor_parallel = 2 need", "take 8 or 16 workers"),
        (6, Parallelism(tensor_parallel=4), "tensor_parallel must divide the 6 ranks, got 4", "take 4 or 8 workers"),
        (5, Parallelism(tensor_parallel=5), "12 heads over 5", "a tensor_parallel that divides them"),
        (6, Parallelism(sharding="hybrid", shard_ranks=4), "must divide the 6 ranks", "take 4 or 8 workers"),
    ]
    for workers, parallelism, compared, advice in cases:
        line = layout_line(shapes, sequences=8, workers=workers, parallelism=parallelism)
        assert line.status == "failed"
        assert compared in line.compared
        assert advice in line.advice


def test_uneven_shares_of_a_batch_are_reported_and_do_not_block() -> None:
    line = layout_line({}, sequences=8, workers=3, parallelism=Parallelism())
    assert line.status == "passed"
    assert (
        line.compared
        == "8 sequences over 3 workers, 3 for 2 of them and 2 for the others, which wait: 11% of the speed"
    )
    assert line.advice == "2 or 4 workers would share it evenly"


def test_an_evaluation_must_fit_beside_the_state() -> None:
    fits = evaluation_line(60 * 2**30, sequences=4, memory_bytes=80e9, device="H100 SXM")
    assert fits.status == "passed"
    fails = evaluation_line(0.86 * 80e9, sequences=64, memory_bytes=80e9, device="H100 SXM")
    assert fails.status == "failed"
    assert "64 sequences" in fails.compared
    shared = evaluation_line(0.5 * 80e9, sequences=4, memory_bytes=80e9, device="H100 SXM", workers_on_it=2)
    assert shared.status == "failed"
    assert evaluation_line(1.0, sequences=64, memory_bytes=None, device="a GPU").status == "unknown"


def test_attention_weights_are_never_kept_unnoticed() -> None:
    assert attention_line("flash", head_dim=128, weight_bytes=2**40).status == "passed"
    kept = attention_line("math", head_dim=20, weight_bytes=2**34)
    assert kept.status == "failed"
    assert "16 GiB" in kept.compared


def test_bf16_needs_a_device_that_has_it_and_a_difference_from_the_proxies_is_reported() -> None:
    old = precision_line("bf16", "bf16", device="V100", has_bf16=False)
    assert old.status == "failed"
    assert "V100" in old.compared
    other = precision_line("fp32", "bf16", device="H100 SXM", has_bf16=True)
    assert other.status == "passed"
    assert "losses in fp32" in other.advice
    assert "bf16" in precision_line("fp32", "fp32", device="H100 SXM", has_bf16=True).advice
    assert not precision_line("fp32", "fp32", device="this machine", has_bf16=None).advice


def test_another_context_than_the_proxies_is_reported_and_only_a_short_held_out_split_blocks() -> None:
    proxies = ModelConfig(d_model=64, n_layers=2, context_length=2048)
    longer = replace(proxies, context_length=8192, rope_theta=5e5)
    same, other = context_line(proxies, proxies), context_line(longer, proxies)
    assert (same.status, same.compared, same.advice) == ("passed", "2,048 tokens a sequence", "")
    assert other.status == "passed"
    assert other.compared == "8,192 tokens a sequence, 2,048 in proxies; rope_theta 500,000, 10,000 in proxies"
    assert "do not cover this" in other.advice
    assert context_line(longer, proxies, too_short="4 sequences of 8192").status == "failed"


def test_a_much_faster_layout_and_long_waits_are_reported_and_do_not_block() -> None:
    model = ModelConfig(d_model=1024, n_layers=16, head_dim=64, vocab_size=32_000, context_length=2048)
    layouts = fitting_layouts(model, workers=64, batch_tokens=2**20, device="H100 SXM")
    best = propose_layout(layouts)
    assert best is not None
    assert not communication_line(best.step, best).advice
    slow = communication_line(layouts[-1].step, best)
    assert slow.status == "passed"
    assert str(best) in slow.advice
    assert "fewer workers" in communication_line(layouts[-1].step, layouts[-1]).advice
    assert communication_line(None, None).status == "unknown"


def test_checkpoints_must_fit_the_disk() -> None:
    assert disk_line(3 * 2**30, 4 * 2**30, kept=3, place="/data").status == "passed"
    full = disk_line(3 * 2**30, 2 * 2**30, kept=3, place="/data")
    assert (full.status, full.compared) == ("failed", "3 GiB for 3 checkpoints, 2 GiB free in /data")
    assert "make room there" in full.advice


def test_the_gate_lets_through_what_passed_or_was_forced_and_the_ledger_keeps_which(ledger: Ledger) -> None:
    unknown = memory_line(ESTIMATE, memory_bytes=None, device="a GPU")
    closed = Gate(plan="p", lines=(transfer_line("fail", ("drift",)), unknown))
    assert (closed.passed, closed.failed) == (False, ("transfer",))
    with pytest.raises(StageError, match=r"transfer: the verdict is 'fail' \(drift\); what was(.|\n)*--force"):
        closed.require(force=False)
    closed.require(force=True)
    later = Gate(plan="p", lines=(transfer_line("pass", ()), disk_line(2, 1, kept=1, place="/")))
    for gate in (closed, later, Gate(plan="another", lines=(check_line(checked(growth=1.0)),))):
        gate.record(ledger)
    assert forced_lines(ledger, "p") == ("transfer", "disk")
    assert forced_lines(ledger, "unforced") == ()
    open_gate = Gate(plan="p", lines=(transfer_line("pass", ()), unknown))
    assert open_gate.passed, "an unknown line does not block"
    open_gate.require(force=False)
    assert Gate.from_dict(json.loads(json.dumps(closed.to_dict()))) == closed


def test_the_gate_is_a_table_with_what_to_do_below_a_line() -> None:
    lines = (transfer_line("fail", ("drift",)), disk_line(1, 2, kept=1, place="/"), check_line(None))
    shown = str(Gate(plan="p", lines=lines)).splitlines()
    assert shown[0] == "gate CLOSED: 1 passed, 1 failed, 1 unknown"
    assert shown[1].split() == ["FAILED", "transfer", "the", "verdict", "is", "'fail'", "(drift)"]
    assert shown[2].lstrip().startswith("→ what was tuned small")
    assert shown[3].startswith("  passed   disk")
    assert len({line.index(word) for line, word in ((shown[1], "the verdict"), (shown[3], "9.31e-10"))}) == 1
