"""Nothing is trained on token files that are not those that were written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError
from muscale.actors.corpus_hashes import require_unchanged
from muscale.layout import CORPUS
from tests.faults.damage import flip_the_middle, tear


@pytest.mark.parametrize("damage", [tear, flip_the_middle])
@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_nothing_is_trained_on_a_damaged_token_file(study: Path, damage: Callable[[Path], None], name: str) -> None:
    require_unchanged(study / CORPUS)  # and no process trusts another folder that it has hashed
    other = Path(shutil.copytree(study / CORPUS, study / "other"))
    damage(other / name)
    with pytest.raises((StageError, ValueError), match=rf"{name}.*(changed|states \d+ bytes, found)"):
        require_unchanged(other)
