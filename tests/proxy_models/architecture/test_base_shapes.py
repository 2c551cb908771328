"""The mup package as the oracle of the table, on an unsharded model."""

from __future__ import annotations

from typing import Any

import mup
import pytest
import torch
from torch import nn

from proxy_models.architecture.base_shapes import module_shapes
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.parametrization import TensorClass, decoder_shapes, parametrization_of, parametrize
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.recipe import Recipe
from proxy_models.training.optimizer import initialize, make_optimizer
from tests.proxy_models.families import Network

FAMILY = ModelFamily(base=ModelConfig(d_model=64, n_layers=2, context_length=16))
READOUT = ("readout.weight",)


def decoder(width: int, depth: int = 2) -> Decoder:
    with torch.device("meta"):
        return Decoder(FAMILY.at(width=width, depth=depth))


def marked_by_mup(width: int) -> Decoder:
    """A real decoder with mup's own attributes on its parameters."""
    model = Decoder(FAMILY.at(width=width))
    mup.set_base_shapes(model, decoder(64), delta=decoder(32), rescale_params=False, do_assert=False)
    return model


def recipe() -> Recipe:
    return Hyperparameters(learning_rate=0.01, batch_tokens=64).resolve(64 * 100)


@pytest.mark.parametrize(("width", "depth"), [(32, 2), (64, 2), (128, 2), (192, 5)])
def test_shapes_written_out_for_the_decoder_are_those_found_by_comparison(width: int, depth: int) -> None:
    found = module_shapes(decoder(width, depth), decoder(64, depth), decoder(32, depth), readout=READOUT)
    assert found == dict(decoder_shapes(FAMILY.at(width=width, depth=depth), FAMILY.base))
    assert list(found) == [name for name, _ in decoder(width, depth).named_parameters()]


def test_every_variant_s_table_is_found_by_comparison_too(variant: dict[str, Any]) -> None:
    family = ModelFamily(base=ModelConfig(d_model=64, n_layers=2, context_length=16, **variant))
    with torch.device("meta"):
        models = [Decoder(family.at(width=width)) for width in (128, 64, 32)]
    readout = ("embedding.weight",) if family.base.tied else READOUT
    found = module_shapes(*models, readout=readout)
    assert found == dict(decoder_shapes(family.at(width=128), family.base))


@pytest.mark.parametrize("table", [nn.Embedding, nn.Module])
@pytest.mark.parametrize("first", ["symbols", "head"])
def test_a_matrix_that_embeds_and_reads_out_is_tied_whichever_is_registered_first(
    table: type[nn.Module], first: str
) -> None:
    def build(width: int) -> Network:
        model = Network(256, width, 2)
        del model.symbols
        holder = nn.Embedding(256, width) if table is nn.Embedding else nn.Module()
        holder.weight = model.head.weight
        head = model.head
        del model.head
        for name in sorted(("symbols", "head"), key=lambda name: name != first):
            setattr(model, name, holder if name == "symbols" else head)
        return model

    with torch.device("meta"):
        shapes = module_shapes(*map(build, (64, 32, 64)), readout=[f"{first}.weight"], block_prefix="layers.")
    assert shapes[f"{first}.weight"].tensor_class is TensorClass.TIED
    assert [shape.tensor_class for shape in shapes.values()].count(TensorClass.READOUT) == 0


def test_the_delta_model_may_be_wider_or_narrower() -> None:
    narrower, wider = (module_shapes(decoder(128), decoder(64), decoder(w), readout=READOUT) for w in (32, 96))
    assert narrower == wider


@pytest.mark.parametrize("width", [32, 64, 256])
def test_rates_and_decay_are_mup_s_muadamw(width: int) -> None:
    model, values = marked_by_mup(width), recipe()
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = {}
    for group in mup.MuAdamW(
        model.parameters(), lr=values.learning_rate, weight_decay=values.weight_decay
    ).param_groups:
        theirs.update({names[parameter]: (group["lr"], group["weight_decay"]) for parameter in group["params"]})
    ours = {}
    for group in make_optimizer(model, parametrize(model.config, FAMILY.base), values).param_groups:
        ours.update({names[parameter]: (group["lr"], group["weight_decay"]) for parameter in group["params"]})
    assert ours.keys() == theirs.keys()
    for name, (lr, decay) in theirs.items():
        # mup decays every vector; we decay no gain.
        assert ours[name] == pytest.approx((lr, 0.0 if "norm" in name else decay)), name


@pytest.mark.parametrize("width", [32, 256])
def test_initial_deviations_are_mup_s(width: int) -> None:
    model = marked_by_mup(width)
    rules = parametrize(model.config, FAMILY.base).rules
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        if name == "embedding.weight":
            mup.init.normal_(parameter, std=1.0)
        else:
            mup.init.kaiming_normal_(parameter, nonlinearity="linear")
        # The relative standard error of a deviation from n values is 1 / sqrt(2n).
        assert parameter.std().item() == pytest.approx(rules[name].init_std, rel=4 / (2 * parameter.numel()) ** 0.5), (
            name
        )


def test_the_readout_multiplier_is_mup_s() -> None:
    layers = [mup.MuReadout(width, 11, bias=False) for width in (256, 64, 32)]
    mup.set_base_shapes(layers[0], layers[1], delta=layers[2])
    assert 1 / layers[0].width_mult() == parametrize(FAMILY.at(width=256), FAMILY.base).multipliers.readout


def test_models_and_random_numbers_are_left_as_they_were() -> None:
    before = torch.get_rng_state()
    target = decoder(128)
    module_shapes(target, decoder(64), decoder(32), readout=READOUT)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(hasattr(parameter, "infshape") for parameter in target.parameters())


class Convolutional(nn.Module):
    """A user's own model: learned positions, convolutions, LayerNorm without bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(11, width)
        self.positions = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(nn.Conv1d(width, 3 * width, 5, padding=2, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.register_buffer("readout_multiplier", torch.ones(()), persistent=False)


def test_a_module_of_one_s_own_gets_its_table_and_its_groups() -> None:
    with torch.device("meta"):
        target, base, delta = (Convolutional(width) for width in (48, 16, 8))
    shapes = module_shapes(target, base, delta, readout=("head.weight",), block_prefix="layers.")
    assert {name: (shape.tensor_class, shape.fan_in, shape.width_mult) for name, shape in shapes.items()} == {
        "positions": (TensorClass.EMBEDDING, 1, 3.0),
        "symbols.weight": (TensorClass.EMBEDDING, 1, 3.0),
        "layers.0.weight": (TensorClass.HIDDEN, 48 * 5, 3.0),
        "layers.1.weight": (TensorClass.HIDDEN, 48 * 5, 3.0),
        "norm.weight": (TensorClass.FINAL_NORM, 1, 3.0),
        "head.weight": (TensorClass.READOUT, 48, 3.0),
    }
    table = parametrization_of(shapes, depth_mult=1.0, attention=1.0)
    assert table.multipliers.readout == 1 / 3
    model = Convolutional(48)
    initialize(model, table, recipe(), seed=0)
    assert model.get_buffer("readout_multiplier") == torch.tensor(1 / 3)
    rates = {group["lr"] for group in make_optimizer(model, table, recipe()).param_groups}
    assert sorted(rates) == pytest.approx([0.01 / 3, 0.01])


def head(width: int, *layers: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"blocks": nn.ModuleList(layers), "readout": nn.Linear(width, 7, bias=False)})


def fixed_key_heads(width: int) -> nn.Module:
    return head(width, nn.Linear(width, 16, bias=False))


def biased_readout(width: int) -> nn.Module:
    return nn.ModuleDict({**head(width), "readout": nn.Linear(width, 7)})


def finite_input(width: int) -> nn.Module:
    return head(width, nn.Linear(3, width, bias=False))


def outside(width: int) -> nn.Module:
    return nn.ModuleDict({**head(width), "mixer": nn.Linear(width, width, bias=False)})


def three_widths(width: int) -> nn.Module:
    return head(width, nn.Conv2d(width, width, (width, 3), bias=False))


def fixed_gain(width: int) -> nn.Module:
    return nn.ModuleDict({**head(width), "norm": nn.RMSNorm(16)})


def shares(width: int) -> nn.Module:
    mixer = nn.Module()
    mixer.shares = nn.Parameter(torch.zeros(width))
    return head(width, mixer)


class Transposed(nn.Module):
    """Inputs first, as GPT-2's Conv1D."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 4 * width))


def inputs_first(width: int) -> nn.Module:
    return head(width, Transposed(width))


class Holder(nn.Module):
    """A tensor that says nothing of what its dimensions are."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.tensor = nn.Parameter(torch.zeros(shape))


def stack(width: int) -> nn.Module:
    return head(width, Holder(4, 3 * width, width))


def kernel(width: int) -> nn.Module:
    return head(width, Holder(3 * width, width, 5))


def heads(width: int) -> nn.Module:
    return head(width, Holder(width // 4, 4, width))


def transposed_convolution(width: int) -> nn.Module:
    return head(width, nn.ConvTranspose1d(width, 3 * width, 5, bias=False))


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (stack, r"blocks.0.tensor of shape \(4, 192, 64\).*'blocks.0.tensor': 'hidden_stack'".replace("'", '"')),
        (kernel, r"blocks.0.tensor of shape \(192, 64, 5\).*'blocks.0.tensor': 'hidden'".replace("'", '"')),
        (heads, r"blocks.0.tensor of shape \(16, 4, 64\)"),
        (transposed_convolution, r"blocks.0.weight of shape \(64, 192, 5\)"),
        (inputs_first, r"blocks.0.weight of shape \(64, 256\).* in Transposed may have its inputs first or last"),
        (fixed_key_heads, r"blocks.0.weight of shape \(16, 64\).*fixed number of outputs"),
        (biased_readout, r"readout.bias.*none of embedding.*nor for its bias"),
        (finite_input, r"blocks.0.weight of shape \(64, 3\).*none of embedding"),
        (outside, r"mixer.weight.*outside the blocks 'blocks.'"),
        (three_widths, r"3 dimensions of width; the rules know at most 2"),
        (shares, r"blocks.0.shares.*'blocks.0.shares': 'block_bias'".replace("'", '"')),
        (fixed_gain, r"norm.weight of shape \(16,\).*none of embedding"),
    ],
)
def test_what_the_rules_do_not_serve_is_refused_by_name(build: type, rule: str) -> None:
    with torch.device("meta"):
        models = [build(width) for width in (64, 32, 24)]
    with pytest.raises(ValueError, match=rule):
        module_shapes(*models, readout=READOUT)


@pytest.mark.parametrize(
    ("build", "stated", "fan_in"), [(stack, "hidden_stack", 64), (kernel, "hidden", 64 * 5), (stack, "embedding", 1)]
)
def test_a_tensor_of_three_dimensions_is_what_its_family_says(build: type, stated: str, fan_in: int) -> None:
    with torch.device("meta"):
        models = [build(width) for width in (64, 32, 24)]
    found = module_shapes(*models, readout=READOUT, classes={"blocks.0.tensor": stated})["blocks.0.tensor"]
    assert (found.tensor_class, found.fan_in, found.width_mult) == (stated, fan_in, 2.0)


@pytest.mark.parametrize(
    ("build", "stated"), [(stack, "hidden"), (kernel, "hidden_stack"), (heads, "hidden"), (heads, "hidden_stack")]
)
def test_a_stated_class_that_the_dimensions_contradict_is_refused(build: type, stated: str) -> None:
    with torch.device("meta"):
        models = [build(width) for width in (64, 32, 24)]
    with pytest.raises(ValueError, match=r"^blocks.0.tensor"):
        module_shapes(*models, readout=READOUT, classes={"blocks.0.tensor": stated})


def test_attention_of_torch_s_own_is_served() -> None:
    with torch.device("meta"):
        models = [head(width, nn.MultiheadAttention(width, 2, bias=False)) for width in (64, 32, 24)]
    shapes = module_shapes(*models, readout=READOUT)
    assert shapes["blocks.0.in_proj_weight"].fan_in == shapes["blocks.0.out_proj.weight"].fan_in == 64


def test_a_recurrent_layer_is_served_with_its_biases() -> None:
    with torch.device("meta"):
        models = [head(width, nn.GRU(width, width)) for width in (64, 32, 24)]
    shapes = module_shapes(*models, readout=READOUT)
    assert {name: shape.tensor_class for name, shape in shapes.items() if name.startswith("blocks")} == {
        "blocks.0.weight_ih_l0": TensorClass.HIDDEN,
        "blocks.0.weight_hh_l0": TensorClass.HIDDEN,
        "blocks.0.bias_ih_l0": TensorClass.BLOCK_BIAS,
        "blocks.0.bias_hh_l0": TensorClass.BLOCK_BIAS,
    }
    assert shapes["blocks.0.weight_hh_l0"].fan_in == 64


def test_a_readout_that_is_missing_or_is_none_is_refused() -> None:
    models = decoder(128), decoder(64), decoder(32)
    with pytest.raises(ValueError, match=r"lm_head.weight"):
        module_shapes(*models, readout=("lm_head.weight",))
    with pytest.raises(ValueError, match=r"readout.weight"):
        module_shapes(*models, readout=())
    with pytest.raises(ValueError, match=r"final_norm.weight .* is named as a readout"):
        module_shapes(*models, readout=("readout.weight", "final_norm.weight"))


def test_a_delta_of_the_base_s_width_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in a dimension of a parameter"):
        module_shapes(decoder(128), decoder(64), decoder(64), readout=READOUT)


def test_models_of_other_depth_or_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the same parameters; .*blocks.2"):
        module_shapes(decoder(128, 3), decoder(64), decoder(32), readout=READOUT)
    with torch.device("meta"):
        other = Decoder(ModelConfig(d_model=128, n_layers=2, vocab_size=100, context_length=16))
    with pytest.raises(ValueError, match=r"embedding.weight"):
        module_shapes(other, decoder(64), decoder(32), readout=READOUT)
