"""Limits of a decision besides its budget: data, memory, time, and the sizes that can be built."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaling.arrays import Array
from scaling.decisions.accelerators import Accelerator, Budget, accelerator, require_positive
from scaling.errors import ScalingError
from scaling.fits.runs import require_count
from scaling.forms.expert_law import SPARSITY
from scaling.forms.law import Form
from scaling.forms.spending import UNIQUE, Spending
from scaling.presentation import Result

TRAINING_BYTES = 16.0
"""Bytes per parameter under Adam in mixed precision: 2 for the parameter, 2 for its gradient, 12 for its fp32 copy and two moments
(Rajbhandari et al. 1910.02054, sec. 3.1)."""
SERVING_BYTES = 2.0
"""Bytes per parameter in bf16."""
SHARE = 0.7
"""Share of a device's memory that the model may take (assumed); the rest is for activations, or the cache of keys and values."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit(Result):
    """Limit by the bytes that each parameter needs, spread evenly over devices.

    Attributes:
        what: use of the model, such as "training".
        bytes_per_param: bytes of a parameter with its gradient and state.
        n_devices: devices that share one copy.
        share: share of the memory that the model may take, above 0, at most 1.

    Raises:
        ValueError: a number breaks its rule.
    """

    what: str
    memory_bytes: float
    bytes_per_param: float
    n_devices: int = 1
    share: float = SHARE

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bytes_per_param", "n_devices"):
            require_positive(name, getattr(self, name))
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share!r}")

    @classmethod
    def training(
        cls, device: Accelerator | str, *, n_devices: int, bytes_per_param: float = TRAINING_BYTES, share: float = SHARE
    ) -> "MemoryLimit":
        """Limit in training: parameters, gradients and optimiser state, all sharded over the devices (ZeRO-3, FSDP)."""
        memory = accelerator(device).memory_bytes
        return cls(
            what="training", memory_bytes=memory, bytes_per_param=bytes_per_param, n_devices=n_devices, share=share
        )

    @classmethod
    def serving(
        cls,
        device: Accelerator | str,
        *,
        n_devices: int = 1,
        bytes_per_param: float = SERVING_BYTES,
        share: float = SHARE,
    ) -> "MemoryLimit":
        """Limit in serving: parameters alone, on the devices of one replica."""
        memory = accelerator(device).memory_bytes
        return cls(
            what="serving", memory_bytes=memory, bytes_per_param=bytes_per_param, n_devices=n_devices, share=share
        )

    @property
    def max_params(self) -> float:
        """Parameters of the largest model that fits, with every parameter counted."""
        return self.share * self.memory_bytes * self.n_devices / self.bytes_per_param

    def __str__(self) -> str:
        return (
            f"{self.what}: at most {self.max_params:.4g} parameters at {self.bytes_per_param:g} bytes each in {self.share:.0%} "
            f"of {self.n_devices:,} × {self.memory_bytes / 1e9:.4g} GB"
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that a decision must keep in addition to its budget; they combine.

    Attributes:
        unique_tokens: unique tokens in the corpus. Under a law without repeats each token is seen once, so D is at most this number.
        max_epochs: maximum number of times that each token is seen, for a law with the column `unique_tokens`.
        memory: limits that the model must fit into, with all experts.
        max_sparsity: most total over active parameters, for a law of experts.
        sizes: allowed N: numbers, or configurations with the attribute `n_params` (counted as the fit counts) and, for a law of
            experts, `sparsity`, total over active parameters. The sparsity is decided if no size states it. Memory holds the
            `n_params_total` of a size that states it, tables included; otherwise N times the sparsity.
        deadline: limit of the training alone, without serving: `Budget.of_days`.

    Raises:
        ValueError: a limit breaks its rule.
    """

    unique_tokens: float | None = None
    max_epochs: float | None = None
    memory: Iterable[MemoryLimit] = ()
    max_sparsity: float | None = None
    sizes: Iterable[Any] | None = None
    deadline: Budget | None = None

    def __post_init__(self) -> None:
        if self.unique_tokens is not None:
            require_count(UNIQUE, self.unique_tokens)
        if self.max_epochs is not None:
            require_positive("max_epochs", self.max_epochs)
        if self.max_sparsity is not None and not 1 <= self.max_sparsity < math.inf:
            raise ValueError(f"max_sparsity must be finite and at least 1, got {self.max_sparsity!r}")
        if self.max_epochs is not None and self.unique_tokens is None:
            raise ValueError(f"max_epochs needs unique_tokens, got max_epochs={self.max_epochs!r} alone")
        object.__setattr__(self, "memory", tuple(self.memory))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", sizes := tuple(self.sizes))
            if not sizes:
                raise ValueError("sizes must hold at least one size, got none")
            for size in sizes:
                require_count("sizes", n_params_of(size))

    @property
    def states_sparsity(self) -> bool:
        """True if a size states its sparsity."""
        return any(getattr(size, SPARSITY, None) is not None for size in self.sizes or ())

    def config(self, n_params: float, sparsity: float | None) -> Any:
        """Return the first size with this N and, under a law of experts, this sparsity if it states one; None without sizes."""
        for size in self.sizes or ():
            if n_params_of(size) == n_params and (sparsity is None or _sparsity(size) in (None, sparsity)):
                return size
        return None

    def spending(
        self, form: Form, served_tokens: float, serving_price: float, columns: Mapping[str, float]
    ) -> Spending:
        """Return the uses of compute within these limits, under a form with its further columns.

        Raises:
            ValueError: the form knows no repeats and `max_epochs` is given, or no experts and `max_sparsity` is given, or a column
                is missing or unknown, or nothing limits the sparsity, or only some sizes state theirs, or not the given one.
            ScalingError: no allowed size is within the limits.
        """
        repeats = UNIQUE in form.columns
        if self.max_epochs is not None and not repeats:
            raise ValueError(f"max_epochs needs a law of {UNIQUE}, got {form.name}, in which each token is seen once")
        expected = {*form.columns} - {"n_params", "n_tokens", UNIQUE}
        sparsities = self._sparsities(form, columns)
        if expected - {SPARSITY} != {*columns} - ({SPARSITY} & expected):
            named = ", ".join(sorted(expected)) or "no further columns"
            raise ValueError(f"{form.name} needs {named}, got {', '.join(columns) or 'none'}")
        most = min((limit.max_params for limit in self.memory), default=math.inf)
        shapes = self._fitting(sparsities, columns.get(SPARSITY, 1.0), most)
        unique = math.inf if self.unique_tokens is None else self.unique_tokens
        return Spending(
            form=form,
            served_tokens=served_tokens,
            serving_price=serving_price,
            unique_tokens=unique,
            max_tokens=unique * (self.max_epochs or math.inf) if repeats else unique,
            max_params=most,
            max_sparsity=self.max_sparsity or math.inf,
            max_training_flops=self.deadline.compute_flops if self.deadline else math.inf,
            sizes=None if shapes is None else shapes[:, 0],
            sparsities=shapes[:, 1] if sparsities and shapes is not None else None,
            columns=columns,
        )

    def _fitting(self, sparsities: list[float] | None, least: float, most: float) -> Array | None:
        """N and sparsity of the sizes within the limits, [M, 2], in ascending order of N and then descending of sparsity."""
        if self.sizes is None:
            return None
        sizes = tuple(self.sizes)
        totals = {
            (n_params := n_params_of(size), sparsity): total_params_of(size, n_params, sparsity)
            for size, sparsity in zip(sizes, sparsities or [least] * len(sizes), strict=True)
        }
        sparsest = self.max_sparsity or math.inf
        if not (fitting := [shape for shape, total in totals.items() if total <= most and shape[1] <= sparsest]):
            raise ScalingError(
                f"sizes must have at most {most:.4g} parameters in memory and a sparsity of at most {sparsest:.4g}, got "
                + ", ".join(f"{total:.4g} parameters (sparsity {s:.4g})" for (_, s), total in sorted(totals.items()))
            )
        return np.array(sorted(fitting, key=lambda shape: (shape[0], -shape[1])))

    def _sparsities(self, form: Form, columns: Mapping[str, float]) -> list[float] | None:
        """Sparsity of each size, or None if it is given or decided; raises ValueError as `spending`."""
        if SPARSITY not in form.columns:
            if self.max_sparsity is not None:
                raise ValueError(
                    f"max_sparsity needs a law of {SPARSITY}, got {form.name}, in which every model is dense"
                )
            return None
        if SPARSITY in columns:
            given, most = columns[SPARSITY], self.max_sparsity or math.inf
            if not 1 <= given <= most:
                raise ValueError(f"{SPARSITY} must be at least 1 (dense) and at most {most:.4g}, got {given!r}")
            if others := [size for size in self.sizes or () if _sparsity(size) not in (None, given)]:
                raise ValueError(
                    f"sizes must have the {SPARSITY} that is given, {given!r}, got {_sparsity(others[0])!r}: leave out "
                    f"{SPARSITY}=… to compare sizes with their own"
                )
            return None
        if self.states_sparsity:
            stated = []
            for size in self.sizes or ():
                if (sparsity := _sparsity(size)) is None:
                    raise ValueError(
                        f"sizes must all state a {SPARSITY} (1 for a dense model), or none of them, got none for {size}"
                    )
                stated.append(sparsity)
            return stated
        if self.max_sparsity is None and not self.memory:
            raise ValueError(
                f"{form.name}: further experts always lower the loss, so a limit must be given: {SPARSITY}=…, "
                "Limits(max_sparsity=…) or Limits(memory=…)"
            )
        return None


def n_params_of(size: Any) -> float:
    """Return N of a size: its `n_params`, or the number itself."""
    return as_number("sizes", getattr(size, "n_params", size))


def total_params_of(size: Any, n_params: float, sparsity: float | None) -> float:
    """Return the parameters that a size holds in memory: its `n_params_total`, or N times the sparsity."""
    stated = getattr(size, "n_params_total", None)
    return n_params * (sparsity or 1.0) if stated is None else as_number("n_params_total", stated)


def _sparsity(size: Any) -> float | None:
    """Sparsity that a size states, or None; raises ValueError if it is below 1."""
    if (stated := getattr(size, SPARSITY, None)) is None:
        return None
    if not 1 <= (value := as_number(SPARSITY, stated)) < math.inf:
        raise ValueError(
            f"{SPARSITY} of sizes must be total over active parameters, finite and at least 1, got {stated!r}"
        )
    return value


def as_number(name: str, value: Any) -> float:
    """Return the value as a number; raise ValueError if the value is no number."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number, got {value!r}") from error
