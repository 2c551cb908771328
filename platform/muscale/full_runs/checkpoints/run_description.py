"""The description of a full run in its directory, from which the model can be rebuilt without the study."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from muscale.errors import StageError
from muscale.full_runs.full_run import FullRun
from muscale.layout import RUN
from proxy_models.architecture.parametrization import ForwardMultipliers
from proxy_models.files import write_text
from proxy_models.serialization import Serializable
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import multipliers_of


@dataclass(frozen=True, kw_only=True)
class RunDescription(Serializable):
    """The model of a run, and its held-out text.

    Attributes:
        multipliers: Multipliers of the forward pass, including tuned ones.
        corpus: Folder of the corpus; relative to the run's directory in the file, since both may be moved together.
        n_tokens: Tokens of the complete run, D.
        position: Tokens of the corpus at which token 0 of the run is.
    """

    numerics: Numerics
    multipliers: ForwardMultipliers
    corpus: Path
    n_tokens: int
    position: int = 0

    @classmethod
    def of(cls, run: FullRun) -> Self:
        """The description of a run."""
        recipe = run.segments[0].recipe
        multipliers = multipliers_of(run.numerics.parametrization(recipe.optimizer), recipe)
        return cls(
            numerics=run.numerics,
            multipliers=multipliers,
            corpus=run.corpus,
            n_tokens=run.n_tokens,
            position=run.position,
        )

    def write(self, directory: Path) -> None:
        """Write the description atomically to a run's directory."""
        corpus = Path(os.path.relpath(self.corpus.resolve(), directory.resolve()))
        write_text(directory / RUN, json.dumps(replace(self, corpus=corpus).to_dict(), indent=1))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the description from a run's directory; raise StageError if the directory has no description, or it can't be read."""
        path = directory / RUN
        try:
            found = cls.from_dict(json.loads(path.read_text()))
            return replace(found, corpus=(directory / found.corpus).resolve())
        except FileNotFoundError as error:
            raise StageError(f"{path}: no such file; a full run writes it to its directory when it starts") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise StageError(f"{path}: not a file that a full run writes ({error})") from error
