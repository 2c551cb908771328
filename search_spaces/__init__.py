"""Search spaces of hyperparameters, and the rules by which tuned values transfer.

A `Space` maps each hyperparameter to a distribution, optionally with priors, conditions and constraints. It samples, makes
grids, encodes into the unit cube, and reads and writes plain tables. `narrow` cuts a space to the region of the best trials.
`transferability` classifies how a tuned value is carried to a larger size. `ready_made` spaces state the sources of their
bounds. The package needs only numpy, scipy and pandas; the application translates a space for its search library.
"""

from search_spaces.base import Distribution, Scalar, Value
from search_spaces.catalogue import (
    CATALOGUE,
    architecture,
    batch,
    classic,
    mixture,
    mup_adamw,
    mup_adamw_full,
    mup_lamb,
    mup_lion,
    mup_muon,
    mup_optimizer,
    mup_soap,
    ready_made,
    schedule,
)
from search_spaces.condition import Condition, OneOf, Range
from search_spaces.constraints import Constraint, register_constraint
from search_spaces.discrete import Choice, Fixed, Ordinal
from search_spaces.distributions import Integer, LogUniform, Uniform, is_log
from search_spaces.errors import SpaceError
from search_spaces.narrow import Narrowed, narrow
from search_spaces.prior import Prior
from search_spaces.registry import distribution_from_dict
from search_spaces.simplex import Simplex
from search_spaces.space import Config, Space
from search_spaces.transferability import TRANSFERABILITY, Axis, Transferability, TransferClass, transferability
from search_spaces.weights import Weights

__all__ = [
    "CATALOGUE",
    "TRANSFERABILITY",
    "Axis",
    "Choice",
    "Condition",
    "Config",
    "Constraint",
    "Distribution",
    "Fixed",
    "Integer",
    "LogUniform",
    "Narrowed",
    "OneOf",
    "Ordinal",
    "Prior",
    "Range",
    "Scalar",
    "Simplex",
    "Space",
    "SpaceError",
    "TransferClass",
    "Transferability",
    "Uniform",
    "Value",
    "Weights",
    "architecture",
    "batch",
    "classic",
    "distribution_from_dict",
    "is_log",
    "mixture",
    "mup_adamw",
    "mup_adamw_full",
    "mup_lamb",
    "mup_lion",
    "mup_muon",
    "mup_optimizer",
    "mup_soap",
    "narrow",
    "ready_made",
    "register_constraint",
    "schedule",
    "transferability",
]
