"""Shapes of any module for the parametrization: which dimensions grow with width, found by comparing three models.

The mup package compares a base and a delta model to find the dimensions that are width, and the target with the base
to find by how much each dimension grew. Build all three on the meta device (`with torch.device("meta")`), which allocates
no memory and draws no random number. All three have the depth of the target, because parameters are matched by name.

A parameter without a rule is refused by name. With a wrong class, a parameter would train but its values would not transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mup
from torch import nn
from torch.nn.modules.conv import _ConvNd

from proxy_models.architecture.parametrization import TensorClass, TensorShape, fan_in_of

_OUTPUTS_FIRST = (nn.Linear, nn.MultiheadAttention, nn.RNNBase)  # layers whose matrices are (outputs, inputs)
# matrices (inputs, outputs), as in GPT-2; named as text, since transformers is optional
_INPUTS_FIRST = ("transformers.pytorch_utils.Conv1D",)


def module_shapes(
    target: nn.Module,
    base: nn.Module,
    delta: nn.Module,
    *,
    readout: Sequence[str],
    block_prefix: str = "blocks.",
    classes: Mapping[str, str] | None = None,
) -> dict[str, TensorShape]:
    """Return the class, fan-in and width multiplier of every parameter of `target`, in its order.

    Args:
        target: The model to train, at its width and depth.
        base: A model of the width at which the hyperparameters are tuned.
        delta: A model of another width, larger or smaller, in every dimension that is width.
        readout: Names of the parameters that map the width to logits, e.g. ("readout.weight",); a table that is tied to
            the embedding has the name that `named_parameters` gives it.
        block_prefix: Prefix of the names of parameters inside the residual blocks; the depth rules apply to them.
        classes: Names of `TensorClass` by parameter, for parameters whose class the shapes do not determine.

    Returns:
        Shapes as `parametrization_of` takes them.

    Raises:
        ValueError: If the three models differ in more than shape, no dimension grows, a parameter is not an embedding, matrix
            in a block, norm gain, bias or readout, or `classes` has an unknown class or a class that the shape does not allow.
    """
    names = list(dict(target.named_parameters()))
    for module in (base, delta):
        if odd := sorted(dict(module.named_parameters()).keys() ^ set(names)):
            raise ValueError(
                f"models of two widths must have the same parameters; only one of them has {', '.join(odd)}"
            )
    if unknown := {name: value for name, value in (classes or {}).items() if value not in (*TensorClass,)}:
        name, value = next(iter(unknown.items()))
        raise ValueError(f"the class of {name} must be one of {', '.join(TensorClass)}, got {value!r}")
    stated = {name: TensorClass(value) for name, value in (classes or {}).items()}
    if missing := [name for name in (*readout, *stated) if name not in names]:
        raise ValueError(
            f"no parameter is called {', '.join(missing)}; a readout tied to the embedding is listed once, under its "
            f"first name. The parameters are {', '.join(names)}"
        )
    shapes = mup.get_shapes(target)
    base_shapes, delta_shapes = mup.get_shapes(base), mup.get_shapes(delta)
    for name, shape in shapes.items():
        if not len(shape) == len(base_shapes[name]) == len(delta_shapes[name]):
            raise ValueError(f"{name} must have the same number of dimensions at every width")
    # Neither parameters nor modules are changed; mup's check for MuReadout does not apply, the readout is named.
    inf_shapes = mup.shape.zip_infshapes(mup.make_base_shapes(base_shapes, delta_shapes), shapes)
    if not any(inf_shape.ninf() for inf_shape in inf_shapes.values()):
        raise ValueError(
            "models of two widths must differ in a dimension of a parameter, got the same: build must use its width"
        )
    return {
        name: TensorShape(
            tensor_class=stated[name],
            fan_in=fan_in_of(name, stated[name], shapes[name], [dimension.isinf() for dimension in inf_shapes[name]]),
            width_mult=float(inf_shapes[name].width_mult()),
        )
        if name in stated
        else _shape(name, inf_shapes[name], target, base_shapes[name], name in readout, block_prefix)
        for name in names
    }


def is_norm(module: nn.Module) -> bool:
    """Return True for a norm, which fixes the size of its output; recognised by class name, as libraries define their own."""
    return type(module).__name__.endswith("Norm")


def has_inputs_first(module: nn.Module) -> bool:
    """Return True if the module's matrix is (inputs, outputs)."""
    return f"{type(module).__module__}.{type(module).__qualname__}" in _INPUTS_FIRST


def _is_table(readout: nn.Parameter, model: nn.Module) -> bool:
    """Return True if the readout's matrix is also an embedding, whichever of the modules that hold it was registered first."""
    holders = [
        module for module in model.modules() if any(held is readout for held in module.parameters(recurse=False))
    ]
    tables = [module for module in holders if not isinstance(module, nn.Linear)]
    return (len(holders) > 1 and bool(tables)) or any(isinstance(module, nn.Embedding) for module in tables)


def _shape(
    name: str,
    inf_shape: mup.infshape.InfShape,
    target: nn.Module,
    base_shape: Sequence[int],
    is_readout: bool,
    block_prefix: str,
) -> TensorShape:
    owner = target.get_submodule(name.rpartition(".")[0])
    sizes, grows = inf_shape.shape(), [dimension.isinf() for dimension in inf_shape]
    described = f"{name} of shape {tuple(sizes)} (base {tuple(base_shape)})"
    for size, at_base, is_width in zip(sizes, base_shape, grows, strict=True):
        if size != at_base and not is_width:
            raise ValueError(f"{described} differs from the base in a dimension that is not the width")
    if sum(grows) > 2:
        raise ValueError(f"{described} has {sum(grows)} dimensions of width; the rules know at most 2")
    in_block = name.startswith(block_prefix)
    of_norm = name.endswith("weight") and is_norm(owner)
    inputs_first = False
    if is_readout:
        if grows != [False, True]:
            raise ValueError(f"{described} is named as a readout, which maps a width to a fixed number of outputs")
        tensor_class = TensorClass.TIED if _is_table(target.get_parameter(name), target) else TensorClass.READOUT
    elif grows[:2] == [True, True]:
        if not in_block:
            raise ValueError(
                f"{described} is a matrix outside the blocks {block_prefix!r}, where the depth rules don't hold"
            )
        inputs_first = has_inputs_first(owner)
        if len(sizes) == 2 and not (inputs_first or isinstance(owner, _OUTPUTS_FIRST)):
            raise ValueError(
                f"{described} in {type(owner).__name__} may have its inputs first or last: use nn.Linear or a "
                "subclass, whose fan-in is known"
            )
        if len(sizes) > 2 and not (isinstance(owner, _ConvNd) and not owner.transposed):
            raise ValueError(
                f"{described} in {type(owner).__name__} may have its inputs first or last: use nn.Conv1d or the like, or "
                f'give its class in tensor_classes, {{"{name}": "{TensorClass.HIDDEN}"}} if it is (outputs, inputs, kernel)'
            )
        tensor_class = TensorClass.HIDDEN
    elif grows == [False, True] and not isinstance(owner, nn.Linear):
        tensor_class = TensorClass.EMBEDDING
    elif grows == [True] and of_norm:
        tensor_class = TensorClass.BLOCK_NORM if in_block else TensorClass.FINAL_NORM
    elif grows == [True] and name.rpartition(".")[2].startswith("bias"):  # e.g. "bias_ih_l0" of a recurrent layer
        tensor_class = TensorClass.BLOCK_BIAS if in_block else TensorClass.FINAL_BIAS
    elif grows == [False] and of_norm and in_block:
        tensor_class = TensorClass.QK_NORM
    else:
        rule = "there is no rule for a projection with a fixed number of outputs that is not named as readout, nor for its bias"
        likely = f"one of {', '.join(TensorClass)}"
        if grows == [False, True, True]:
            rule = "such a tensor may be a stack (matrices, outputs, inputs), and a convolution is one of nn.Conv1d or the like"
            likely = f'as {{"{name}": "{TensorClass.HIDDEN_STACK}"}}, or {likely}'
        if grows == [True]:
            rule = "a vector of the width is classified by its name, as bias or a norm's weight"
            likely = f'as {{"{name}": "{TensorClass.BLOCK_BIAS if in_block else TensorClass.FINAL_BIAS}"}}, or {likely}'
        raise ValueError(
            f"{described} in {type(owner).__name__} is none of embedding, matrix, norm gain, bias and readout: {rule}; "
            f"a custom family can give its class in tensor_classes, {likely}"
        )
    fan_in = sizes[0] if inputs_first else fan_in_of(name, tensor_class, sizes, grows)
    return TensorShape(tensor_class=tensor_class, fan_in=fan_in, width_mult=float(inf_shape.width_mult()))
