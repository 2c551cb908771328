"""The base of every table of the study file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictTable(BaseModel):
    """A table without unknown keys, conversions or changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)
