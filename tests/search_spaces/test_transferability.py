from __future__ import annotations

import re
from dataclasses import fields

import pytest

from proxy_models.config import DROPPED
from proxy_models.hyperparameters import Hyperparameters
from search_spaces import TRANSFERABILITY, Axis, SpaceError, Transfer, Transferability, transferability

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


@pytest.mark.parametrize(
    ("name", "transfer", "axes"),
    [
        ("learning_rate", Transfer.BY_LAW, ("horizon", "batch")),
        ("init_scale", Transfer.UNDER_MUP, ()),
        ("embedding_multiplier", Transfer.UNDER_MUP, ()),
        ("output_multiplier", Transfer.UNDER_MUP, ()),
        ("attention_multiplier", Transfer.UNDER_MUP, ()),
        ("weight_decay_tau", Transfer.BY_LAW, ("tokens_per_param",)),
        ("weight_decay", Transfer.BY_LAW, ("horizon", "batch", "tokens_per_param")),
        ("batch_tokens", Transfer.BY_LAW, ("horizon",)),
        ("dropout", Transfer.NEVER, ()),
        ("label_smoothing", Transfer.NEVER, ()),
        ("optimizer", Transfer.MUST_MATCH, ()),
        ("tokenizer", Transfer.MUST_MATCH, ()),
        ("context_length", Transfer.MUST_MATCH, ()),
        ("data_mixture", Transfer.MUST_MATCH, ()),
        ("positions", Transfer.MUST_MATCH, ()),
        ("width_depth_ratio", Transfer.NEVER, ()),
    ],
)
def test_the_classes_follow_the_rule_table(name: str, transfer: Transfer, axes: tuple[Axis, ...]) -> None:
    entry = transferability(name)
    assert (entry.transfer, entry.axes) == (transfer, axes)


@pytest.mark.parametrize("entry", TRANSFERABILITY.values(), ids=lambda entry: entry.name)
def test_every_entry_has_a_reason_and_a_known_source(entry: Transferability) -> None:
    assert entry.reason.endswith(".")
    if entry.source != "assumed" and not entry.source.startswith("measured here: "):
        assert set(entry.source.split(", ")) <= SOURCES
    assert set(re.findall(r"\d{4}\.\d{5}", entry.reason)) <= SOURCES


@pytest.mark.parametrize("name", [field.name for field in fields(Hyperparameters)])
def test_every_hyperparameter_of_training_has_a_class(name: str) -> None:
    assert transferability(name).transfer is not Transfer.NEVER


@pytest.mark.parametrize("name", [*DROPPED, "label_smoothing", "z_loss"])
def test_every_regularizer_of_the_model_is_never_carried_over(name: str) -> None:
    assert transferability(name).transfer is Transfer.NEVER


def test_no_name_stands_twice() -> None:
    from search_spaces.transferability import _ROWS

    assert len(TRANSFERABILITY) == len(_ROWS)


def test_an_unknown_name_is_refused_and_never_assumed() -> None:
    with pytest.raises(SpaceError, match=r"unknown hyperparameter 'learning_rat' \(did you mean 'learning_rate'\?\)"):
        transferability("learning_rat")
    with pytest.raises(SpaceError, match="unknown hyperparameter 'zzz'; known: learning_rate, "):
        transferability("zzz")


@pytest.mark.parametrize(("transfer", "axes"), [(Transfer.BY_LAW, ()), (Transfer.NEVER, ("horizon",))])
def test_a_law_runs_over_axes_and_nothing_else_does(transfer: Transfer, axes: tuple[Axis, ...]) -> None:
    with pytest.raises(SpaceError, match="x: by_law needs axes and no other class takes any"):
        Transferability(name="x", transfer=transfer, axes=axes, reason="It is.", source="assumed")


def test_str_says_it_in_one_line() -> None:
    assert str(transferability("batch_tokens")) == (
        "batch_tokens: by_law over horizon. The optimal and the critical batch follow the tokens of the run, not the"
        " size of the model. [2505.13738]"
    )
