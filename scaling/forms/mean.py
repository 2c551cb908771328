"""The mean of several laws of one form: what a forecast is made by, as a law of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaling.forms.law import Form, Law
from scaling.forms.problem import Values


@dataclass(frozen=True, eq=False)
class MeanOf(Form):
    """exp of the mean log loss of `count` laws of a form; their parameters are named alpha_1, alpha_2 and so on."""

    form: Form
    count: int

    source = "the mean forecast of scaling.fits.ensemble"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"mean of {self.count} fits of {self.form.name}"

    @property
    def formula(self) -> str:  # type: ignore[override]
        return f"exp of the mean of log({self.form.formula}) over {self.count} fits"

    @property
    def parameters(self) -> Mapping[str, tuple[float, float]]:  # type: ignore[override]
        return {
            f"{name}_{i}": bounds for i in range(1, self.count + 1) for name, bounds in self.form.parameters.items()
        }

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.form.columns

    def loss(self, values: Values, rows: Mapping[str, Any]) -> Any:
        laws = range(1, self.count + 1)
        each = [self.form.loss({name: values[f"{name}_{i}"] for name in self.form.parameters}, rows) for i in laws]
        return np.exp(np.mean([np.log(loss) for loss in each], axis=0))


def mean_of(laws: Sequence[Law]) -> Law:
    """The mean of laws of one form, which count N alike and have losses in one unit."""
    values = {f"{name}_{i}": value for i, law in enumerate(laws, 1) for name, value in law.parameters.items()}
    return replace(laws[0], form=MeanOf(laws[0].form, len(laws)), parameters=values)
