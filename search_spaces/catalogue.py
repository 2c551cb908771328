"""Ready-made spaces, by name."""

from __future__ import annotations

from collections.abc import Callable

from search_spaces.distributions import Choice, Integer, LogUniform, Uniform
from search_spaces.errors import SpaceError, unknown
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


CATALOGUE: dict[str, Callable[[], Space]] = {"classic": classic, "mup_adamw": mup_adamw}


def ready_made(name: str) -> Space:
    """The space of the catalogue with this name.

    Raises:
        SpaceError: If the catalogue has no such name.
    """
    if name not in CATALOGUE:
        raise SpaceError(unknown("space", name, CATALOGUE))
    return CATALOGUE[name]()
