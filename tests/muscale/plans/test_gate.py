"""Every line of the gate passes, fails with what to do, or is unknown; what was forced is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from muscale import StageError
from muscale.actors.corpus_hashes import changed_files
from muscale.plans.device_lines import disk_line, memory_line
from muscale.plans.gate import (
    Gate,
    GateLine,
    check_line,
    context_line,
    data_line,
    forced_lines,
    forecast_line,
    hyperparameters_line,
    precision_line,
    require_check,
    transfer_line,
)
from muscale.plans.provenance import HyperparameterProvenance
from muscale.store.ledger import Ledger
from proxy_models.architecture.config import ModelConfig
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from tests.muscale.conftest import write_text
from tests.muscale.planted import planted_check, planted_fit

HASHES = {"corpus": "aa", "tokenizer": "bytes"}


def test_only_a_passed_transfer_check_passes() -> None:
    assert transfer_line("pass", ()) == GateLine(name="transfer", status="passed", compared="the verdict is 'pass'")
    assert transfer_line("pass", (), tied_reach=2.0).advice == ""
    far = transfer_line("pass", (), tied_reach=8.0)
    assert far.status == "passed"
    assert "8×" in far.advice
    assert "transfer.widths" in far.advice
    drifts = transfer_line("fail", ("the optimum drifts by 1.2 octaves",))
    assert drifts.status == "failed"
    assert "drifts by 1.2 octaves" in drifts.compared
    assert "parametrization" in drifts.advice
    unsettled = transfer_line("not enough evidence", ("two widths",), "--set transfer.seeds=[0,1]")
    assert unsettled.status == "failed"
    assert unsettled.advice == "settle it: muscale transfer --set transfer.seeds=[0,1]"


def test_the_coordinate_check_fails_where_a_module_breaks_its_bound() -> None:
    assert check_line(planted_check(growth=0.0)).status == "passed"
    broken = check_line(planted_check(growth=1.0))
    assert broken.status == "failed"
    assert "`muscale check` names the modules" in broken.advice
    missing = check_line(None)
    assert (missing.status, missing.advice) == ("unknown", "run `muscale check`")
    require_check(planted_check(growth=0.0), force=False)
    require_check(planted_check(growth=1.0), force=True)
    with pytest.raises(StageError, match=r"coordinate check: FAILED(.|\n)*--force"):
        require_check(planted_check(growth=1.0), force=False)


def test_an_unsupported_forecast_is_reported_and_does_not_block() -> None:
    near, far = (replace(planted_fit().forecast(10_000, 262_144), reasons=reasons) for reasons in ((), ("E is high",)))
    assert forecast_line(near).advice == ""
    line = forecast_line(far)
    assert line.status == "passed"
    assert "E is high" in line.compared
    assert line.advice


def test_data_and_tokenizer_are_compared_by_hash() -> None:
    same = data_line(HASHES, HASHES, [], 10**9)
    assert (same.status, same.compared) == ("passed", "corpus aa, tokenizer bytes, 1 GB hashed again")
    other = data_line(HASHES, {"corpus": "bb", "tokenizer": "t"}, [], 1)
    assert other.status == "failed"
    assert other.compared == "corpus aa planned, bb here; tokenizer bytes planned, t here"
    damaged = data_line(HASHES, HASHES, ["train.bin"], 1)
    assert damaged.status == "failed"
    assert "train.bin" in damaged.compared
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
        "2 by rule or fixed; explicit: mlp_dropout = 0.2; from the study file at every size: z_loss = 0.0001"
    )


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
    for window, is_new in ((2047, False), (2048, True), (8191, True), (8192, False)):
        one, two = (replace(model, attention_window=window) for model in (longer, proxies))
        assert ("attention_window" in context_line(one, two).compared) is is_new
        assert context_line(two, two).advice == ""
    wider, narrower = replace(longer, attention_window=1024), replace(proxies, attention_window=512)
    assert context_line(wider, narrower).compared.endswith("; attention_window 1,024, 512 in proxies")


def test_the_gate_lets_through_what_passed_or_was_forced_and_the_ledger_keeps_which(ledger: Ledger) -> None:
    unknown = memory_line(None, memory_bytes=None, device="a GPU")
    closed = Gate(plan="p", lines=(transfer_line("fail", ("drift",)), unknown))
    assert (closed.passed, closed.failed) == (False, ("transfer",))
    with pytest.raises(StageError, match=r"transfer: the verdict is 'fail' \(drift\)(.|\n)*--force"):
        closed.require(force=False)
    closed.require(force=True)
    later = Gate(plan="p", lines=(transfer_line("pass", ()), disk_line(2, 1, kept=1, place="/")))
    for gate in (closed, later, Gate(plan="another", lines=(check_line(planted_check(growth=1.0)),))):
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
    assert shown[2].lstrip().startswith("→")
    assert shown[3].startswith("  passed   disk")
    assert len({line.index(word) for line, word in ((shown[1], "the verdict"), (shown[3], "9.31e-10"))}) == 1
