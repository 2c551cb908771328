"""A family of one's own: counts, table and multipliers from shapes, training in the lean loop, and the coordinate check."""

from __future__ import annotations

import hashlib
import json
import linecache
import math
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder_family import MOST_SIZES, DecoderFamily
from proxy_models.architecture.families import ModelFamily, build, family_of, load
from proxy_models.architecture.family import SIZE_STEP, Family, FamilyError, count_member, source_hash
from proxy_models.architecture.member import Member, ModuleConfig
from proxy_models.architecture.parametrization import MULTIPLIERS, OptimizerName, TensorClass
from proxy_models.coordinates.measurement import coordinate_check, require_causal
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import stem
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize
from proxy_models.training.trainer import Trainer
from tests.proxy_models.families import Network, Recurrent, Stacked

FAMILY = Recurrent(vocab_size=256, context_length=32)
SCALED = ModelFamily(base=cast(ModuleConfig, FAMILY.member(32, 2)))
VALUES = Hyperparameters(learning_rate=2**-8, batch_tokens=4 * 32)
WIDTHS = (16, 32, 64, 128)


class WithoutReadoutMultiplier(Network):
    """Has the buffer, and does not multiply by it."""

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.symbols(tokens)
        for layer in self.layers:
            stream = layer(stream, self.branch_multiplier)
        return cast(Tensor, self.head(self.norm(stream)))


@dataclass(frozen=True, kw_only=True)
class Forgetful(Recurrent):
    def build(self, width: int, depth: int) -> Network:
        return WithoutReadoutMultiplier(self.vocab_size, width, depth)


@dataclass(frozen=True, kw_only=True)
class WithoutBuffer(Recurrent):
    def build(self, width: int, depth: int) -> Network:
        network = Network(self.vocab_size, width, depth)
        del network.readout_multiplier
        return network


class Overflowing(Network):
    """Its logits are not finite, and so no gradient is."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * torch.inf


@dataclass(frozen=True, kw_only=True)
class Infinite(Recurrent):
    def build(self, width: int, depth: int) -> Network:
        return Overflowing(self.vocab_size, width, depth)


class Peeking(Network):
    """Its stream has the token after, by a share that starts at zero."""

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__(vocab_size, width, depth)
        self.layers[0].bias = nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.symbols(tokens)
        stream = stream + self.layers[0].bias * stream.roll(-1, 1)
        for layer in self.layers:
            stream = layer(stream, self.branch_multiplier)
        return cast(Tensor, self.head(self.norm(stream) * self.readout_multiplier))


@dataclass(frozen=True, kw_only=True)
class Bidirectional(Recurrent):
    def build(self, width: int, depth: int) -> Network:
        return Peeking(self.vocab_size, width, depth)


@dataclass(frozen=True, kw_only=True)
class OfItsOwnLoss(Bidirectional):
    @property
    def evaluation_loss(self) -> Any:
        return lambda model, sequences: model(sequences).logsumexp(-1).mean()


class Cap(nn.Module):
    """Keep logits within ±30, as Gemma 2 does."""

    def forward(self, logits: Tensor) -> Tensor:
        return 30 * torch.tanh(logits / 30)


class CappedNetwork(Network):
    """Functions of the logits follow the readout, of which the last is no module's."""

    def __init__(self, vocab_size: int, width: int, depth: int) -> None:
        super().__init__(vocab_size, width, depth)
        self.cap = Cap()

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.cap(super().forward(tokens))) - 1


@dataclass(frozen=True, kw_only=True)
class Capped(Recurrent):
    def build(self, width: int, depth: int) -> Network:
        return CappedNetwork(self.vocab_size, width, depth)


class ByWeightNetwork(Network):
    """The readout's weight is used, and its module is not called."""

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.symbols(tokens)
        for layer in self.layers:
            stream = layer(stream, self.branch_multiplier)
        return nn.functional.linear(self.norm(stream) * self.readout_multiplier, self.head.weight)


@dataclass(frozen=True, kw_only=True)
class ByWeight(Recurrent):
    def build(self, width: int, depth: int) -> Network:
        return ByWeightNetwork(self.vocab_size, width, depth)


@dataclass(frozen=True, kw_only=True)
class Misnamed(Recurrent):
    readout = "lm_head"


def numerics(corpus: Corpus, model: Member = SCALED.base, base: Member = SCALED.base) -> Numerics:
    return Numerics(model=model, base=base, corpus_key=corpus.key, seed=0, evaluation_tokens=512)


def test_counts_are_those_of_a_gated_recurrent_network() -> None:
    width, depth = 48, 3
    member = FAMILY.member(width, depth)
    block = width + 6 * width**2 + 6 * width  # gain, three gates of two matrices, two biases of each gate
    assert member.n_params == depth * block + width + 256 * width
    assert member.n_params_total == member.n_params + 256 * width
    assert member.train_flops_per_token == 6 * member.n_params


def test_decoders_counted_as_any_module_have_the_counts_that_are_written_out(variant: dict[str, Any]) -> None:
    config = ModelConfig(d_model=64, n_layers=2, context_length=16, **variant)
    counted = count_member(DecoderFamily.of(config), 64, 2)
    assert (counted.n_params, counted.n_params_total) == (config.n_params, config.n_params_total)


def test_decoders_as_any_module_have_the_table_that_is_written_out(variant: dict[str, Any]) -> None:
    config = ModelConfig(d_model=64, n_layers=2, context_length=16, **variant)
    family, wide = DecoderFamily.of(config), replace(config, d_model=128, n_layers=4)
    found, written = Family.parametrization(family, wide, config), family.parametrization(wide, config)
    assert found == replace(written, multipliers=replace(written.multipliers, attention=1.0))


@pytest.mark.parametrize("n_params", [1e4, 1e6, 1e9])
def test_the_member_of_a_size_is_the_nearest(n_params: float) -> None:
    found = SCALED.for_params(n_params, depth=4)
    others = [SCALED.at(width=found.d_model + step, depth=4) for step in (-8, 8) if found.d_model + step > 0]
    ratios = [max(one.n_params / n_params, n_params / one.n_params) for one in (found, *others)]
    assert ratios[0] == min(ratios)


def test_members_between_two_sizes_ascend_by_the_family_s_step() -> None:
    widths = [member.d_model for member in SCALED.between(2e4, 1e5)]
    assert widths == list(range(widths[0], widths[-1] + 1, 8))
    assert SCALED.for_params(2e4).d_model == widths[0]


def test_between_sizes_far_apart_the_members_are_spread_in_ratio() -> None:
    base = ModelConfig(vocab_size=256, context_length=64, d_model=48, n_layers=2, head_dim=16, mlp_ratio=8 / 3)
    found = ModelFamily(base=base).between(1e6, 1e18)
    assert len(found) <= MOST_SIZES
    assert all(member.d_model % 48 == 0 for member in found), "an MLP of 8/3 widths is whole at every third head"
    sizes = [member.n_params for member in found if member.n_params > 1e9]
    assert max(after / before for before, after in pairwise(sizes)) < 1.02
    assert found[-1].n_params == pytest.approx(1e18, rel=0.02)


def test_members_over_a_large_range_are_counted_in_ratio_and_a_reader_finds_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a step of 8 some 4,000 widths lie in the range; each count builds the model."""
    before = count_member.cache_info().misses
    found = SCALED.between(3e8, 3e11)
    assert count_member.cache_info().misses - before < 300
    sizes = [member.n_params for member in found]
    assert max(after / before for before, after in pairwise(sizes)) < SIZE_STEP * 1.02
    assert sizes[0] == pytest.approx(3e8, rel=0.01)
    assert sizes[-1] == pytest.approx(3e11, rel=0.01)
    monkeypatch.setattr("proxy_models.architecture.families._loaded", lambda name: None)
    assert ModelFamily(base=SCALED.base).between(3e8, 3e11) == found


def test_a_width_between_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="d_model must be a multiple of 8, got 20"):
        SCALED.at(width=20)


def test_numerics_are_read_back_with_their_key(corpus: Corpus) -> None:
    written = numerics(corpus)
    again = Numerics.from_dict(json.loads(json.dumps(written.to_dict())))
    assert again == written
    assert again.key == written.key != numerics(corpus, base=FAMILY.member(48, 2)).key
    assert family_of(again.model) == FAMILY


def test_a_family_of_another_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tests.proxy_models.families:Recurrent is.*'other'"):
        family_of(replace(SCALED.base, source="other"))


def test_a_family_of_a_notebook_is_known_by_the_cell_that_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "from tests.proxy_models.families import Recurrent\n\n\nclass OfACell(Recurrent):\n    build = lambda self, *sizes: None\n"
    monkeypatch.setitem(linecache.cache, "<cell>", (len(cell), None, cell.splitlines(keepends=True), "<cell>"))
    kernel = ModuleType("kernel")  # without a file
    monkeypatch.setitem(sys.modules, "kernel", kernel)
    exec(compile(cell, "<cell>", "exec"), kernel.__dict__)
    assert source_hash(kernel.OfACell) == hashlib.sha256(cell.encode()).hexdigest()


def test_a_family_that_was_not_imported_is_refused_and_not_imported() -> None:
    with pytest.raises(ValueError, match="the family antigravity:Upwards is not imported here"):
        family_of(replace(SCALED.base, family="antigravity:Upwards"))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("Recurrent", 'must be "package.module:Class", got'),
        ("nowhere.at.all:Recurrent", "nowhere.at.all can't be imported .*No module named"),
        ("tests.proxy_models.families:Block", "must be a subclass of proxy_models.Family, .* got .*Block"),
        ("tests.proxy_models.families:Recurent", "Recurent.* mean Recurrent"),
        ("tests.proxy_models.families:Missing", "must be a subclass of proxy_models.Family, .* got .*Missing"),
    ],
)
def test_a_name_without_a_family_is_refused(name: str, rule: str) -> None:
    assert load("tests.proxy_models.families:Recurrent") is Recurrent
    with pytest.raises(ValueError, match=rule):
        load(name)


def test_a_class_by_override_takes_the_place_of_the_shape_s() -> None:
    class Overridden(Recurrent):
        def tensor_classes(self, width: int, depth: int) -> dict[str, TensorClass]:
            return {"layers.0.layer.weight_hh_l0": TensorClass.EMBEDDING}

    family = Overridden(vocab_size=256, context_length=32)
    table = family.parametrization(SCALED.at(width=64), SCALED.base)
    plain = FAMILY.parametrization(SCALED.at(width=64), SCALED.base)
    changed = [name for name, rule in table.rules.items() if rule != plain.rules[name]]
    assert changed == ["layers.0.layer.weight_hh_l0"]
    assert table.rules[changed[0]].lr_factor == 1


def test_a_class_goes_by_its_name_and_an_unknown_one_is_refused() -> None:
    class Named(Recurrent):
        def tensor_classes(self, width: int, depth: int) -> dict[str, str]:
            return {"layers.0.layer.weight_hh_l0": "embedding"}

    class Unknown(Recurrent):
        def tensor_classes(self, width: int, depth: int) -> dict[str, str]:
            return {"layers.0.layer.weight_hh_l0": "bias"}

    scaled = SCALED.at(width=64), SCALED.base
    table = Named(vocab_size=256, context_length=32).parametrization(*scaled)
    assert table.rules["layers.0.layer.weight_hh_l0"].lr_factor == 1
    with pytest.raises(ValueError, match=r"weight_hh_l0 .*block_bias.* got 'bias'"):
        Unknown(vocab_size=256, context_length=32).parametrization(*scaled)


def test_every_multiplier_moves_the_logits_and_the_readout_s_doubles_them() -> None:
    table = FAMILY.parametrization(SCALED.base, SCALED.base)
    model, tokens = build(SCALED.base), torch.arange(32).unsqueeze(0)
    initialize(model, table, VALUES.resolve(1000 * 128), seed=0)
    once = model(tokens)
    for name in ("readout", "branch"):
        buffer = model.get_buffer(MULTIPLIERS[name])
        buffer.mul_(2)
        again = model(tokens)
        buffer.div_(2)
        assert not torch.allclose(again, once)
        if name == "readout":
            torch.testing.assert_close(again, 2 * once)


def test_a_model_without_a_buffer_for_a_multiplier_is_refused(corpus: Corpus) -> None:
    family = WithoutBuffer(vocab_size=256, context_length=32)
    wider = numerics(corpus, model=family.member(64, 2), base=family.member(32, 2))
    with pytest.raises(ValueError, match=r"multiplier readout = 0.5 .* buffer readout_multiplier"):
        Trainer(corpus, compile=False).train(wider, stem(VALUES.resolve(128 * 100), 128))


def test_it_trains_in_the_lean_loop_as_written_out(corpus: Corpus) -> None:
    wider = numerics(corpus, model=SCALED.at(width=64))
    segment = stem(replace(VALUES, learning_rate=0.01).resolve(16 * 128), 16 * 128)
    one, other = (Trainer(corpus, compile=False).train(wider, segment) for _ in range(2))
    assert one.loss is not None
    assert one.loss == other.loss
    assert one.loss < float(one.curve.train_loss[0]) - 0.5
    parts = Trainer(corpus, compile=False, micro_batch=2).train(wider, segment)
    assert parts.loss == pytest.approx(one.loss, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_convolutions_and_stacks_pass_the_check_and_a_stack_has_the_norm_of_its_matrices(
    corpus: Corpus, optimizer: OptimizerName
) -> None:
    family = ModelFamily(base=Stacked(vocab_size=256, context_length=32).member(32, 2))
    check = coordinate_check(family, replace(VALUES, optimizer=optimizer), corpus, widths=WIDTHS, n_steps=2)
    assert check.passed, str(check)
    rows = check.measurements
    found = rows[(rows["quantity"] == "norm of experts") & (rows["width"] == 128)]["rms"]
    assert len(found)
    # Of a (2w, w) matrix of entries of variance 1/w: √2 + 1 (Marchenko and Pastur), over √(2w / w); of the flattened stack √(2w).
    assert found.tolist() == pytest.approx([(2**0.5 + 1) / 2**0.5] * len(found), rel=0.05)


def test_the_coordinate_check_passes_over_width_and_depth(corpus: Corpus) -> None:
    check = coordinate_check(SCALED, VALUES, corpus, widths=WIDTHS, depths=(1, 2, 4, 8), n_steps=2)
    assert check.passed, check
    assert {"head", "norm", "layers.0.layer", "last block"} <= set(check.measurements["module"])


def test_the_coordinate_check_names_the_readout_of_a_family_that_drops_its_multiplier(corpus: Corpus) -> None:
    family = Forgetful(vocab_size=256, context_length=32)
    check = coordinate_check(ModelFamily(base=family.member(32, 2)), VALUES, corpus, widths=WIDTHS, n_steps=1)
    assert [(finding.fault, finding.module) for finding in check.findings] == [("readout multiplier", "head")]


@pytest.mark.parametrize(("of", "after"), [(Capped, {"", "cap", "head"}), (ByWeight, {""})])
def test_what_is_computed_from_the_readout_is_held_to_its_bounds(
    of: type[Family], after: set[str], corpus: Corpus
) -> None:
    family = of(vocab_size=256, context_length=32)
    check = coordinate_check(ModelFamily(base=family.member(32, 2)), VALUES, corpus, widths=WIDTHS, n_steps=1)
    assert check.passed, check
    kinds = check.measurements.groupby("kind")["module"].unique()
    assert set(kinds["readout"]) == after
    assert {"symbols", "layers.0", "layers.0.layer"} <= set(kinds["hidden"])


def test_a_model_whose_values_are_not_finite_fails_the_check(corpus: Corpus) -> None:
    family = Infinite(vocab_size=256, context_length=32)
    check = coordinate_check(ModelFamily(base=family.member(32, 2)), VALUES, corpus, widths=WIDTHS, n_steps=1)
    assert not check.passed
    assert {(finding.module, finding.step) for finding in check.findings} == {("", 0)}, "the model's own output"


def test_a_model_that_sees_the_future_is_refused_unless_its_loss_is_its_own(corpus: Corpus) -> None:
    family = Bidirectional(vocab_size=256, context_length=32)
    with pytest.raises(FamilyError, match="Peeking .*token 16 .* position 15"):
        coordinate_check(ModelFamily(base=family.member(32, 2)), VALUES, corpus, widths=WIDTHS, n_steps=1)
    sequences = torch.randint(256, (1, 32))
    require_causal(FAMILY, FAMILY.build(16, 2).eval(), sequences)
    masked = OfItsOwnLoss(vocab_size=256, context_length=32)
    require_causal(masked, masked.build(16, 2).eval(), sequences)


def test_a_readout_that_the_model_does_not_have_is_named_with_those_it_has() -> None:
    with pytest.raises(ValueError, match=r"Misnamed.readout.*Network, got 'lm_head'"):
        Misnamed(vocab_size=256, context_length=32).member(32, 2)


def test_a_wrong_rate_of_the_recurrent_matrices_is_found(corpus: Corpus) -> None:
    def unscaled(member: Any, base: Any) -> Any:
        table = FAMILY.parametrization(member, base)
        return replace(table, rules={name: replace(rule, lr_factor=1.0) for name, rule in table.rules.items()})

    check = coordinate_check(SCALED, VALUES, corpus, widths=WIDTHS, n_steps=1, parametrization=unscaled)
    assert {finding.fault for finding in check.findings} == {"learning-rate scaling"}
    assert "layers.0.layer" in {finding.module for finding in check.findings}, "whose outputs are (values, state)"


@pytest.mark.parametrize(("power", "slope"), [(0.5, 0.45), (-1.0, -1.05)])
def test_a_wrong_rate_that_no_activation_shows_is_found_by_the_norm_of_the_update(
    corpus: Corpus, power: float, slope: float
) -> None:
    def planted(member: Any, base: Any) -> Any:
        table = FAMILY.parametrization(member, base)
        wrong = {name: rule for name, rule in table.rules.items() if "weight_hh" in name}
        changed = {
            name: replace(rule, lr_factor=rule.lr_factor * rule.width_mult**power) for name, rule in wrong.items()
        }
        return replace(table, rules={**table.rules, **changed})

    check = coordinate_check(SCALED, VALUES, corpus, widths=WIDTHS, n_steps=2, parametrization=planted)
    found = [(finding.fault, finding.module, finding.quantity) for finding in check.findings]
    place = "learning-rate scaling", "update of weight_hh_l0"
    assert sorted(found) == [(place[0], f"layers.{layer}.layer", place[1]) for layer in (0, 1)]
    assert [finding.slope for finding in check.findings] == pytest.approx([slope, slope], abs=0.1)
    activations = check.measurements[~check.measurements["kind"].str.endswith("matrix")]
    assert replace(check, measurements=activations).passed


def test_a_multiplier_that_is_not_applied_fails_the_check_by_its_name(corpus: Corpus) -> None:
    family = Forgetful(vocab_size=256, context_length=32)
    applied = coordinate_check(SCALED, VALUES, corpus, widths=WIDTHS, n_steps=1)
    assert applied.multipliers == {"branch": True, "readout": True}
    forgotten = coordinate_check(ModelFamily(base=family.member(32, 2)), VALUES, corpus, widths=WIDTHS, n_steps=1)
    assert forgotten.unapplied == ("readout",)
    slopes_only = replace(forgotten, measurements=applied.measurements)
    assert not slopes_only.findings
    assert not slopes_only.passed
    assert type(applied).from_dict(forgotten.to_dict()).unapplied == ("readout",)


def test_units_are_tables_blocks_and_readout_each_once() -> None:
    model = FAMILY.build(32, 2)
    assert set(FAMILY.units(model)) == {model.symbols, *model.layers, model.head}
    model.head.weight = nn.Parameter(model.symbols.weight)
    model.symbols.weight = model.head.weight
    assert set(FAMILY.units(model)) == set(model.layers)


@dataclass(frozen=True, kw_only=True)
class Scaled(Recurrent):
    """Each block has a gain that is built with one constant."""

    built: float

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        for layer in network.layers:
            layer.gain = nn.Parameter(torch.full((width,), self.built))
        return network

    def tensor_classes(self, width: int, depth: int) -> dict[str, str]:
        return {f"layers.{layer}.gain": "block_norm" for layer in range(depth)}


def test_a_gain_that_is_built_with_another_constant_than_1_is_refused() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    for built in (1e-4, 0.0):
        layer_scale = Scaled(vocab_size=256, context_length=32, built=built)
        member = layer_scale.member(32, 2)
        with pytest.raises(FamilyError):
            layer_scale.parametrization(member, member)
    neutral = Scaled(vocab_size=256, context_length=32, built=1.0)
    member = neutral.member(32, 2)
    assert neutral.parametrization(member, member).rules["layers.1.gain"].init_mean == 1
    assert torch.equal(torch.rand(1), expected)


class RandomBuffer(Recurrent):
    """A buffer holds random numbers, which every build draws again unless the generator has a seed."""

    seeded: ClassVar[bool] = False

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        generator = torch.Generator().manual_seed(0) if self.seeded else None
        drawn = torch.randn(width, generator=generator, device="cpu")
        drawn[0] = math.nan  # equal to itself here
        network.register_buffer("features", drawn.to(network.head.weight.device))
        return network


class SeededBuffer(RandomBuffer):
    """The same random numbers at every build."""

    seeded = True


def test_buffers_that_differ_between_two_builds_are_refused() -> None:
    """Each rank, and the proxies and the full run, would compute with others."""
    drawn, seeded = (of(vocab_size=256, context_length=32) for of in (RandomBuffer, SeededBuffer))
    member = drawn.member(32, 2)
    with pytest.raises(FamilyError):
        drawn.parametrization(member, member)
    member = seeded.member(32, 2)
    assert seeded.parametrization(member, member).rules


def freeze(network: Network) -> str:
    """Give a table of positions that is not trained."""
    network.positions = nn.Embedding(32, network.norm.weight.numel()).requires_grad_(False)
    return "positions.weight"


def round_block(network: Network) -> str:
    """Put a block into bf16."""
    network.layers[1].to(torch.bfloat16)
    return "layers.1.norm.weight"


def make_sparse(network: Network) -> str:
    """Give the embedding sparse gradients."""
    network.symbols.sparse = True
    return "symbols"


def cut_readout(network: Network) -> str:
    """Leave out the last token's output."""
    network.head.weight = nn.Parameter(network.head.weight[:-1].detach())
    return "head"


@dataclass(frozen=True, kw_only=True)
class Changed(Recurrent):
    change: Any

    def build(self, width: int, depth: int) -> Network:
        network = super().build(width, depth)
        self.change(network)
        return network


@pytest.mark.parametrize("change", [freeze, round_block, make_sparse, cut_readout])
def test_tensors_that_training_would_not_treat_as_built_are_refused_by_name(change: Any) -> None:
    """A frozen table of sines would start from random values, and a weight in bf16 would lose its small updates."""
    changed = Changed(vocab_size=256, context_length=32, change=change)
    with pytest.raises(FamilyError) as refused:
        count_member(changed, 32, 2)
    assert str(refused.value).partition(":")[0] == change(FAMILY.build(32, 2))


@pytest.mark.parametrize("share", [0.25, 0.0, 1.5])
def test_parameters_of_experts_that_a_token_does_not_use_are_not_counted(share: float) -> None:
    class Experts(Recurrent):
        def active_shares(self, width: int, depth: int) -> dict[str, float]:
            return {f"layers.{layer}.layer.weight_hh_l0": share for layer in range(depth)}

    family, whole = Experts(vocab_size=256, context_length=32), FAMILY.member(64, 2)
    if not 0 < share <= 1:
        with pytest.raises(FamilyError):
            family.member(64, 2)
        return
    member = family.member(64, 2)
    assert member.n_params == whole.n_params - 0.75 * 2 * 3 * 64 * 64
    assert member.n_params_total == whole.n_params_total
    assert member.train_flops_per_token == 6 * member.n_params
