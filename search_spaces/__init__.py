"""What may be searched, and what of it transfers.

A `Space` maps each hyperparameter to a distribution; it samples, makes grids, encodes into the unit cube, and reads
and writes plain tables. `transferability` says what becomes of a tuned value at a larger size. `ready_made` spaces come
with the sources of their bounds. Knows numpy only: the application translates a space for its search library.
"""

from search_spaces.base import Distribution, Value
from search_spaces.catalogue import CATALOGUE, classic, mup_adamw, mup_adamw_full, mup_lion, mup_muon, ready_made
from search_spaces.distributions import Choice, Fixed, Integer, LogUniform, Uniform, distribution_from_dict
from search_spaces.errors import SpaceError
from search_spaces.space import Config, Space
from search_spaces.transferability import TRANSFERABILITY, Axis, Transfer, Transferability, transferability

__all__ = [
    "CATALOGUE",
    "TRANSFERABILITY",
    "Axis",
    "Choice",
    "Config",
    "Distribution",
    "Fixed",
    "Integer",
    "LogUniform",
    "Space",
    "SpaceError",
    "Transfer",
    "Transferability",
    "Uniform",
    "Value",
    "classic",
    "distribution_from_dict",
    "mup_adamw",
    "mup_adamw_full",
    "mup_lion",
    "mup_muon",
    "ready_made",
    "transferability",
]
