"""Ablation of a trained model's components: the held-out loss without each residual block, or without each attention head.

A block is removed by returning its input, a head by zeros in its part of the output projection's input. The rest of the model is not
trained again. A component that another one can replace therefore looks unimportant, and the increases of two components do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from proxy_models.architecture.decoder import Block, Decoder
from proxy_models.architecture.families import family_of
from proxy_models.architecture.residual import change_stream
from proxy_models.evaluation.held_out_loss import HeldOutSequences
from proxy_models.evaluation.measure import Measured, Subject
from proxy_models.hashing import content_key

Parts = Literal["layers", "heads"]


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Increase of the held-out loss without each component, whose standard error is that of the paired difference.

    Scores have metric "loss_increase" and names such as "layer 3" or "layer 3, head 1". Layers and heads count from 0, as in the names
    of parameters. The score named "" has metric "loss", of the whole model.

    Attributes:
        parts: "layers" for the residual blocks of any family, "heads" for the query heads of the built-in decoder.
    """

    parts: Parts = "layers"

    name: ClassVar[str] = "ablation"

    def __post_init__(self) -> None:
        if self.parts not in get_args(Parts):
            raise ValueError(f"parts must be one of {', '.join(get_args(Parts))}, got {self.parts!r}")

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return content_key([self.name, asdict(self)])

    def measure(self, subject: Subject) -> Measured:
        """Measure the increases; continue from `subject.progress` after an interruption.

        Raises:
            ValueError: If `parts` is "heads" for another family than the decoder, a block does not map a residual stream, or
                the corpus has fewer held-out tokens than the run evaluates.
        """
        removals = dict(self._removals(subject))
        held_out = HeldOutSequences(subject)
        whole = held_out.losses()
        done = subject.log(self.key)
        scores = [whole.score(self.name, "", "loss")]
        for name, remove in removals.items():
            if name not in done.found:
                with remove():
                    without = held_out.losses()
                done.keep({name: {source: means.tolist() for source, means in without.means.items()}})
            without = replace(whole, means={source: np.array(means) for source, means in done.found[name].items()})
            scores.append((without - whole).score(self.name, name, "loss_increase"))
        return Measured(scores=tuple(scores))

    def _removals(self, subject: Subject) -> Iterator[tuple[str, Callable[[], RemovableHandle]]]:
        """Yield the name of each component, and a function that removes it until the returned hook is removed."""
        model = subject.model
        if self.parts == "heads" and not isinstance(model, Decoder):
            raise ValueError(
                f'parts must be "layers" for {subject.numerics.model}: only the built-in decoder\'s heads are known; got "heads"'
            )
        for layer, block in enumerate(family_of(subject.numerics.model).blocks_of(model)):
            if self.parts == "layers":
                yield f"layer {layer}", partial(block.register_forward_hook, _return_input, with_kwargs=True)
                continue
            attention = cast(Block, block).attention
            size = attention.config.head_dim
            for head in range(attention.config.n_heads):
                hook = partial(_zero, slice(head * size, (head + 1) * size))
                yield f"layer {layer}, head {head}", partial(attention.output.register_forward_pre_hook, hook)


def _return_input(_block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
    return change_stream(lambda before, _after: before, inputs, named, output)


def _zero(columns: slice, _projection: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    mixed = inputs[0].clone()
    mixed[..., columns] = 0
    return mixed
