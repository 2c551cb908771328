"""Everything here is compared bit for bit: a result is known by what determines it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from proxy_models.architecture.config import as_decoder
from proxy_models.architecture.decoder import Decoder, next_token_loss, training_loss
from proxy_models.architecture.experts import counts_of, load_of, routing_figures, take_counts
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.family import FamilyError
from proxy_models.architecture.parametrization import OptimizerName
from proxy_models.data.batches import TokenStream, evaluation_sequences
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_mixture, write_remixed
from proxy_models.data.mixture import Mixture, MixtureStage
from proxy_models.data.sources import Source
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import Segment, branch, chain, stem
from proxy_models.training.guard_settings import GuardSettings
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import clip, initialize, make_optimizer, set_rates
from proxy_models.training.state import StateError, TrainState
from proxy_models.training.step import step_seed
from proxy_models.training.trainer import SegmentResult, Trainer
from tests.proxy_models.families import Network, Recurrent

BATCH = 4 * 32
N_TOKENS = 40 * BATCH
AssertSame = Callable[[SegmentResult, SegmentResult], None]


class CountingNetwork(Network):
    """Network with a persistent buffer that changes from the third forward pass on."""

    late: Tensor

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__(vocab_size, width, depth)
        self.passes = 0
        self.register_buffer("late", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.passes += self.training
        self.late += self.passes >= 3
        return super().forward(tokens)


class Counting(Recurrent):
    """Family of such networks."""

    def build(self, width: int, depth: int) -> Network:
        return CountingNetwork(self.vocab_size, width, depth)


def test_a_family_whose_buffers_change_from_the_third_step_on_is_refused_at_the_end_of_its_segment(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    model = Counting(vocab_size=256, context_length=32).member(16, 1)
    (segment,) = chain(replace(hyperparameters, schedule="linear"), 4 * BATCH)
    with pytest.raises(FamilyError):
        trainer.train(replace(numerics, model=model, base=model), segment)


def with_experts(numerics: Numerics, **change: Any) -> Numerics:
    model = replace(as_decoder(numerics.model), n_experts=4, expert_ratio=1.0, **change)
    return replace(numerics, model=model, base=model)


def train_chain(trainer: Trainer, numerics: Numerics, segments: tuple[Segment, ...]) -> list[SegmentResult]:
    results: list[SegmentResult] = []
    for segment in segments:
        results.append(trainer.train(numerics, segment, results[-1].state if results else None))
    return results


def test_training_is_the_loop_written_out(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    (segment,) = chain(replace(hyperparameters, schedule="linear"), 10 * BATCH)
    result = trainer.train(replace(numerics, seed=3), segment)
    model, recipe = Decoder(as_decoder(numerics.model)), segment.recipe
    initialize(model, numerics.parametrization("adamw"), recipe, seed=3)
    optimizer = make_optimizer(model, numerics.parametrization("adamw"), recipe)
    stream = TokenStream(tokens=trainer.corpus.train, context_length=32, seed=3)
    losses = []
    for step in range(10):
        loss = next_token_loss(model, stream.batch(step * BATCH, BATCH))
        loss.backward()  # type: ignore[no-untyped-call]
        clip(model.parameters(), recipe.clip_norm)
        set_rates(optimizer, segment.phase.factor(step * BATCH, BATCH))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert result.curve.train_loss.tolist() == losses
    assert result.state is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(result.state.tensors[f"weight/{name}"], parameter.detach()), name
    with torch.no_grad():
        evaluated = next_token_loss(model, evaluation_sequences(trainer.corpus.validation, 32, 16 * 32))
    assert result.loss == pytest.approx(evaluated.item(), rel=1e-6)


def test_it_learns(trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters) -> None:
    stable, annealed = train_chain(trainer, numerics, chain(hyperparameters, N_TOKENS))
    assert stable.curve.train_loss[0] > 5
    assert stable.loss is not None
    assert annealed.loss is not None
    assert annealed.loss < stable.loss < 3.5
    assert annealed.source_losses == {}, "of one source alone"


def test_a_branch_from_a_rung_is_the_run_planned_for_that_length(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, assert_same: AssertSame
) -> None:
    recipe = hyperparameters.resolve(N_TOKENS)
    rung = 17 * BATCH
    n_tokens = hyperparameters.annealed_tokens(rung)
    planned = train_chain(trainer, numerics, branch(recipe, rung, n_tokens))[-1]
    # The stem in pieces, on past the rung, and the branch from the state that was kept there.
    first = trainer.train(numerics, stem(recipe, 5 * BATCH))
    piece = replace(stem(recipe, rung), start=5 * BATCH)
    at_rung = trainer.train(numerics, piece, first.state, averaged=True)
    trainer.train(numerics, replace(stem(recipe, 25 * BATCH), start=rung), at_rung.state)
    assert_same(trainer.train(numerics, branch(recipe, rung, n_tokens)[1], at_rung.state), planned)


def dropping(numerics: Numerics) -> Numerics:
    """The same with every kind of randomness, and a loss of its own for training."""
    model = replace(
        as_decoder(numerics.model),
        attention_dropout=0.1,
        mlp_dropout=0.1,
        embedding_dropout=0.1,
        stochastic_depth=0.2,
        label_smoothing=0.1,
        z_loss=1e-4,
    )
    return replace(numerics, model=model, base=model)


@pytest.mark.parametrize(
    ("schedule", "change"),
    [
        ("cosine", {}),
        ("exponential", {"random": True}),
        ("step", {"precision": "bf16"}),
        ("linear", {"precision": "fp16"}),
        (
            "linear",
            {"guard": GuardSettings(action="rewind", window=8, threshold=0.01, max_spikes=20, snapshot_every=3)},
        ),
        ("linear", {"ramp": True}),
        ("cosine", {"experts": True}),
    ],
    ids=["plain", "random", "bf16", "fp16", "guarded", "ramp", "experts"],
)
def test_resuming_from_disk_is_the_uninterrupted_run(
    trainer: Trainer,
    numerics: Numerics,
    hyperparameters: Hyperparameters,
    corpus: Corpus,
    tmp_path: Path,
    schedule: Any,
    change: dict[str, Any],
    assert_same: AssertSame,
) -> None:
    if change.pop("random", False):
        numerics = dropping(numerics)
    if change.pop("experts", False):
        numerics = with_experts(numerics)
    ramp: dict[str, Any] = {"batch_doublings": 2, "batch_ramp_tokens": 8 * BATCH} if change.pop("ramp", False) else {}
    numerics = replace(numerics, **change)
    # With the guard: so high a rate, and so touchy, that some of the twenty steps are left out.
    learning_rate = 0.3 if numerics.guard else 0.01
    (whole,) = chain(replace(hyperparameters, learning_rate=learning_rate, schedule=schedule, **ramp), 20 * BATCH)
    uninterrupted = trainer.train(numerics, whole)
    assert (len(uninterrupted.spikes) > 0) == bool(numerics.guard)
    half = trainer.train(numerics, replace(whole, end=7 * BATCH))
    assert half.state is not None
    half.state.save(tmp_path / "states" / "half.pt")
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["half.pt"]
    state = TrainState.load(tmp_path / "states" / "half.pt")
    torch.manual_seed(1234)  # the process that resumes is in another state
    resumed = Trainer(corpus, compile=False).train(numerics, replace(whole, start=7 * BATCH), state)
    assert_same(resumed, uninterrupted)
    assert np.array_equal(
        np.concatenate([half.curve.train_loss, resumed.curve.train_loss]), uninterrupted.curve.train_loss
    )
    assert half.spikes + resumed.spikes == uninterrupted.spikes


def test_training_minimises_the_training_loss_and_evaluation_is_next_token_loss_without_dropout(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    recipe = hyperparameters.resolve(N_TOKENS)
    random = dropping(numerics)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    result = trainer.train(random, stem(recipe, BATCH))
    assert torch.equal(torch.get_rng_state(), before)
    model = Decoder(as_decoder(random.model))
    initialize(model, random.parametrization(recipe.optimizer), recipe, seed=0)
    stream = TokenStream(tokens=trainer.corpus.train, context_length=32, seed=0)
    torch.manual_seed(step_seed(0, 0, 0))
    assert result.curve.train_loss[0] == training_loss(model, stream.batch(0, BATCH)).item()
    assert result.state is not None
    model.load_state_dict(
        {n.removeprefix("weight/"): t for n, t in result.state.tensors.items() if n.startswith("weight/")}
    )
    model.eval()
    with torch.no_grad():
        expected = next_token_loss(model, evaluation_sequences(trainer.corpus.validation, 32, 16 * 32)).item()
    assert result.loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_learn_like_fp32_and_are_not_it(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, precision: Any
) -> None:
    segment = stem(hyperparameters.resolve(N_TOKENS), 20 * BATCH)
    exact, rounded = (trainer.train(replace(numerics, precision=p), segment) for p in ("fp32", precision))
    assert rounded.curve.train_loss == pytest.approx(exact.curve.train_loss, rel=0.02)
    assert rounded.loss != exact.loss


def test_micro_batches_train_the_same_run(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, corpus: Corpus
) -> None:
    segment = stem(hyperparameters.resolve(N_TOKENS), 10 * BATCH)
    whole = trainer.train(numerics, segment)
    for micro_batch in (1, 3):  # 4 sequences: 1 + 1 + 1 + 1 and 3 + 1
        parts = Trainer(corpus, compile=False, micro_batch=micro_batch).train(numerics, segment)
        assert parts.curve.train_loss == pytest.approx(whole.curve.train_loss, rel=1e-4)
        assert parts.loss == pytest.approx(whole.loss, rel=1e-4)
    with pytest.raises(ValueError, match="micro_batch must.*1 sequence, got 0"):
        Trainer(corpus, micro_batch=0)


def test_a_batch_ramp_sees_every_sequence_once_in_order(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    batch = TokenStream.batch

    def note(stream: TokenStream, tokens_seen: int, batch_tokens: int, **share: int) -> torch.Tensor:
        seen.append((tokens_seen, batch_tokens))
        return batch(stream, tokens_seen, batch_tokens, **share)

    monkeypatch.setattr(TokenStream, "batch", note)
    ramp = replace(hyperparameters, batch_doublings=2, batch_ramp_tokens=4 * BATCH)
    result = trainer.train(numerics, stem(ramp.resolve(N_TOKENS), 6 * BATCH))
    assert [size for _, size in seen] == [32] * 8 + [64] * 4 + [128] * 2
    assert [tokens for tokens, _ in seen[1:]] == result.curve.tokens[:-1].tolist()
    with pytest.raises(ValueError, match="must be a multiple of context_length=32, got 16"):
        ramp = replace(ramp, batch_doublings=3)
        trainer.train(numerics, stem(ramp.resolve(N_TOKENS), 6 * BATCH))


def test_a_curve_has_every_step(trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters) -> None:
    segment = stem(hyperparameters.resolve(N_TOKENS), 12 * BATCH)
    curve = trainer.train(numerics, segment).curve
    assert curve.tokens.tolist() == [BATCH * (n + 1) for n in range(12)]
    assert (curve.grad_norm > 0).all()
    assert curve.rate_factor.tolist() == [segment.rate_factor(BATCH * n) for n in range(12)]
    assert (np.diff(curve.seconds) > 0).all()


def test_an_interrupted_step_leaves_nothing_behind(
    trainer: Trainer,
    numerics: Numerics,
    hyperparameters: Hyperparameters,
    monkeypatch: pytest.MonkeyPatch,
    assert_same: AssertSame,
) -> None:
    segment = stem(hyperparameters.resolve(N_TOKENS), 4 * BATCH)
    expected = trainer.train(numerics, segment)

    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("proxy_models.training.step.clip", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(numerics, segment)
    assert_same(trainer.train(numerics, segment), expected)


def test_a_curve_of_experts_shows_their_loads_and_the_state_has_the_biases(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    (segment,) = chain(replace(hyperparameters, schedule="linear"), 10 * BATCH)
    result = trainer.train(with_experts(numerics, balance_rate=0.01), segment)
    assert result.state is not None
    biases = [tensor for name, tensor in result.state.tensors.items() if name.startswith("buffer/")]
    assert len(biases) == 2
    assert all(bias.abs().max() <= 10.5 * 0.01 and bias.any() for bias in biases)
    table = result.curve.table()
    assert table["router_entropy"].between(0, np.log(4)).all()
    assert table["largest_load"].between(1, 2).all()  # of two experts for each token, none has more than all tokens
    assert table["dead_experts"].between(0, 4).all()
    assert not set(trainer.train(numerics, segment).curve.table()) & {"router_entropy", "largest_load", "dead_experts"}
    del result.state.tensors["buffer/blocks.1.mlp.router.balance_bias"]
    with pytest.raises(StateError, match=r"blocks\.1\.mlp\.router\.balance_bias"):
        trainer.train(
            with_experts(numerics, balance_rate=0.01),
            replace(chain(replace(hyperparameters, schedule="linear"), 20 * BATCH)[0], start=10 * BATCH),
            result.state,
        )


def test_the_guard_ends_a_run_at_once_and_leaves_a_quiet_one_alone(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    guarded = replace(numerics, guard=GuardSettings())
    segment = stem(hyperparameters.resolve(200 * BATCH), 40 * BATCH)
    quiet = trainer.train(guarded, segment)
    assert quiet.spikes == ()
    assert quiet.loss == trainer.train(numerics, segment).loss
    loud = stem(replace(hyperparameters, learning_rate=1e30).resolve(200 * BATCH), 40 * BATCH)
    result = trainer.train(guarded, loud)
    assert result.divergence is not None
    assert (result.state, result.loss) == (None, None)
    assert len(result.curve.train_loss) == result.divergence.step + 1 < 10


def test_a_state_is_not_changed_by_going_on_from_it(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    first, second = chain(hyperparameters, 20 * BATCH)
    state = trainer.train(numerics, first, averaged=True).state
    assert state is not None
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    trainer.train(numerics, second, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors.items())


@pytest.mark.parametrize("experts", [False, True])
def test_a_reused_trainer_is_a_fresh_one(
    family: ModelFamily,
    numerics: Numerics,
    hyperparameters: Hyperparameters,
    corpus: Corpus,
    assert_same: AssertSame,
    experts: bool,
) -> None:
    if experts:
        numerics = with_experts(numerics, balance_rate=0.05)
        family = ModelFamily(base=as_decoder(numerics.model))
    segment = stem(hyperparameters.resolve(N_TOKENS), 12 * BATCH)
    fresh = Trainer(corpus, compile=False).train(numerics, segment, averaged=True)
    used = Trainer(corpus, compile=False)
    other = replace(
        hyperparameters, learning_rate=0.1, init_scale=2.0, embedding_multiplier=3.0, output_multiplier=0.1, beta2=0.5
    )
    loud = stem(other.resolve(N_TOKENS), 5 * BATCH)
    used.train(numerics, loud)
    used.train(replace(numerics, model=family.at(width=64, depth=1), seed=3), loud)
    used.train(numerics, stem(replace(other, learning_rate=1e30).resolve(N_TOKENS), 3 * BATCH))
    for number in range(5):  # more shapes than stay warm
        used.train(replace(numerics, model=family.at(width=16, depth=number + 1)), stem(loud.recipe, BATCH))
        assert_same(used.train(numerics, segment, averaged=True), fresh)


def test_seed_and_base_change_the_run(
    trainer: Trainer, family: ModelFamily, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    segment = stem(hyperparameters.resolve(N_TOKENS), 3 * BATCH)
    others = [numerics, replace(numerics, seed=1), replace(numerics, base=family.at(width=16))]
    assert len({trainer.train(other, segment).loss for other in others}) == 3


def test_the_averaged_loss_is_that_of_the_weights_averaged_by_hand(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    # 15 % of 20 steps: the weights after steps 18, 19 and 20.
    recipe = hyperparameters.resolve(N_TOKENS)
    result = trainer.train(numerics, stem(recipe, 20 * BATCH), averaged=True)
    model = Decoder(as_decoder(numerics.model))
    initialize(model, numerics.parametrization("adamw"), recipe, seed=0)
    ends = [trainer.train(numerics, stem(recipe, n * BATCH)).state for n in (18, 19, 20)]
    weights = [{n: t for n, t in state.tensors.items() if n.startswith("weight/")} for state in ends if state]
    model.load_state_dict({n.removeprefix("weight/"): sum(w[n] for w in weights) / 3 for n in weights[0]})
    with torch.no_grad():
        expected = next_token_loss(model, evaluation_sequences(trainer.corpus.validation, 32, 16 * 32)).item()
    assert result.averaged_loss == pytest.approx(expected, rel=1e-6)
    assert result.averaged_loss != pytest.approx(result.loss, rel=1e-4)


def test_on_step_hears_of_progress(trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters) -> None:
    reports: list[tuple[int, float]] = []
    result = trainer.train(
        numerics, stem(hyperparameters.resolve(50 * BATCH), 40 * BATCH), on_step=lambda *report: reports.append(report)
    )
    assert [tokens for tokens, _ in reports] == [32 * BATCH, 40 * BATCH]
    assert [loss for _, loss in reports] == result.curve.train_loss[[31, 39]].tolist()


@pytest.fixture(scope="module")
def mixed(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("mixed")
    (root / "digits").mkdir()
    for number in range(40):
        (root / "digits" / f"{number}.txt").write_text(" ".join(str(number * n) for n in range(200)))
    sources = {"words": Source(path=corpus.manifest["source"]["path"]), "digits": Source(path=str(root / "digits"))}
    mixture = Mixture.constant({"words": 0.75, "digits": 0.25})
    return write_mixture(root / "tokens", sources, mixture, validation_fraction=0.25)


@pytest.mark.parametrize("by_fraction", [True, False])
def test_the_guard_takes_no_step_after_a_change_of_the_data_for_a_spike(
    mixed: Corpus, tmp_path: Path, numerics: Numerics, hyperparameters: Hyperparameters, by_fraction: bool
) -> None:
    ends = {"until_fraction": 0.75} if by_fraction else {"until_tokens": 30 * BATCH}
    first = MixtureStage(weights={"words": 1.0, "digits": 0.0}, **ends)
    last = MixtureStage(weights={"words": 0.0, "digits": 1.0})
    staged = write_remixed(mixed, tmp_path / "staged", Mixture(stages=(first, last)))
    guard = GuardSettings(window=16)
    numerics = replace(numerics, corpus_key=staged.key, guard=guard, stages_by_fraction=by_fraction)
    result = Trainer(staged, compile=False).train(
        numerics.for_run(40 * BATCH), stem(hyperparameters.resolve(40 * BATCH), 40 * BATCH)
    )
    assert (result.spikes, result.divergence) == ((), None)
    before, after = result.curve.train_loss[26:30], result.curve.train_loss[30:34]
    assert min(after) > max(before) + guard.threshold * 0.05, "a jump that a guard without the change would refuse"


def test_the_losses_of_a_mixture_s_sources_are_kept_and_their_weighted_sum_is_the_loss(
    mixed: Corpus, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    trainer = Trainer(mixed, compile=False)
    numerics = replace(numerics, corpus_key=mixed.key)
    segment = stem(hyperparameters.resolve(N_TOKENS), 10 * BATCH)
    result = trainer.train(numerics, segment, averaged=True)
    assert result.state is not None
    model = Decoder(as_decoder(numerics.model))
    initialize(model, numerics.parametrization("adamw"), segment.recipe, seed=0)
    model.load_state_dict(
        {n.removeprefix("weight/"): t for n, t in result.state.tensors.items() if n.startswith("weight/")}
    )
    assert result.source_losses.keys() == {"words", "digits"}
    for name, files in mixed.sources.items():
        with torch.no_grad():
            expected = next_token_loss(model, evaluation_sequences(files.validation, 32, 8 * 32)).item()
        assert result.source_losses[name] == pytest.approx(expected, rel=1e-6)
    parts = result.source_losses
    assert result.loss == 0.75 * parts["words"] + 0.25 * parts["digits"]
    assert parts["words"] != pytest.approx(parts["digits"], rel=0.01)
    loud = stem(replace(hyperparameters, learning_rate=1e30).resolve(N_TOKENS), BATCH)
    assert trainer.train(numerics, loud).source_losses == {}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("optimizer", ["adam", "lion", "adafactor", "muon", "lamb", "soap"])
def test_every_optimizer_learns_and_resumes_bit_for_bit(
    trainer: Trainer,
    numerics: Numerics,
    hyperparameters: Hyperparameters,
    optimizer: OptimizerName,
    experts: bool,
    tmp_path: Path,
    assert_same: AssertSame,
) -> None:
    numerics = with_experts(numerics) if experts else numerics
    rate = 0.05 if optimizer in ("adafactor", "lamb") else 0.003
    (whole,) = chain(replace(hyperparameters, schedule="cosine", optimizer=optimizer, learning_rate=rate), 30 * BATCH)
    uninterrupted = trainer.train(numerics, whole)
    assert uninterrupted.curve.train_loss[-5:].mean() < uninterrupted.curve.train_loss[:5].mean() - 0.3
    half = trainer.train(numerics, replace(whole, end=7 * BATCH))
    assert half.state is not None
    half.state.save(tmp_path / "half.pt")
    resumed = trainer.train(numerics, replace(whole, start=7 * BATCH), TrainState.load(tmp_path / "half.pt"))
    assert_same(resumed, uninterrupted)


class AveragingNetwork(Network):
    """Network that keeps a running mean of its tokens, as a family may with state in buffers."""

    mean: Tensor
    seen: Tensor

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__(vocab_size, width, depth)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(tokens.float().mean())
        return super().forward(tokens) * (1 + self.mean)


class Averaging(Recurrent):
    """Family of such networks."""

    state_buffers = ("mean",)

    def build(self, width: int, depth: int) -> Network:
        return AveragingNetwork(self.vocab_size, width, depth)

    def end_step(self, model: Any, member: Any, *, taken: Any, mean: Any) -> dict[str, Tensor]:
        model.mean.lerp_(mean(model.seen) / self.vocab_size, 0.1 * float(taken))
        return {"mean": model.mean.clone()}


def test_a_family_s_own_state_in_buffers_is_kept_between_segments(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters, assert_same: AssertSame
) -> None:
    model = Averaging(vocab_size=256, context_length=32).member(16, 1)
    numerics = replace(numerics, model=model, base=model)
    (whole,) = chain(replace(hyperparameters, schedule="linear"), 12 * BATCH)
    uninterrupted = trainer.train(numerics, whole)
    half = trainer.train(numerics, replace(whole, end=5 * BATCH))
    resumed = trainer.train(numerics, replace(whole, start=5 * BATCH), half.state)
    assert_same(resumed, uninterrupted)
    means = np.concatenate([half.curve.figures["mean"], resumed.curve.figures["mean"]])
    assert np.all(np.diff(means) > 0)
    assert np.array_equal(means, uninterrupted.curve.figures["mean"])


class Gated(nn.Module):
    """A block whose router, a parameter, sends each token to two of four gains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(width), nn.Linear(width, width, bias=False)
        self.router = nn.Parameter(torch.randn(4, width))
        self.register_buffer("routed", torch.zeros(5), persistent=False)

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        normed = self.norm(stream)
        shares = (normed @ self.router.T).softmax(-1).flatten(0, -2)
        gates, chosen = shares.topk(2)
        if self.training:
            cast(Tensor, self.routed).add_(counts_of(load_of(chosen, 4), shares))
        return cast(Tensor, stream + branch * self.layer(normed) * gates.sum(1).view(*stream.shape[:-1], 1))


class Gating(Recurrent):
    """Family of such networks."""

    def build(self, width: int, depth: int) -> Network:
        network = Network(self.vocab_size, width, depth)
        network.layers = nn.ModuleList(Gated(width) for _ in range(depth))
        return network

    def tensor_classes(self, width: int, depth: int) -> dict[str, str]:
        return {f"layers.{number}.router": "router" for number in range(depth)}

    def end_step(self, model: Any, member: Any, *, taken: Any, mean: Any) -> Mapping[str, Tensor]:
        routers = [f"layers.{number}" for number in range(member.n_layers)]
        return routing_figures(take_counts(model, routers, 4, mean), 2)


def test_a_custom_mixture_reports_its_routing(
    trainer: Trainer, numerics: Numerics, hyperparameters: Hyperparameters
) -> None:
    model = Gating(vocab_size=256, context_length=32).member(16, 3)
    numerics = replace(numerics, model=model, base=model)
    table = trainer.train(numerics, stem(hyperparameters.resolve(4 * BATCH), 4 * BATCH)).curve.table()
    assert table["router_entropy"].between(0.1, np.log(4)).all()
    assert table["largest_load"].between(1, 2).all()
    assert table["dead_experts"].between(0, 6).all()
