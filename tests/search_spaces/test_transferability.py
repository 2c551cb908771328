from __future__ import annotations

import re
from dataclasses import fields

import pytest

from proxy_models.architecture.member import DROPPED
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import TRANSFERABILITY, Axis, SpaceError, Transferability, TransferClass, transferability

# The arXiv ids that the rule table of the project cites, Kaplan et al. and RegMix.
SOURCES = {
    "2001.08361",
    "2203.03466",
    "2405.13698",
    "2407.01492",
    "2407.05872",
    "2409.19913",
    "2505.01618",
    "2505.13738",
    "2510.15262",
    "2512.22382",
}


# Every class a second time, written out: a name that changes its class by accident transfers where it must not.
UNDER_MUP = """init_scale embedding_multiplier output_multiplier attention_multiplier embedding_rate output_rate eps
    warmup_fraction cooldown_fraction final_fraction milestones step_factor cycles stages clip_norm swap_fraction"""
MUST_MATCH = """zero_readout optimizer swap_optimizer schedule activation norm qk_norm positions rotary_fraction rope_theta
    document_separator attention_window global_attention_every norm_eps parallel tied biases queries_per_kv mlp_ratio
    n_experts experts_per_token expert_ratio head_dim context_length tokenizer data_mixture"""
NEVER = """batch_tokens_per_gpu dropout attention_dropout mlp_dropout embedding_dropout label_smoothing stochastic_depth z_loss
    width_depth_ratio"""
BY_LAW: dict[str, tuple[Axis, ...]] = {
    "learning_rate": ("horizon", "batch"),
    "swap_learning_rate": ("horizon", "batch"),
    "weight_decay_tau": ("tokens_per_param",),
    "weight_decay": ("horizon", "batch", "tokens_per_param"),
    "beta1": ("batch",),
    "beta2": ("batch",),
    "warmup_tokens": ("horizon",),
    "warmup_floor_tokens": ("horizon",),
    "warmup_steps": ("horizon", "batch"),
    "batch_tokens": ("horizon",),
    "batch_doublings": ("horizon",),
    "batch_ramp_tokens": ("horizon",),
}


def test_the_classes_follow_the_rule_table() -> None:
    listed = {TransferClass.UNDER_MUP: UNDER_MUP, TransferClass.MUST_MATCH: MUST_MATCH, TransferClass.NEVER: NEVER}
    classes = {name: transfer for transfer, names in listed.items() for name in names.split()}
    assert {name: entry.transfer for name, entry in TRANSFERABILITY.items()} == {
        **classes,
        **dict.fromkeys(BY_LAW, TransferClass.BY_LAW),
    }
    assert {name: entry.axes for name, entry in TRANSFERABILITY.items() if entry.axes} == BY_LAW


@pytest.mark.parametrize("entry", TRANSFERABILITY.values(), ids=lambda entry: entry.name)
def test_every_entry_has_a_reason_and_a_known_source(entry: Transferability) -> None:
    assert entry.reason.endswith(".")
    if entry.source != "assumed" and not entry.source.startswith("measured here: "):
        assert set(entry.source.split(", ")) <= SOURCES
    assert set(re.findall(r"\d{4}\.\d{5}", entry.reason)) <= SOURCES


@pytest.mark.parametrize("name", [field.name for field in fields(Hyperparameters)])
def test_every_hyperparameter_of_training_has_a_class(name: str) -> None:
    assert transferability(name).transfer is not TransferClass.NEVER


@pytest.mark.parametrize("name", [*DROPPED, "label_smoothing", "z_loss"])
def test_no_regularizer_of_the_model_transfers(name: str) -> None:
    assert transferability(name).transfer is TransferClass.NEVER


def test_no_name_stands_twice() -> None:
    from search_spaces.transferability import _ROWS

    assert len(TRANSFERABILITY) == len(_ROWS)


def test_an_unknown_name_is_refused_and_never_assumed() -> None:
    with pytest.raises(SpaceError, match=r"unknown hyperparameter 'learning_rat' \(did you mean 'learning_rate'\?\)"):
        transferability("learning_rat")
    with pytest.raises(SpaceError, match="unknown hyperparameter 'zzz'; known: learning_rate, "):
        transferability("zzz")


@pytest.mark.parametrize(("transfer", "axes"), [(TransferClass.BY_LAW, ()), (TransferClass.NEVER, ("horizon",))])
def test_a_law_runs_over_axes_and_nothing_else_does(transfer: TransferClass, axes: tuple[Axis, ...]) -> None:
    with pytest.raises(SpaceError, match="x: by_law"):
        Transferability(name="x", transfer=transfer, axes=axes, reason="It is.", source="assumed")


def test_str_is_one_line() -> None:
    assert str(transferability("batch_tokens")) == (
        "batch_tokens: by_law over horizon. The optimal and the critical batch follow the tokens of the run, not the"
        " size of the model. [2505.13738]"
    )
