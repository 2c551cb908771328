"""Ready-made spaces, by name; the space of a mixture depends on its sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from search_spaces.condition import Condition
from search_spaces.constraints import Constraint
from search_spaces.discrete import Choice, Ordinal
from search_spaces.distributions import Integer, LogUniform, Uniform
from search_spaces.errors import SpaceError, unknown
from search_spaces.prior import Prior
from search_spaces.simplex import Simplex
from search_spaces.space import Space
from search_spaces.weights import Weights

_BETA2 = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


def mup_adamw() -> Space:
    """Space for a small proxy under muP with AdamW; all values are given at the base shape.

    learning_rate: three octaves on either side of 2^-7. Measured here at base width 64: fitted optima from 2^-6.4
        to 2^-7.0 at widths of 32 to 256 (0.2 million tokens), down to 2^-7.9 at 1.2 million tokens (width 64).
    init_scale: factor on every initial standard deviation, which transfers by Tensor Programs V (arXiv 2203.03466);
        two octaves on either side of 1, assumed.
    weight_decay_tau: AdamW's averaging timescale B / (eta·lambda·D) as a fraction of the run, searched instead of the
        decay (arXiv 2405.13698, 2505.13738); from a twentieth of the run to five runs, assumed.
    """
    return Space(
        {
            "learning_rate": LogUniform(low=2**-10, high=2**-4),
            "init_scale": LogUniform(low=0.25, high=4.0),
            "weight_decay_tau": LogUniform(low=0.05, high=5.0),
        }
    )


def mup_adamw_full() -> Space:
    """`mup_adamw` with the forward multipliers and the rates of single groups, for a search of many trials.

    embedding_multiplier, output_multiplier, attention_multiplier: factors on the rule table's multipliers, which transfer by
        Tensor Programs V (arXiv 2203.03466); three octaves on either side of 1, assumed.
    embedding_rate, output_rate: factors on the rate of the embedding tables and of the readout; the rate of the hidden matrices
        is learning_rate. Everett et al. find that tuning them pays (arXiv 2407.05872); three octaves on either side of 1,
        assumed.

    An initial scale of the readout is left out: with Adam, output_multiplier and output_rate together have its effect.
    """
    multipliers = ("embedding_multiplier", "output_multiplier", "attention_multiplier")
    rates = ("embedding_rate", "output_rate")
    factors = {name: LogUniform(low=2**-3, high=2**3) for name in (*multipliers, *rates)}
    return Space({**mup_adamw(), **factors})


def mup_lion() -> Space:
    """`mup_adamw` for optimizer "lion", whose rate is usually a third to a tenth of AdamW's at the same rate · decay.

    The factors are from Chen et al. (arXiv 2302.06675, section 5) and apply to `mup_adamw`'s range. The timescale of the decay,
    which contains the product, keeps its range. Not measured here.
    """
    return Space({**mup_adamw(), "learning_rate": LogUniform(low=2**-10 / 10, high=2**-4 / 3)})


def mup_muon() -> Space:
    """`mup_adamw` for optimizer "muon", whose updates are scaled to the size of AdamW's so that AdamW's values can be reused.

    Liu et al. find that the values can be reused (arXiv 2502.16982, section 2.2); equal ranges are assumed.
    """
    return mup_adamw()


def mup_lamb() -> Space:
    """`mup_adamw` for optimizer "lamb", whose rate is relative to the norm of a tensor: three octaves on either side of 2^-6, assumed.

    To move as under AdamW's 2^-7, an embedding, with a root mean square of 1, needs the same rate, and a hidden matrix at base width
    64, with one of 2^-3, needs 2^-4.
    """
    return Space({**mup_adamw(), "learning_rate": LogUniform(low=2**-9, high=2**-3)})


def mup_soap() -> Space:
    """`mup_adamw` for optimizer "soap": Adam in another basis, with updates of the same size; equal ranges are assumed."""
    return mup_adamw()


def mup_optimizer() -> Space:
    """`mup_adamw_full` with AdamW's betas and the warmup: every setting of the optimizer that transfers.

    beta1: .9 is the usual value (Kingma and Ba, arXiv 1412.6980); its neighbours are assumed.
    beta2: between .9, assumed, and Adam's .999 (arXiv 1412.6980), with the .95 of GPT-3 (arXiv 2005.14165) and the .98 of the
        Transformer (arXiv 1706.03762); the best value is higher for a small batch (Porian et al., arXiv 2406.19146).
    warmup_fraction: from a hundredth to a fifth of the run, assumed.

    The constraint beta1 < beta2 is usual: the gradient's average covers fewer steps than that of its square.
    """
    more = {
        "beta1": Ordinal(values=(0.8, 0.9, 0.95)),
        "beta2": Ordinal(values=_BETA2),
        "warmup_fraction": LogUniform(low=0.01, high=0.2),
    }
    return mup_adamw_full().updated(more, {"beta_order": Constraint(rule="less", names=("beta1", "beta2"))})


def schedule() -> Space:
    """Space of schedules, with lengths as fractions of the run; without the constant schedule, which is never annealed.

    warmup_fraction: as in `mup_optimizer`.
    cooldown_fraction: from a twentieth of the run to half of it, assumed; a tenth suffices for MiniCPM (arXiv 2404.06395), and
        Hägele et al. find that a constant rate with a cooldown scales like cosine (arXiv 2405.18392).
    final_fraction: from zero (Bergsma et al., arXiv 2502.15938) to a fifth, assumed; the tenth of Chinchilla (arXiv
        2203.15556) is between them.
    """
    cools = Condition.from_dict({"schedule": ["wsd", "wsd_linear", "inverse_sqrt"]})
    return Space(
        {
            "schedule": Choice(values=("wsd", "wsd_linear", "linear", "cosine", "inverse_sqrt")),
            "warmup_fraction": LogUniform(low=0.01, high=0.2),
            "cooldown_fraction": LogUniform(low=0.05, high=0.5, when=cools),
            "final_fraction": Uniform(low=0.0, high=0.2, when=Condition.from_dict({"schedule": ["cosine"]})),
        }
    )


def batch(smallest: int = 2**15, largest: int = 2**22) -> Space:
    """Space of the batch and of the values that depend on it, the rate and beta2.

    Args:
        smallest: Tokens of the smallest batch, over all devices.
        largest: Tokens of the largest batch, at least twice as many.

    batch_tokens: powers of two. The defaults are the bounds of Step Law's grid, 16 and 2,048 sequences of 2,048 tokens (Li et al.,
        arXiv 2503.04715); a small proxy needs smaller batches.
    learning_rate: as in `mup_adamw`, an octave wider on either side, assumed: the best rate moves with the batch.
    beta2: as in `mup_optimizer`.

    A ramp is left out, since its length is in tokens of one run. Merrill et al. find that the critical batch grows fast early in
    a run and then levels off (arXiv 2505.23971).

    Raises:
        SpaceError: If there are not two powers of two between the bounds.
    """
    sizes = tuple(2**k for k in range(64) if smallest <= 2**k <= largest)
    if len(sizes) < 2:
        raise SpaceError(f"batch needs two powers of two from smallest to largest, got {smallest} and {largest}")
    return Space(
        {
            "batch_tokens": Ordinal(values=sizes),
            "learning_rate": LogUniform(low=2**-11, high=2**-3),
            "beta2": Ordinal(values=_BETA2),
        }
    )


def architecture() -> Space:
    """Space of the decoder's variants, by the names of `ModelConfig`'s fields, and of the ratio of width to depth.

    activation: the gated one of Shazeer (arXiv 2002.05202), the square of Primer (arXiv 2109.08668), and their two predecessors.
    norm: RMSNorm (arXiv 1910.07467) or LayerNorm. qk_norm: arXiv 2010.04245.
    positions: rotary (arXiv 2104.09864), ALiBi (arXiv 2108.12409), learned, or none (arXiv 2305.19466); rotary_fraction: the
        quarter of GPT-NeoX (arXiv 2204.06745), up to all.
    queries_per_kv: multi-head attention, or two or four queries per key (arXiv 2305.13245); the heads must divide by four.
    parallel: attention and MLP in parallel; biases: PaLM has none (arXiv 2204.02311). tied: arXiv 1608.05859.
    width_depth_ratio: d_model / n_layers, from 32 to 128, assumed. Kaplan et al. find the loss of a model of ratio 715 (6 layers)
        within 3 % of that of ratio 33 (48 layers) at about equal size (arXiv 2001.08361, section 3.1).

    Compare at equal parameters or equal FLOPs; the size itself is not in the space.
    """
    yes_or_no = Choice(values=(False, True))
    rotary = Condition.from_dict({"positions": ["rotary"]})
    return Space(
        {
            "activation": Choice(values=("swiglu", "gelu", "relu", "relu2")),
            "norm": Choice(values=("rmsnorm", "layernorm")),
            "qk_norm": yes_or_no,
            "positions": Choice(values=("rotary", "learned", "alibi", "none")),
            "rotary_fraction": Ordinal(values=(0.25, 0.5, 1.0), when=rotary),
            "queries_per_kv": Ordinal(values=(1, 2, 4)),
            "parallel": yes_or_no,
            "tied": yes_or_no,
            "biases": yes_or_no,
            "width_depth_ratio": Integer(low=32, high=128, log=True),
        }
    )


def mixture(
    sources: Sequence[str], *, low: Mapping[str, float] | None = None, natural: Mapping[str, float] | None = None
) -> Space:
    """Space of a data mixture: the weight of each source by token, summing to 1.

    Args:
        sources: Names of the sources, at least two.
        low: Smallest weight of a source, by name.
        natural: Mixture of the data without reweighting, around which samples are drawn; None: all mixtures are equally likely.

    RegMix trains proxies on mixtures drawn around the natural mixture, and chooses the mixture with the best prediction by a
    regression on them (Liu et al., arXiv 2407.01492). Its hypothesis is that mixtures have the same order at all sizes. The spread
    of one half, at which a part of mean weight .2 has a standard deviation of .2, is assumed.

    Raises:
        SpaceError: If the names, bounds or weights do not define a simplex.
    """
    prior = Prior(centre=Weights(natural), spread=0.5) if natural is not None else None
    return Space({"data_mixture": Simplex(parts=tuple(sources), low=Weights(low or {}), prior=prior)})


def classic() -> Space:
    """Space usually searched at full size, without muP; `transferability` classifies which values transfer.

    All bounds are assumed: they are usual ranges, without a single source. Units: rate and decay as AdamW takes them, batch in
    tokens per GPU and step, dropout as a probability, warmup in optimizer steps.
    """
    return Space(
        {
            "learning_rate": LogUniform(low=1e-5, high=1e-3),
            "batch_tokens_per_gpu": Integer(low=512, high=16_384, log=True),
            "dropout": Uniform(low=0.0, high=0.3),
            "weight_decay": Uniform(low=0.0, high=0.1),
            "warmup_steps": Integer(low=1_000, high=20_000),
            "optimizer": Choice(values=("adamw", "lion", "adafactor")),
            "activation": Choice(values=("gelu", "swiglu", "relu")),
        }
    )


CATALOGUE: dict[str, Callable[[], Space]] = {
    "architecture": architecture,
    "batch": batch,
    "classic": classic,
    "mup_adamw": mup_adamw,
    "mup_adamw_full": mup_adamw_full,
    "mup_lamb": mup_lamb,
    "mup_lion": mup_lion,
    "mup_muon": mup_muon,
    "mup_optimizer": mup_optimizer,
    "mup_soap": mup_soap,
    "schedule": schedule,
}


def ready_made(name: str) -> Space:
    """Return the space of the catalogue with this name; raise SpaceError if the catalogue has no such name."""
    if name not in CATALOGUE:
        raise SpaceError(unknown("space", name, CATALOGUE))
    return CATALOGUE[name]()
