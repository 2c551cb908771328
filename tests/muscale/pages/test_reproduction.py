"""The commands of a report reproduce the same study."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from muscale import Study
from muscale.findings import findings
from muscale.pages.contents import gather
from search_spaces import LogUniform, Ordinal, Prior, Space

SPACE = Space(
    {
        "learning_rate": LogUniform(low=0.004, high=0.03, prior=Prior(centre=0.01, spread=1.0)),
        "init_scale": Ordinal(values=(0.5, 1.0, 2.0)),
    }
)


def test_settings_from_python_are_quoted_for_a_shell(make_study: Callable[[], Path]) -> None:
    path = make_study()
    given = {"sweep.trials": 3, "transfer.horizons": [0.5, 1.0], "name": "it's mine", "sweep.space": SPACE}
    study = Study.open(path, given, quiet=True)
    found = gather(study.contents, findings(study.contents)).reproduction
    assert found is not None
    (first, _), *_ = found["commands"]
    assert first.startswith("muscale run study.toml --set sweep.trials=3 --set 'transfer.horizons=[0.5, 1.0]' --set ")
    words = shlex.split(first)
    assert words[3:][::2] == ["--set"] * len(given)
    again = Study.open(path, words[4::2], quiet=True)
    assert again.config.to_dict() == study.config.to_dict()
