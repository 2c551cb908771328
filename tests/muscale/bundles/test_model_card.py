"""The model card: what went wrong stands in it as plainly as what went well, and nothing in it breaks its layout."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from muscale.bundles.model_card import continuation_card, model_card
from muscale.full_runs.amend.parent import LineageSegment
from muscale.full_runs.amend.train import Amended, Losses
from muscale.full_runs.records.events import Event
from muscale.full_runs.records.goodput import Goodput
from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.config_family import make_family
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import Source
from proxy_models.evaluation.measure import Score
from proxy_models.training.numerics import Numerics
from tests.muscale import planted_ladder
from tests.muscale.planted import large_and_small
from tests.muscale.planted_ladder import PLAN
from tests.proxy_models.families import Recurrent
from tests.proxy_models.prompted import prompted_corpus

PROMOTION = replace(planted_ladder.PROMOTION, loss=1.25, forecast=1.0, low=0.9, high=1.1, level=0.8)
LINEAGE: dict[str, Any] = {"sweep": {"winner": 4, "trials": [{}] * 6}, "fit": None, "caveats": []}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("sources")
    return large_and_small(folder)


def card(corpus: Corpus, **known: Any) -> str:
    model = known.get("plan", PLAN).model
    numerics = Numerics(
        model=model,
        base=known.pop("base", model),
        corpus_key=corpus.key,
        seed=5,
        evaluation_tokens=2048,
        precision="bf16",
        initial_weights=known.pop("initial_weights", None),
    )
    values = {"name": "study", "plan": PLAN, "promotion": PROMOTION, "lineage": LINEAGE, "averaging": None, **known}
    return model_card(numerics=numerics, corpus=corpus, **values)


def test_a_miss_is_shown_with_its_residual_and_its_reasons(corpus: Corpus) -> None:
    text = card(corpus)
    assert "| forecast | 1.0000, 80% interval 0.9000 to 1.1000 |" in text
    assert "| measured | 1.2500, OUTSIDE the interval |" in text
    assert "| residual | +0.2500, +20.00% of the measured loss |" in text
    assert "outside declared support: 99 times the largest run." in text
    assert "inside the interval" in card(corpus, promotion=replace(PROMOTION, loss=1.05))


def test_a_forced_promotion_and_its_caveats_stay_in_it(corpus: Corpus) -> None:
    assert "FORCED" not in card(corpus)
    caveat = "the fit has changed"
    text = card(
        corpus,
        promotion=replace(PROMOTION, forced=True, verdict="fail", forced_lines=("leaks", "by law")),
        lineage={**LINEAGE, "sweep": None, "caveats": [caveat]},
    )
    assert 'the verdict was "fail" when the run was started, and the run was FORCED' in text
    assert "leaks, by law" in text
    assert "FORCED" in card(corpus, promotion=replace(PROMOTION, forced=True))  # recorded without its conditions
    assert "1. Sweep: no longer known." in text
    assert f"Caveat: {caveat}." in text
    fitted = {**LINEAGE, "fit": {"rows": {"data": [1, 2, 3]}, "warnings": ["few runs"]}}
    assert "3. Law: fitted to 3 runs; warnings: few runs." in card(corpus, lineage=fitted)


def test_every_source_stands_with_its_loss_its_epochs_and_its_warning(corpus: Corpus) -> None:
    text = card(corpus, promotion=replace(PROMOTION, source_losses={"large": 1.125, "small": 1.375}))
    epochs = corpus.epochs(PLAN.n_tokens)
    for name, loss in (("large", 1.125), ("small", 1.375)):
        assert f"| measured on {name} | {loss:.4f} |" in text
        assert f"| {name} | {corpus.sources[name].n_tokens:,} | {epochs[name]:.3g} |" in text
    assert f"Warning: small: {epochs['small']:.1f} epochs" in text
    assert "Warning: large" not in text


def test_of_a_source_with_prompts_it_has_the_share_of_the_tokens_that_count(corpus: Corpus, tmp_path: Path) -> None:
    prompted = prompted_corpus(tmp_path)
    text, plain = card(prompted), card(corpus)
    share = f"{prompted.sources['corpus'].counted_share:.1%}"
    epochs = prompted.epochs(PLAN.n_tokens, PLAN.model.context_length)["corpus"]
    assert f"corpus has prompts: {share}" in text
    assert f"| corpus | {prompted.n_tokens:,} | {epochs:.3g} |" in text
    assert "not to follow instructions" in plain
    assert "not to follow instructions" not in text


def test_a_model_from_given_weights_was_trained_on_more_than_the_data_above(corpus: Corpus) -> None:
    text = card(corpus, initial_weights="0123456789abcdef")
    assert "| initial weights | given, with the hash 0123456789abcdef |" in text
    assert "what those were trained on is not known here" in text
    assert "not to follow instructions" not in text


def test_its_commands_are_those_that_work(corpus: Corpus, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(40_000, dtype=np.uint16) % 250)
    tokens = write_corpus(tmp_path / "tokens", Source(path=str(ids), kind="tokens", vocab_size=256))
    assert "muscale generate" in card(corpus)
    assert "muscale generate" not in card(tokens)


def test_only_a_depth_whose_blocks_have_no_multiplier_is_offered_for_export(
    corpus: Corpus, transformers: ModuleType
) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    family = make_family("transformers:LlamaConfig", transformers.LlamaConfig)(
        **{"vocab_size": 300, "context_length": 32, **sizes}
    )
    model = family.member(32, 2)
    assert "--to transformers" in card(corpus, plan=replace(PLAN, model=model))
    assert "--to transformers" not in card(corpus, plan=replace(PLAN, model=model), base=family.member(32, 1))


def test_averages_are_listed_with_the_last_weights(corpus: Corpus) -> None:
    text = card(corpus, averaging={"checkpoints": [1, 2, 3], "averaged_loss": 1.2, "loss": 1.25})
    assert "| average of the last 3 checkpoints | 1.2000, beside 1.2500 of the last weights |" in text
    assert "average of" not in card(corpus)


def test_what_a_user_chose_can_t_break_out_of_its_place(corpus: Corpus) -> None:
    name = "evil\n# heading | <script>alert(1)</script>"
    text = card(corpus, name=name)
    assert text.startswith("# evil # heading \\| &lt;script&gt;alert(1)&lt;/script&gt;\n")


def test_its_tables_are_tables(corpus: Corpus) -> None:
    """A line of a table has as many cells as its head, and no blank line stands within."""
    text = card(corpus, promotion=replace(PROMOTION, source_losses={"large": 1.125}))
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len(table) > 2
        assert {line.count("|") for line in table} == {table[0].count("|")}


def test_the_variants_that_are_on_are_named(corpus: Corpus) -> None:
    text = card(corpus)
    assert "4 heads of 16, 2 for keys and values" in text
    assert "positions rotary, norm of queries and keys, tied table |" in text


def test_a_mixture_has_its_experts_and_an_export_only_if_a_layout_holds_it(corpus: Corpus) -> None:
    mixture = replace(
        as_decoder(PLAN.model), d_model=64, mlp_ratio=2.0, n_experts=8, expert_ratio=0.5, n_shared_experts=1
    )
    glm = card(corpus, plan=replace(PLAN, model=replace(mixture, tied=False, first_dense_layers=1)))
    assert "MLP of 128 in the first 1 blocks |" in glm
    assert (
        "| experts | 8 of width 32 in a block, 2 of them for a token by sigmoid scores, and 1 for every token;" in glm
    )
    assert "--to llama" in glm
    softmax = card(corpus, plan=replace(PLAN, model=replace(mixture, n_shared_experts=0, router_scores="softmax")))
    assert "MLP of" not in softmax
    assert "--to llama" not in softmax
    assert "model.balance_rate must be 0" in softmax


def test_events_have_a_section_where_there_were_any(corpus: Corpus) -> None:
    assert "Events of the run" not in card(corpus)
    event = Event(at="2026-01-01T00:00:05+00:00", kind="skip", message="step 9: skip: the loss\nis nan")
    text = card(corpus, promotion=replace(PROMOTION, run_events=(event,)))
    assert "\n- 2026-01-01 00:00:05 step 9: skip: the loss is nan\n" in text
    assert "\n\n## Lineage\n" in text


def test_a_continuation_of_a_family_of_one_s_own_names_it(corpus: Corpus) -> None:
    model = Recurrent(vocab_size=300, context_length=32).member(32, 2)
    numerics = Numerics(model=model, base=model, corpus_key=corpus.key, seed=5, evaluation_tokens=2048)
    numbers: dict[str, Any] = {"tokens": 1024, "position": 0, "seed": 5, "evaluation_tokens": 2048}
    of_corpus: dict[str, Any] = {"corpus": corpus.key, "folder": "corpus", "sources": {}}
    done = Amended(
        key="fedcba9876543210",
        name="code",
        lineage=(LineageSegment(run="fedcba9876543210", name="code", **numbers, **of_corpus),),
        before=Losses(own=2.0, sources={}, earlier={"a | b": 1.25}),
        after=Losses(own=1.5, sources={}, earlier={"a | b": 1.75}),
        started_at="2026-01-01T00:00:00+00:00",
        finished_at="2026-01-01T00:00:05+00:00",
        world_size=1,
        seconds=5.0,
        goodput=Goodput(wall=5.0, steps=4.0, evaluation=1.0, blocked=0.0, repeated=0.0),
    )
    text = continuation_card(None, study="study", done=done, numerics=numerics, corpus=corpus, n_tokens=1024)
    assert f"of the family {Recurrent.__module__}:Recurrent |" in text
    assert "| a \\| b | 1.2500 | 1.7500 |" in text


def test_scores_that_were_measured_stand_in_it(corpus: Corpus) -> None:
    score = Score(measure="tasks", name="arithmetic", metric="accuracy", value=0.625, standard_error=0.01, n=100)
    assert "| tasks | arithmetic | accuracy | 0.625 |" in card(corpus, scores=[score])
    assert "arithmetic" not in card(corpus)
