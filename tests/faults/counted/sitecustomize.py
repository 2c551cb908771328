"""Python imports this where its folder is on PYTHONPATH: each training counts the tokens of its steps, also if it is killed.

Nothing else tells what a killed process had trained. A training leaves a file in `COUNTS` beside the corpus, named after what it
trains from which state, with two numbers of eight bytes: the tokens trained so far, which every step overwrites, and those of the
whole segment. What was written survives the process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COUNTS = "counts"
TRAINING = "proxy_models.training.trainer"


def count(module: ModuleType) -> None:
    """Let every training of the module's trainer count."""
    train = module.Trainer.train

    def counting(trainer: Any, numerics: Any, segment: Any, state: Any = None, **options: Any) -> Any:
        moves: Callable[[], None] | None = options.pop("moves", None)
        folder = trainer.corpus.folder.parent / COUNTS
        folder.mkdir(exist_ok=True)
        tokens = 0
        what = hashlib.sha256(repr((numerics, segment)).encode())
        for name, tensor in sorted(state.tensors.items()) if state else ():
            what.update(name.encode() + bytes(tensor.detach().double().sum().numpy()))
        file = os.open(
            folder / f"{what.hexdigest()[:16]}-{os.getpid()}-{secrets.token_hex(4)}", os.O_WRONLY | os.O_CREAT
        )
        os.pwrite(file, (0).to_bytes(8) + (segment.end - segment.start).to_bytes(8), 0)

        def moved() -> None:
            nonlocal tokens
            tokens += segment.recipe.batch_tokens
            os.pwrite(file, tokens.to_bytes(8), 0)
            if moves:
                moves()

        try:
            return train(trainer, numerics, segment, state, moves=moved, **options)
        finally:
            os.close(file)

    module.Trainer.train = counting


class Finder(MetaPathFinder):
    """Finds the module of trainings as others do, and has it changed once it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TRAINING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            count(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":  # and not where a test asks for a name
    sys.meta_path.insert(0, Finder())
