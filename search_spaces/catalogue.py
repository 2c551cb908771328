"""Ready-made spaces, by name."""

from __future__ import annotations

from collections.abc import Callable

from search_spaces.distributions import Integer, LogUniform, Uniform
from search_spaces.errors import SpaceError, unknown
from search_spaces.listed import Choice
from search_spaces.space import Space


def mup_adamw() -> Space:
    """What is searched on a small proxy under muP with AdamW, all of it given at the base shape.

    learning_rate: three octaves on either side of 2^-7. Measured here at base width 64: fitted optima from 2^-6.4
        to 2^-7.0 at widths of 32 to 256 (0.2 million tokens), down to 2^-7.9 at 1.2 million tokens (width 64).
    init_scale: factor on every initial standard deviation, which transfers by Tensor Programs V (arXiv 2203.03466);
        two octaves on either side of 1, assumed.
    weight_decay_tau: AdamW's averaging timescale B / (eta·lambda·D) as a fraction of the run, searched in place of the
        decay itself (arXiv 2405.13698, 2505.13738); from a twentieth of the run to five runs, assumed.
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

    embedding_multiplier, output_multiplier, attention_multiplier: factors on the rule table's, which transfer by Tensor
        Programs V (arXiv 2203.03466); three octaves on either side of 1, assumed.
    embedding_rate, output_rate: factors on the rate of the embedding tables and of the readout, the hidden matrices' being
        learning_rate itself; that they are worth tuning is found by Everett et al. (arXiv 2407.05872); three octaves on
        either side of 1, assumed.

    An initial scale of the readout is left out: with Adam, it does what output_multiplier and output_rate do together.
    """
    multipliers = ("embedding_multiplier", "output_multiplier", "attention_multiplier")
    rates = ("embedding_rate", "output_rate")
    factors = {name: LogUniform(low=2**-3, high=2**3) for name in (*multipliers, *rates)}
    return Space({**mup_adamw(), **factors})


def mup_lion() -> Space:
    """`mup_adamw` for optimizer "lion", whose rate is customarily a third to a tenth of AdamW's at the same rate · decay.

    The factors are those of Chen et al. (arXiv 2302.06675, section 5), on `mup_adamw`'s range; the timescale of the decay,
    in which their product stands, keeps its range. Not measured here.
    """
    return Space({**mup_adamw(), "learning_rate": LogUniform(low=2**-10 / 10, high=2**-4 / 3)})


def mup_muon() -> Space:
    """`mup_adamw` for optimizer "muon", whose updates are scaled to the size of AdamW's so that its values can be reused.

    That they can is found by Liu et al. (arXiv 2502.16982, section 2.2); that the ranges then agree is assumed.
    """
    return mup_adamw()


def classic() -> Space:
    """What is customarily searched at full size, without muP; `transferability` says which of it may be carried over.

    All bounds are assumed: customary ranges, from no single source. Units: rate and decay as AdamW takes them, batch in
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
    "classic": classic,
    "mup_adamw": mup_adamw,
    "mup_adamw_full": mup_adamw_full,
    "mup_lion": mup_lion,
    "mup_muon": mup_muon,
}


def ready_made(name: str) -> Space:
    """The space of the catalogue with this name.

    Raises:
        SpaceError: If the catalogue has no such name.
    """
    if name not in CATALOGUE:
        raise SpaceError(unknown("space", name, CATALOGUE))
    return CATALOGUE[name]()
