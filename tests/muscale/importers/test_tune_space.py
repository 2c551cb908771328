"""Tune's param_space as a space: every function of Tune's, from its objects and from a script that is never run."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune

import muscale.tune
from muscale import StageError
from muscale.importers.import_space import import_space
from search_spaces import Choice, Distribution, Fixed, Integer, LogUniform, Ordinal, Prior, Space, Uniform
from tests.muscale.command_lines import muscale as command

EVERY: list[tuple[str, Distribution]] = [
    ("tune.uniform(0.5, 2)", Uniform(low=0.5, high=2.0)),
    ("tune.quniform(0, 1, 0.25)", Ordinal(values=(0.0, 0.25, 0.5, 0.75, 1.0))),
    ("tune.loguniform(1e-4, 1e-1)", LogUniform(low=1e-4, high=1e-1)),
    ("tune.qloguniform(1, 4, 1)", Ordinal(values=(1, 2, 3, 4))),
    ("tune.randint(1, 8)", Integer(low=1, high=7)),
    ("tune.qrandint(128, 512, 128)", Ordinal(values=(128, 256, 384, 512))),
    ("tune.qrandint(1, 8, 1)", Integer(low=1, high=7)),
    ("tune.lograndint(1, 64)", Integer(low=1, high=63, log=True)),
    ("tune.qlograndint(2, 8, 2)", Ordinal(values=(2, 4, 6, 8))),
    ("tune.randn(3, 0.5)", Uniform(low=1.0, high=5.0, prior=Prior(centre=3.0, spread=0.5))),
    ("tune.qrandn(3.0, 0.5, 0.1)", Uniform(low=1.0, high=5.0, prior=Prior(centre=3.0, spread=0.5))),
    ('tune.choice(["adamw", "lion"])', Choice(values=("adamw", "lion"))),
    ("tune.choice([256, 512])", Ordinal(values=(256, 512))),
    ("tune.grid_search([0.9, 0.95])", Ordinal(values=(0.9, 0.95))),
    ("0.9", Fixed(value=0.9)),
    ('"wsd"', Fixed(value="wsd")),
]
SCRIPT = """
import os
from ray import train, tune
from ray.tune import choice as pick
from ray.tune.schedulers import ASHAScheduler

os.mkdir("was run")
LOW, HIGH = 1e-4, 0.1
DECADES = 3
common = {"beta1": tune.uniform(0.8, 0.95), "data": None}

def trainable(config):
    for step in range(100):
        tune.report({"loss": config["lr"] ** 2})

def main(lr=1e-3):
    width = 2**5
    param_space = {
        "lr": tune.loguniform(10**-DECADES, upper=1e-1),
        "optimizer": pick(["adamw", "lion"]),
        **common,
        "shape": dict(width=width, batch_tokens=tune.grid_search([width * 8, width * 16])),
        "epochs": 10,
    }
    tuner = tune.Tuner(
        trainable,
        param_space=param_space,
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=64, scheduler=ASHAScheduler()),
    )
    tuner.fit()
"""


def drawn(config: dict[Any, Any]) -> Any:
    return config["width"] // 2


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("text", "wanted"), EVERY, ids=[text for text, _ in EVERY])
def test_each_function_is_the_same_from_its_object_and_its_text(
    tmp_path: Path, text: str, wanted: Distribution
) -> None:
    value: Any = eval(text, {"tune": tune})
    assert dict(muscale.tune.space_of({"x": value}).space) == {"x": wanted}
    assert dict(import_space(write(tmp_path, f"param_space = {{'x': {text}}}")).space) == {"x": wanted}
    if hasattr(value, "sample") and not isinstance(wanted, Uniform):
        assert all(wanted.contains(value.sample()) for _ in range(64)), "what Tune draws lies in the space"


def test_a_script_is_read_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = import_space(write(tmp_path, SCRIPT), ["lr=learning_rate", "shape.batch_tokens=batch_tokens"])
    assert not (tmp_path / "was run").exists()
    assert dict(found.space) == {
        "learning_rate": LogUniform(low=1e-3, high=0.1),
        "optimizer": Choice(values=("adamw", "lion")),
        "beta1": Uniform(low=0.8, high=0.95),
        "shape.width": Fixed(value=32),
        "batch_tokens": Ordinal(values=(256, 512)),
        "epochs": Fixed(value=10),
    }
    assert any(note.startswith("data: ") for note in found.notes), "what is no value is reported"
    assert [message.split(" ")[0] for message in found.unknown] == ["shape.width", "epochs"]
    assert Space.from_dict(tomllib.loads(str(found))["sweep"]["space"]) == found.space


def test_a_name_chooses_among_several_spaces(tmp_path: Path) -> None:
    two = "one = {'x': 1}\nother = {'y': tune.randint(1, 3)}\nTuner(param_space=one)\nTuner(param_space=other)\n"
    path = write(tmp_path, two)
    assert dict(import_space(f"{path}#other").space) == {"y": Integer(low=1, high=2)}
    with pytest.raises(StageError, match=r"script\.py: param_space: .*lines 3, 4"):
        import_space(path)


def test_numpy_s_values_are_python_s() -> None:
    found = muscale.tune.space_of(
        {"x": tune.choice(list(np.array([1, 2]))), "y": tune.grid_search(np.array([0.5, 1.0]))}
    )
    assert json.loads(json.dumps(found.to_dict()))["sweep"]["space"] == {
        "x": {"distribution": "ordinal", "values": [1, 2]},
        "y": {"distribution": "ordinal", "values": [0.5, 1.0]},
    }


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("param_space = {'lr': args.lr}", r"param_space\.lr, line 1: .*args\.lr"),
        ("param_space = {'a': {'lr': tune.loguniform(low, 1)}}", r"param_space\.a\.lr, line 1: .*low"),
        ("low = 1\nlow += 1\nparam_space = {'lr': tune.uniform(low, 3)}", r"param_space\.lr, line 3: .*low"),
        ("low = 1\ndef f(low):\n  t(param_space={'lr': tune.uniform(low, 3)})", r"param_space\.lr, line 3: .*low"),
        ("a = b\nb = a\nparam_space = a", "param_space, line 2: .*a"),
        ("param_space = {'lr': tune.uniform(0.1)}", r"param_space\.lr, line 1: .*lower, upper"),
        ("param_space = {'lr': tune.uniform(0.1, 0.2, rate=3)}", r"param_space\.lr, line 1: .*lower, upper"),
        ("param_space = {'lr': tune.quniform(0.1, 0.2)}", r"param_space\.lr, line 1: .*lower, upper, q"),
        ("param_space = {'lr': tune.loguniform(0, 0.2)}", "script.py: lr: "),
        ("param_space = {'lr': tune.uniform(0.1, 'high')}", "lr: upper of uniform .*'high'"),
        ("param_space = {'lr': tune.uniform(0.1, 1e999)}", "lr: .*inf"),
        ("param_space = {'n': tune.randint(1.5, 3)}", "n: .*1.5"),
        ("param_space = {'x': tune.sample_from(lambda c: 1)}", "x: sample_from"),
        ("param_space = {'x': tune.choice([tune.uniform(0, 1), 2])}", "x: .*choice"),
        ("param_space = {'x': tune.choice([])}", "x: choice"),
        ("param_space = {'x': hp.uniform(0, 1)}", r"param_space\.x, line 1: .*hp\.uniform"),
        ("param_space = {1: 2}", "param_space, line 1: .*text.*1"),
        ("param_space = {'x': 2**2**9}", r"param_space\.x, line 1: .*2 \*\* 2 \*\* 9"),
        ("param_space = {'x': 1 / 0}", "script.py: .*zero"),
        ("param_space = [1]", "param_space, line 1: must be a dict"),
        ("param_space = {}", "param_space: .*none"),
        ("space = {'x': 1}", "param_space: .*0 times"),
        ("param_space = {", "Python"),
        ("x" * (2 << 20), "1,048,576 bytes"),
        (f"a = {{{', '.join(f'{k!r}: 0' for k in map(str, range(200)))}}}\nparam_space = [{'a, ' * 100}]", "10,000"),
        ("param_space = " + "-" * 100_000 + "1", "Python|recursion|param_space"),
    ],
    ids=range(26),
)
def test_what_can_t_be_read_is_refused_with_its_key(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(StageError, match=rf"script\.py: .*{where}|{where}"):
        import_space(write(tmp_path, text))


def test_objects_without_a_counterpart_are_refused_with_their_key() -> None:
    for domain in (tune.sample_from(drawn), tune.choice([tune.uniform(0, 1)]), tune.choice([{"a": 1}])):
        with pytest.raises(StageError, match="param_space: x: "):
            muscale.tune.space_of({"x": domain})


def test_the_command_prints_tables_for_a_study_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(capsys, "import-space", Path(write(tmp_path, SCRIPT)), "--rename", "lr=learning_rate")
    assert done.code == 0
    low = tomllib.loads(done.out)["sweep"]["space"]["learning_rate"]["low"]
    assert math.isclose(low, 1e-3)
