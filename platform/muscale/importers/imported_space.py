"""A search from another tool as tables of a study file, with notes about parts that have no counterpart."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import tomlkit

from muscale.errors import StageError, refusing
from muscale.settings.toml_file import inline
from proxy_models.recipes.hyperparameters import Hyperparameters
from search_spaces import Choice, Distribution, Fixed, LogUniform, Ordinal, Prior, Space, SpaceError, Uniform

_SAME = {
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val", "clip_grad"), "clip_norm"),
    **dict.fromkeys(("adam_beta1", "adam_beta_1", "beta_1"), "beta1"),
    **dict.fromkeys(("adam_beta2", "adam_beta_2", "beta_2"), "beta2"),
    **dict.fromkeys(("adam_eps", "adam_epsilon", "epsilon"), "eps"),
}
"""Hyperparameters by the usual names of other tools for the same value."""
_OTHER = {
    **dict.fromkeys(
        ("weight_decay", "wd"), "weight_decay_tau, which is batch_tokens / (rate · weight decay · tokens of the run)"
    ),
    **dict.fromkeys(("batch_size", "bs", "global_batch_size"), "batch_tokens, in tokens"),
    **dict.fromkeys(("warmup", "warmup_steps", "warmup_ratio"), "warmup_fraction, a share of the run's tokens"),
}
"""Hyperparameters with another meaning or unit that replace the usual ones of other tools."""
MOST_STEPS = 64  # of a quantised range whose values are listed
TAILS = 4.0
"""Standard deviations at which a normal distribution is cut off, since a space has bounds (assumed)."""


@dataclass(frozen=True, kw_only=True)
class ImportedSpace:
    """Settings for a study file from another tool.

    Attributes:
        settings: Further keys of [sweep].
        notes: Parts without a counterpart, and changes, a line each.
    """

    source: str
    space: Space
    settings: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def unknown(self) -> tuple[str, ...]:
        """Hyperparameters that no training here has, each with the nearest name."""
        names = [field.name for field in dataclasses.fields(Hyperparameters)]
        found = []
        for name in self.space:
            if name not in names:
                near = [_SAME[name]] if name in _SAME else difflib.get_close_matches(name, names, n=1)
                remedy = f": --rename {name}={near[0]}?" if near else ""
                if name in _OTHER:
                    remedy = f"; search {_OTHER[name]}"
                found.append(f"{name} is not a hyperparameter here{remedy}")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        notes = [*self.notes, *self.unknown]
        return {"sweep": {**self.settings, "space": self.space.to_dict()}, "notes": notes, "source": self.source}

    def __str__(self) -> str:
        """Return TOML to paste into a study file, with the notes as comments."""
        # Names of files and parameters may contain any character, and must not break out of the comment.
        lines = [f"# {_printable(line)}" for line in (f"From {self.source}.", *self.notes, *self.unknown)]
        lines += ["[sweep]", tomlkit.dumps(dict(self.settings)).strip(), "", "[sweep.space]"]
        for name, table in self.space.to_dict().items():
            entry = tomlkit.document()
            entry[name] = inline(table)
            lines.append(tomlkit.dumps(entry).strip())
        return "\n".join(line for number, line in enumerate(lines) if line or number > 2)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def place_of(source: str) -> tuple[str, str]:
    """Return the path and the study's name after "#"; a path may contain a "#" too."""
    parts = source.split("#")
    for end in range(len(parts), 0, -1):
        if Path(path := "#".join(parts[:end])).is_file():
            return path, "#".join(parts[end:])
    return parts[0], "#".join(parts[1:])


def space_from(source: str, distributions: Mapping[str, Distribution], names: Mapping[str, str]) -> Space:
    """Return a space with renamed hyperparameters; raise StageError if a name is missing or taken, or the space is invalid."""
    if missing := [name for name in names if name not in distributions]:
        raise StageError(
            f"import-space: {source}: --rename {missing[0]}: no such parameter; there are {', '.join(distributions)}"
        )
    renamed = {names.get(name, name): distribution for name, distribution in distributions.items()}
    if len(renamed) < len(distributions):
        raise StageError(f"import-space: {source}: --rename: two parameters would have the same name")
    with refusing(f"import-space: {source}", SpaceError):
        return Space(renamed)


def discrete(values: Sequence[Any]) -> Distribution:
    """Return the distribution of listed values: rising numbers are ordinal."""
    if len(values) == 1:
        return Fixed(value=values[0])
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if numbers and list(values) == sorted(set(values)):
        return Ordinal(values=tuple(values))
    return Choice(values=tuple(values))


def normal(mean: float, sd: float, *, log: bool = False) -> tuple[Distribution, str]:
    """Return a normal or (by mean and standard deviation of the logarithm) lognormal distribution as a prior, and a note about it."""
    if sd <= 0:
        raise SpaceError(f"a normal's standard deviation must be above 0, got {sd}")
    low, high = mean - TAILS * sd, mean + TAILS * sd
    note = f"a prior, cut off {TAILS:g} standard deviations from its mean"
    if log:
        prior = Prior(centre=math.exp(mean), spread=sd / math.log(2))
        return LogUniform(low=math.exp(low), high=math.exp(high), prior=prior), note
    return Uniform(low=low, high=high, prior=Prior(centre=mean, spread=sd)), note


def multiples_within(low: float, high: float, step: float) -> tuple[float, float]:
    """Return the least and greatest multiple of a step in bounds, as Tune and W&B round; raise SpaceError unless it is above 0."""
    if step <= 0:
        raise SpaceError(f"q must be above 0, got {step:g}")
    return math.ceil(low / step - 1e-9) * step, math.floor(high / step + 1e-9) * step


def stepped(low: float, high: float, step: float, otherwise: Distribution) -> tuple[Distribution, str]:
    """Return the values of a range in steps if they are few, else `otherwise`, and a note about the choice."""
    count = int((high - low) / step + 1e-9) + 1
    if count > MOST_STEPS:
        return otherwise, f"its steps of {step:g} are left out, as there are {count}"
    values = [float(Decimal(str(low)) + k * Decimal(str(step))) for k in range(count)]
    if all(float(v).is_integer() for v in (low, step)):
        values = [round(v) for v in values]
    if len(values) < 2:
        return Fixed(value=values[0]), "its step leaves one value"
    if isinstance(otherwise, Uniform):
        return Ordinal(values=tuple(values)), f"its {count} steps are an ordinal's values"
    return Ordinal(values=tuple(values)), f"its {count} steps are an ordinal's values, equally likely"
