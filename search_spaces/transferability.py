"""Transferability: how a tuned hyperparameter is carried to a larger model or a longer run.

The classes follow the sources below. The parametrization carries values at the base shape across width and depth; it does not
cover the training horizon, the batch and regularization.

Sources, by arXiv id: 2203.03466 Tensor Programs V; 2505.01618 CompleteP; 2512.22382 Complete(d)P; 2407.05872 Everett et
al.; 2409.19913 rates across horizons; 2405.13698 AdamW's timescale; 2505.13738 Power Lines; 2510.15262 decay under muP;
2001.08361 Kaplan et al.; 2407.01492 RegMix.
"assumed" marks a convention of this project without support by a paper or a measurement here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from search_spaces.errors import SpaceError, unknown

Axis: TypeAlias = Literal["horizon", "batch", "tokens_per_param"]
"""Variable of a law: tokens of the run, tokens of one optimizer step, tokens of the run per parameter."""


class TransferClass(StrEnum):
    """Class of a tuned value's transfer from the proxy to the target."""

    UNDER_MUP = "under_mup"
    """Stays unchanged as a value at the base shape; the parametrization does the scaling."""
    BY_LAW = "by_law"
    """Transfers by a fitted law along the stated axes; stays unchanged, as under muP, if proxy and target agree on them."""
    MUST_MATCH = "must_match"
    """Defines what is trained; proxy and target must have the same value, or nothing else transfers."""
    NEVER = "never"
    """Does not transfer; the target needs an explicit value."""


@dataclass(frozen=True, kw_only=True)
class Transferability:
    """Class of one hyperparameter.

    Attributes:
        axes: Variables of the law; empty unless the class is `BY_LAW`.
        source: arXiv ids separated by commas, "assumed", or "measured here" with what was measured.
    """

    name: str
    transfer: TransferClass
    axes: tuple[Axis, ...] = ()
    reason: str
    source: str

    def __post_init__(self) -> None:
        if (self.transfer is TransferClass.BY_LAW) != bool(self.axes):
            raise SpaceError(
                f"{self.name}: by_law needs axes and no other class takes any, got {self.transfer}, {self.axes}"
            )

    def __str__(self) -> str:
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        return f"{self.name}: {self.transfer}{over}. {self.reason} [{self.source}]"


_MULTIPLIER = "A multiplier of the forward pass; what depends on width or depth is in the rule table."
_SHAPE = "A fraction of the run, so that the schedule keeps its shape at every horizon."
_DECAY = "It shapes the schedule in fractions of the run and factors on the rate, the same at every horizon."
_GROUP_RATE = (
    "A factor on one row of the rule table's rates; what moves with horizon and batch is the rate it multiplies."
)
_LENGTH = "An absolute length is another fraction of a longer run."
_BETA = "Kept across width; it averages over 1 / (1 - beta) steps, which are more tokens with a larger batch."
_FAMILY = "Part of the family that proxy and target belong to."
_EXPERTS = "The rules carry values across it, but whether the rate stays is measured along each axis: transfer.experts and others."
_REGULARIZER = "How much regularization is best depends on the size of the model and on how often it sees its data."

# Name, class, axes, reason, source.
_ROWS: tuple[tuple[str, TransferClass, tuple[Axis, ...], str, str], ...] = (
    (
        "learning_rate",
        TransferClass.BY_LAW,
        ("horizon", "batch"),
        "Under muP the optimum stays across width and depth; it falls with the horizon and moves with the batch.",
        "2203.03466, 2505.01618, 2409.19913, 2512.22382",
    ),
    (
        "init_scale",
        TransferClass.UNDER_MUP,
        (),
        "A factor on the rule table's initial standard deviations.",
        "2203.03466",
    ),
    (
        "zero_readout",
        TransferClass.MUST_MATCH,
        (),
        "Another start of the readout is another model at step 0; the rates were tuned with the proxy's.",
        "2203.03466",
    ),
    ("embedding_multiplier", TransferClass.UNDER_MUP, (), _MULTIPLIER, "2203.03466"),
    ("output_multiplier", TransferClass.UNDER_MUP, (), _MULTIPLIER, "2203.03466"),
    ("attention_multiplier", TransferClass.UNDER_MUP, (), _MULTIPLIER, "2203.03466"),
    ("embedding_rate", TransferClass.UNDER_MUP, (), _GROUP_RATE, "2407.05872, 2512.22382"),
    ("output_rate", TransferClass.UNDER_MUP, (), _GROUP_RATE, "2407.05872, 2512.22382"),
    (
        "weight_decay_tau",
        TransferClass.BY_LAW,
        ("tokens_per_param",),
        "The best timescale B / (eta·lambda·D), a fraction of the run, was first found constant (2405.13698), then to"
        " follow a power law in tokens per parameter (2505.13738).",
        "2405.13698, 2505.13738",
    ),
    (
        "weight_decay",
        TransferClass.BY_LAW,
        ("horizon", "batch", "tokens_per_param"),
        "It acts through the timescale B / (eta·lambda·D), so its best value moves with all of these: search"
        " weight_decay_tau. Across width the rule table holds rate·decay of a matrix constant; 2510.15262 finds a decay"
        " that grows as the root of the width for AdamW (decay_scaling).",
        "2405.13698, 2505.13738, 2510.15262",
    ),
    ("beta1", TransferClass.BY_LAW, ("batch",), _BETA, "2203.03466, 2512.22382"),
    ("beta2", TransferClass.BY_LAW, ("batch",), _BETA, "2203.03466, 2512.22382"),
    ("eps", TransferClass.UNDER_MUP, (), "Scaled by the rule table as the gradients are.", "2505.01618, 2407.05872"),
    ("warmup_fraction", TransferClass.UNDER_MUP, (), _SHAPE, "assumed"),
    ("warmup_tokens", TransferClass.BY_LAW, ("horizon",), _LENGTH, "assumed"),
    ("warmup_floor_tokens", TransferClass.BY_LAW, ("horizon",), _LENGTH, "assumed"),
    (
        "warmup_steps",
        TransferClass.BY_LAW,
        ("horizon", "batch"),
        "Steps are another length in tokens at another batch, and another fraction of a longer run.",
        "assumed",
    ),
    ("cooldown_fraction", TransferClass.UNDER_MUP, (), _SHAPE, "assumed"),
    ("final_fraction", TransferClass.UNDER_MUP, (), _DECAY, "assumed"),
    ("milestones", TransferClass.UNDER_MUP, (), _DECAY, "assumed"),
    ("step_factor", TransferClass.UNDER_MUP, (), _DECAY, "assumed"),
    ("cycles", TransferClass.UNDER_MUP, (), _DECAY, "assumed"),
    (
        "stages",
        TransferClass.UNDER_MUP,
        (),
        "Shares of the stable part and factors on the rate, the same at every horizon and width. Whether a course that a"
        " population found on a short run is a good one for a long run is not known: the ladder tells.",
        "assumed",
    ),
    (
        "batch_tokens",
        TransferClass.BY_LAW,
        ("horizon",),
        "The optimal and the critical batch follow the tokens of the run, not the size of the model.",
        "2505.13738",
    ),
    (
        "batch_doublings",
        TransferClass.BY_LAW,
        ("horizon",),
        "They say how small the first batch is, against a batch_tokens that follows the tokens of the run.",
        "2505.13738",
    ),
    ("batch_ramp_tokens", TransferClass.BY_LAW, ("horizon",), _LENGTH, "assumed"),
    (
        "batch_tokens_per_gpu",
        TransferClass.NEVER,
        (),
        "Training sees only the batch over all GPUs, and the target has another number of them: search batch_tokens.",
        "assumed",
    ),
    (
        "clip_norm",
        TransferClass.UNDER_MUP,
        (),
        "Kept constant by convention; the rule table has nothing on the norm of the whole gradient, so compare how many"
        " steps are clipped.",
        "assumed",
    ),
    ("dropout", TransferClass.NEVER, (), _REGULARIZER, "2203.03466"),
    ("attention_dropout", TransferClass.NEVER, (), _REGULARIZER, "2203.03466"),
    ("mlp_dropout", TransferClass.NEVER, (), _REGULARIZER, "2203.03466"),
    ("embedding_dropout", TransferClass.NEVER, (), _REGULARIZER, "2203.03466"),
    ("label_smoothing", TransferClass.NEVER, (), _REGULARIZER, "2203.03466"),
    ("stochastic_depth", TransferClass.NEVER, (), _REGULARIZER, "2203.03466"),
    (
        "z_loss",
        TransferClass.NEVER,
        (),
        "Taken for a regularizer: there is no rule for its weight in the loss.",
        "assumed",
    ),
    ("optimizer", TransferClass.MUST_MATCH, (), "Each has its own rules; AdamW's are not reused.", "assumed"),
    (
        "swap_optimizer",
        TransferClass.MUST_MATCH,
        (),
        "A run that ends under another optimizer is different training; the second optimizer has its own rules, too.",
        "assumed",
    ),
    ("swap_fraction", TransferClass.UNDER_MUP, (), _SHAPE, "assumed"),
    (
        "swap_learning_rate",
        TransferClass.BY_LAW,
        ("horizon", "batch"),
        "A rate at the base shape under the second optimizer's rules: it moves as learning_rate does.",
        "assumed",
    ),
    (
        "schedule",
        TransferClass.MUST_MATCH,
        (),
        "Rankings under one schedule do not carry over to another.",
        "measured here: Spearman .70 between final losses under WSD and under linear decay",
    ),
    ("activation", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("norm", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("qk_norm", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("positions", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("rotary_fraction", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("rope_theta", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("document_separator", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("attention_window", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("global_attention_every", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("norm_eps", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    ("parallel", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    (
        "tied",
        TransferClass.MUST_MATCH,
        (),
        "A tied table has its own rules and rates; the readout's are not reused.",
        "assumed",
    ),
    ("biases", TransferClass.MUST_MATCH, (), _FAMILY, "assumed"),
    (
        "queries_per_kv",
        TransferClass.MUST_MATCH,
        (),
        "Keys and values grow with the width only where their ratio to the queries is kept.",
        "2203.03466",
    ),
    (
        "mlp_ratio",
        TransferClass.MUST_MATCH,
        (),
        "The MLP grows with the width only where the ratio is kept.",
        "2203.03466",
    ),
    ("n_experts", TransferClass.MUST_MATCH, (), _EXPERTS, "assumed"),
    ("experts_per_token", TransferClass.MUST_MATCH, (), _EXPERTS, "assumed"),
    ("expert_ratio", TransferClass.MUST_MATCH, (), _EXPERTS, "assumed"),
    (
        "head_dim",
        TransferClass.MUST_MATCH,
        (),
        "The width grows in heads of one size, so that the scale of attention stays.",
        "2203.03466",
    ),
    (
        "width_depth_ratio",
        TransferClass.NEVER,
        (),
        "The loss depends on it so little (2001.08361) that a small model does not show it; what else is tuned transfers across"
        " both width and depth.",
        "2001.08361, 2505.01618",
    ),
    ("context_length", TransferClass.MUST_MATCH, (), "Another context is another task with another loss.", "assumed"),
    ("tokenizer", TransferClass.MUST_MATCH, (), "The loss is counted in its tokens.", "assumed"),
    (
        "data_mixture",
        TransferClass.MUST_MATCH,
        (),
        "The optimum and the law belong to one mixture. That the better of several stays so at larger sizes is a hypothesis"
        " (2407.01492): check it there.",
        "2407.01492",
    ),
)

TRANSFERABILITY: dict[str, Transferability] = {
    name: Transferability(name=name, transfer=transfer, axes=axes, reason=reason, source=source)
    for name, transfer, axes, reason, source in _ROWS
}


def transferability(name: str) -> Transferability:
    """Return the class of the hyperparameter `name`.

    Raises:
        SpaceError: If the table has no such name: an unknown hyperparameter is never assumed to transfer.
    """
    if name not in TRANSFERABILITY:
        raise SpaceError(unknown("hyperparameter", name, TRANSFERABILITY))
    return TRANSFERABILITY[name]
