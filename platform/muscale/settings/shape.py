"""A shape as the study file names it."""

from __future__ import annotations

from pydantic import PositiveInt

from muscale.settings.strict import StrictTable
from proxy_models.architecture.config import ModelConfig, ModelFamily


class Shape(StrictTable):
    """A member of the study's family."""

    width: PositiveInt
    depth: PositiveInt | None = None  # none: the base's

    def of(self, family: ModelFamily) -> ModelConfig:
        """The member.

        Raises:
            ValueError: If the shape breaks a rule of `ModelConfig`.
        """
        return family.at(width=self.width, depth=self.depth)

    def __str__(self) -> str:
        return f"width {self.width}" + (f", depth {self.depth}" if self.depth else "")
