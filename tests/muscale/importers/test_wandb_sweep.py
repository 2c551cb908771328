"""A sweep file of Weights & Biases as a space: every distribution, what has no counterpart, and files that mean harm."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from muscale import StageError, StudyConfig
from muscale.importers.import_space import import_space
from search_spaces import Choice, Fixed, Integer, LogUniform, Ordinal, Space, Uniform
from tests.muscale.conftest import MICRO

SWEEP = """
program: train.py
method: bayes
run_cap: 32
metric: {name: val/loss, goal: minimize}
early_terminate: {type: hyperband, min_iter: 3, s: 2, eta: 4}
parameters:
  lr: {distribution: log_uniform_values, min: 1.0e-3, max: 0.1}
  init_scale: {min: 0.5, max: 2.0}
  optimizer: {values: [adamw, muon]}
  batch_tokens: {values: [256, 512, 1024]}
  beta1: {value: 0.9}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return str(path)


def parameter(folder: Path, table: str) -> object:
    found = import_space(write(folder, f"method: random\nparameters: {{x: {table}}}"))
    return found.space["x"]


def test_a_sweep_becomes_tables_that_a_study_file_takes(tmp_path: Path) -> None:
    found = import_space(write(tmp_path, SWEEP), ["lr=learning_rate"])
    assert dict(found.space) == {
        "learning_rate": LogUniform(low=1e-3, high=0.1),
        "init_scale": Uniform(low=0.5, high=2.0),
        "optimizer": Choice(values=("adamw", "muon")),
        "batch_tokens": Ordinal(values=(256, 512, 1024)),
        "beta1": Fixed(value=0.9),
    }
    written = tomllib.loads(str(found))["sweep"]
    assert Space.from_dict(written["space"]) == found.space
    assert {**written, "space": None} == {
        "searcher": "gp",
        "trials": 32,
        "scheduler": "asha",
        "reduction_factor": 4.0,
        "rungs": 3,
        "space": None,
    }
    assert "program" in str(found), "settings without a counterpart are reported"
    assert "min_iter" in str(found)
    study = tomllib.loads(MICRO)
    own = {name: entry for name, entry in written["space"].items() if name in ("learning_rate", "init_scale", "beta1")}
    study["sweep"] = {**written, "n_tokens": 65536, "space": own}
    assert list(StudyConfig.from_dict(study, where="study.toml").sweep.space) == list(own)


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ("{min: 1, max: 8}", Integer(low=1, high=8)),
        ("{distribution: int_uniform, min: 1, max: 8}", Integer(low=1, high=8)),
        ("{distribution: uniform, min: 1, max: 8}", Uniform(low=1, high=8)),
        ("{distribution: q_uniform, min: 0, max: 1, q: 0.25}", Ordinal(values=(0.0, 0.25, 0.5, 0.75, 1.0))),
        ("{distribution: q_uniform, min: 2, max: 9}", Integer(low=2, high=9)),
        ("{distribution: log_uniform, min: -2, max: 0}", LogUniform(low=math.exp(-2), high=1)),
        ("{distribution: inv_log_uniform, min: 0, max: 2}", LogUniform(low=math.exp(-2), high=1)),
        ("{distribution: q_log_uniform_values, min: 1, max: 64, q: 1}", Integer(low=1, high=64, log=True)),
        ("{distribution: beta, a: 2, b: 5}", Uniform(low=0, high=1)),
        ("{values: [true, false]}", Choice(values=(True, False))),
        ("{values: [0.1, 0.3, 0.2]}", Choice(values=(0.1, 0.3, 0.2))),
        ("{values: [7]}", Fixed(value=7)),
        ("{values: [1e-3, 3E-3, .1e-1, 2.e-2]}", Ordinal(values=(0.001, 0.003, 0.01, 0.02))),
        ("{values: [1e2, +2.5e2, 1_0e3]}", Ordinal(values=(100.0, 250.0, 10000.0))),
        ("{value: -1e-3}", Fixed(value=-0.001)),
        ("{min: 1e-3, max: 1e-1}", Uniform(low=0.001, high=0.1)),
        ("{values: ['1e-3', 1e, e5, 1e-3x]}", Choice(values=("1e-3", "1e", "e5", "1e-3x"))),
    ],
)
def test_a_distribution_has_its_counterpart(tmp_path: Path, table: str, wanted: object) -> None:
    assert parameter(tmp_path, table) == wanted


@pytest.mark.parametrize(
    ("table", "ends"),
    [
        ("{distribution: log_uniform, min: 0.00001, max: 0.1}", ("1", "1.105")),
        ("{distribution: inv_log_uniform, min: 0.00001, max: 0.1}", ("0.9048", "1")),
        ("{distribution: q_log_uniform, min: 0.00001, max: 2, q: 1}", ("1", "7.389")),
        ("{distribution: log_normal, mu: 0.001, sigma: 0.0005}", ("1.001",)),
        ("{distribution: q_log_normal, mu: 0.001, sigma: 0.0005, q: 1}", ("1.001",)),
    ],
)
def test_bounds_in_logarithms_are_reported_as_values(tmp_path: Path, table: str, ends: tuple[str, ...]) -> None:
    found = import_space(write(tmp_path, f"method: random\nparameters: {{x: {table}}}"))
    (note,) = [note for note in found.notes if note.startswith("x: ")]
    assert set(ends) <= set(note.replace(";", " ").split())
    assert ("log_uniform_values" in note) == ("uniform" in table)


@pytest.mark.parametrize(
    "table",
    [
        "{distribution: log_uniform, min: 0.0001, max: 1000}",
        "{distribution: inv_log_uniform, min: 0.0001, max: 1000}",
        "{distribution: q_log_uniform, min: 1, max: 1000}",
    ],
)
def test_exponents_beyond_all_numbers_are_refused_with_the_name_for_values(tmp_path: Path, table: str) -> None:
    with pytest.raises(StageError, match=r"parameters\.x: .*log_uniform_values"):
        parameter(tmp_path, table)


def test_normals_are_priors_whose_draws_have_their_mean_and_spread(tmp_path: Path) -> None:
    x, y = "{distribution: normal, mu: 3, sigma: 0.5}", "{distribution: log_normal, mu: 1, sigma: 0.3}"
    text = f"method: random\nparameters: {{x: {x}, y: {y}}}"
    found = import_space(write(tmp_path, text))
    draws = found.space.sample(4000, seed=0)
    for values, mean, spread in (([d["x"] for d in draws], 3, 0.5), ([math.log(d["y"]) for d in draws], 1, 0.3)):  # type: ignore[arg-type]
        numbers = [float(v) for v in values]  # type: ignore[arg-type]
        middle = sum(numbers) / len(numbers)
        assert middle == pytest.approx(mean, abs=5 * spread / 4000**0.5)
        assert math.sqrt(sum((v - middle) ** 2 for v in numbers) / len(numbers)) == pytest.approx(spread, rel=0.06)
    assert "cut off" in str(found)


def test_unknown_names_are_reported_with_the_closest_known_one(tmp_path: Path) -> None:
    found = import_space(write(tmp_path, "method: random\nparameters: {learning_rte: {min: 0.1, max: 0.2}}"))
    assert [note.endswith("--rename learning_rte=learning_rate?") for note in found.unknown] == [True]
    short = import_space(write(tmp_path, "method: random\nparameters: {lr: {min: 0.1, max: 0.2}}"))
    assert short.unknown[0].endswith("--rename lr=learning_rate?")
    usual = "weight_decay: {min: 0.1, max: 0.2}, batch_size: {values: [8, 16]}, warmup_steps: {values: [8, 16]}"
    other = import_space(write(tmp_path, f"method: random\nparameters: {{{usual}}}")).unknown
    for note, name in zip(other, ("weight_decay_tau", "batch_tokens", "warmup_fraction"), strict=True):
        assert name in note
        assert "--rename" not in note, "it has another meaning or unit"
    nested = import_space(
        write(tmp_path, "method: grid\nparameters: {optim: {parameters: {beta1: {values: [0.8, 0.9]}}}}"),
        ["optim.beta1=beta1"],
    )
    assert dict(nested.space) == {"beta1": Ordinal(values=(0.8, 0.9))}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method: bayes\nparameters: {x: {min: 2, max: 1}}", r"parameters\.x: "),
        ("method: bayes\nparameters: {x: {distribution: zipf}}", r"parameters\.x: .*constant"),
        ("method: bayes\nparameters: {x: {distribution: uniform, min: 1}}", r"parameters\.x: .*'max'"),
        ("method: annealing\nparameters: {x: {value: 1}}", "method: .*'annealing'"),
        ("method: bayes", "parameters: .*None"),
        ("method: bayes\nparameters: {x: 3}", r"parameters\.x: .*3"),
        ("method: [", "YAML"),
        ("- 1", "parameters"),
        ("!!python/object/apply:os.system ['true']", "YAML"),
        ("method: bayes\nparameters: {x: {value: 1}}\nearly_terminate: {type: median}", "early_terminate: .*median"),
        (
            "method: grid\nparameters: {x: {value: 1}}\nearly_terminate: {type: hyperband, eta: .inf}",
            "early_terminate.eta: .*inf",
        ),
    ],
)
def test_a_faulty_file_is_refused_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(StageError, match=rf"sweep\.yaml: .*{message}"):
        import_space(write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "rename", "message"),
    [
        ("sweep.txt", (), r"'\.txt'"),
        ("none.yaml", (), r"none\.yaml"),
        ("sweep.yaml", ["lr"], "--rename.*'lr'"),
        ("sweep.yaml", ["rate=learning_rate"], "--rename rate.*init_scale"),
        ("sweep.yaml", ["lr=init_scale"], "--rename"),
    ],
)
def test_a_wrong_path_or_name_is_refused(tmp_path: Path, name: str, rename: list[str], message: str) -> None:
    write(tmp_path, SWEEP)
    with pytest.raises(StageError, match=message):
        import_space(str(tmp_path / name), rename)
