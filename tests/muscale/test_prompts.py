"""A study of supervised fine-tuning: prompts of JSON Lines, given weights, several lengths at one size."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from muscale import StageError, Study, StudyDirectoryError, StudyFileError
from muscale.actors.worker import Worker
from muscale.layout import INITIAL_WEIGHTS
from muscale.settings.corpus import require_fitting_model
from proxy_models.architecture.families import family_of, load
from proxy_models.architecture.family import Loss
from proxy_models.data.batches import evaluation_sets
from proxy_models.training.numerics import key_of_weights
from tests.muscale.test_initial_weights import STUDY, gpt2, opened, shortest
from tests.proxy_models.families import Recurrent
from tests.proxy_models.prompted import prompted_corpus

__all__ = ["gpt2"]  # a fixture
PROMPTS = 'source = "sft.jsonl"\nkind = "jsonl"\nprompt_field = "prompt"\nfield = "completion"'


@pytest.fixture
def study(tmp_path: Path, gpt2: Callable[..., torch.nn.Module]) -> Path:
    """A study of prompts with a word, of which the completion is the reversed word."""
    generator = random.Random(0)
    with (tmp_path / "sft.jsonl").open("w") as output:
        for _ in range(5000):
            word = "".join(generator.choices("abcd", k=generator.randint(2, 6)))
            output.write(json.dumps({"prompt": f"{word} backwards is ", "completion": word[::-1]}) + "\n")
    gpt2(tmp_path / "given")
    path = tmp_path / "study.toml"
    path.write_text(STUDY.replace('source = "text"', PROMPTS))
    return path


def test_a_study_trains_and_evaluates_the_completions_alone(
    study: Path, gpt2: Callable[..., torch.nn.Module], tmp_path: Path
) -> None:
    one = opened(study)
    (files,) = one.corpus.sources.values()
    assert 0.15 < files.counted_share < 0.35
    assert list(one.corpus.table()["counts"]) == [f"{files.counted_share:.1%}"]
    assert not one.corpus.all_count
    assert 0 <= one.check_data().report.share <= 1
    (held_out,) = evaluation_sets(one.corpus, 32, 2048).values()
    network, plain = (
        gpt2(tmp_path / "same"),
        torch.where(held_out.sequences < 0, ~held_out.sequences, held_out.sequences),
    )
    counts = held_out.sequences[:, 1:] >= 0
    with torch.no_grad():
        logits = network(plain[:, :-1]).logits[counts]
        untrained = torch.nn.functional.cross_entropy(logits, plain[:, 1:][counts]).item()
    chain = shortest(one)
    assert chain.numerics.initial_weights == key_of_weights(one.directory / INITIAL_WEIGHTS)
    learned = Worker(one.ledger, compiled=False).reach(chain)
    assert learned.loss is not None
    assert 1.0 < learned.loss < untrained - 1
    key = one.corpus.key
    one.ledger.close()
    again = opened(study)
    assert again.corpus.key == key
    again.ledger.close()
    with pytest.raises(StudyDirectoryError, match=r"corpus\.prompt_field"):
        opened(study, **{"corpus.prompt_field": "completion", "corpus.field": "prompt"})


@pytest.mark.parametrize(
    ("overrides", "error", "named"),
    [
        ({"corpus.prompt_field": "question"}, StageError, ["sft.jsonl: line 1", "'question'"]),
        ({"corpus.prompt_field": "completion"}, StudyFileError, ["corpus:", "prompt_field", "'completion'"]),
        ({"corpus.messages_field": "messages"}, StudyFileError, ["corpus:", "messages_field"]),
        ({"corpus.kind": "text"}, StudyFileError, ["corpus:", "prompt_field", "'text'"]),
        ({"corpus.clean": {"exact_duplicates": "global"}}, StudyFileError, ["corpus.clean:", "prompts"]),
        ({"scores.memorisation": True}, StudyFileError, ["scores.memorisation:", "prompts"]),
        ({"corpus.evaluation_tokens": 10_000_000}, StageError, ["corpus.evaluation_tokens", "10000000"]),
    ],
)
def test_bad_settings_are_refused_with_key_and_value(
    study: Path, overrides: dict[str, Any], error: type[Exception], named: list[str]
) -> None:
    with pytest.raises(error) as refused:
        shortest(opened(study, **overrides))
    assert all(name in str(refused.value) for name in named), refused.value


def test_records_longer_than_the_context_are_warned_of(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (study.parent / "sft.jsonl").open("a") as output:
        output.writelines(json.dumps({"prompt": f"{n} ", "completion": "yes " * 20}) + "\n" for n in range(10))
    one = Study.open(study)
    packing = one.corpus.packing("corpus", "train", 32)
    assert packing is not None
    assert 0 < packing.n_cut <= 10
    assert f"{packing.n_cut} of {packing.n_records:,}" in capsys.readouterr().err
    one.ledger.close()


@dataclass(frozen=True, kw_only=True)
class OwnLoss(Recurrent):
    """A family whose loss takes no weights."""

    @property
    def training_loss(self) -> Loss:
        return lambda model, sequences: model(sequences[:, :-1]).square().mean()


def test_a_family_with_a_loss_that_takes_no_weights_is_refused(tmp_path: Path) -> None:
    corpus = prompted_corpus(tmp_path)
    for family in (Recurrent, OwnLoss):
        made = load(f"{family.__module__}:{family.__name__}")(vocab_size=256, context_length=32)
        member = made.member(32, 1)
        assert family_of(member).has_weighted_losses == (family is Recurrent)
        if family is Recurrent:
            require_fitting_model(corpus, member)
        else:
            with pytest.raises(StageError, match="corpus"):
                require_fitting_model(corpus, member)
