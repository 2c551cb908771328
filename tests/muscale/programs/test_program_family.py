"""A program as a family: the rules of its tensors are those of a module, and nobody runs it who was not allowed to."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path

import pytest
import torch

from muscale.errors import TrainerError
from muscale.programs.program_family import Program, digest_of, table_of, tensor_shapes
from muscale.programs.protocol import Description
from proxy_models.architecture import counted
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.parametrization import TensorClass, parametrize

PROGRAM = """
import json, sys
from pathlib import Path
Path("ran").open("a").write("x")
width = json.loads(Path(sys.argv[1]).read_text())["shape"]["width"]
print(json.dumps({"n_params": 12 * width * width + width, "n_active_params": 12 * width * width, "flops_per_token": 72 * width**2}))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program in a study's folder, not allowed to run; it leaves the file `ran`."""
    monkeypatch.setattr(counted, "_counted", {})
    (tmp_path / "train.py").write_text(PROGRAM)
    words = (sys.executable, "train.py", "{config}", "{state}")
    return Program(command=shlex.join(words), digest=digest_of(words, tmp_path), step=8)


def test_a_program_runs_only_once_allowed_and_each_shape_once(
    program: Program, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is not run here"):
        program.member(16, 1)
    assert not (tmp_path / "ran").exists()
    program.allow(tmp_path)
    assert program.command in capfd.readouterr().err
    for _ in range(2):
        member = program.member(16, 1)
        assert (member.n_params, member.n_params_total) == (12 * 256, 12 * 256 + 16)
    assert (tmp_path / "ran").read_text() == "x"
    with pytest.raises(ValueError, match="multiple of trainer.width_step = 8, got 12"):
        program.member(12, 1)


def test_other_files_are_another_program(program: Program, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM + "\n")
    with pytest.raises(TrainerError, match=program.digest):
        program.allow(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert digest_of(("python", "-m", "train"), tmp_path) == "", "nothing in the folder is named"


def test_the_member_for_a_size_is_near_it_and_few_are_asked_for(program: Program, tmp_path: Path) -> None:
    program.allow(tmp_path)
    for n_params in (1e4, 3e6):
        found = program.member_for(n_params, 1)
        assert abs(math.log(found.n_params / n_params)) < math.log(1.3)
    assert len((tmp_path / "ran").read_text()) < 40


def description(config: ModelConfig) -> Description:
    with torch.device("meta"):
        tensors = {name: tuple(tensor.shape) for name, tensor in Decoder(config).named_parameters()}
    n_params = sum(map(math.prod, tensors.values()))
    return Description(
        n_params=n_params,
        n_active_params=n_params,
        flops_per_token=1.0,
        tensors=tensors,
        classes={"readout.weight": TensorClass.READOUT},
    )


@pytest.mark.parametrize("depth_exponent", [1.0, 0.5])
def test_rules_by_dimensions_are_those_of_the_decoder(depth_exponent: float) -> None:
    base = ModelConfig(d_model=32, n_layers=2, qk_norm=True, biases=True, norm="layernorm")
    target = ModelConfig(d_model=128, n_layers=4, qk_norm=True, biases=True, norm="layernorm")
    deep = [ModelConfig(d_model=w, n_layers=4, qk_norm=True, biases=True, norm="layernorm") for w in (32, 64)]
    found = table_of(
        description(target), *map(description, deep), depth_mult=2.0, optimizer="adamw", depth_exponent=depth_exponent
    )
    expected = parametrize(target, base, depth_exponent=depth_exponent)
    assert found.rules == expected.rules
    assert found.multipliers.readout == expected.multipliers.readout
    assert found.multipliers.branch == expected.multipliers.branch


def test_a_stack_of_matrices_has_the_fan_in_of_one_and_is_stated() -> None:
    def described(width: int, **classes: str) -> Description:
        tensors = {"layers.0.experts": [4, 3 * width, width], "layers.0.convolution": [width, width, 5]}
        n_params = sum(map(math.prod, tensors.values()))
        answer = {"n_params": n_params, "flops_per_token": 1.0, "tensors": tensors}
        return Description.parse(json.dumps(answer | {"classes": {f"layers.0.{n}": of for n, of in classes.items()}}))

    found = tensor_shapes(*(described(width, experts="hidden_stack") for width in (64, 16, 32)))
    assert {name: (shape.tensor_class, shape.fan_in, shape.width_mult) for name, shape in found.items()} == {
        "layers.0.experts": (TensorClass.HIDDEN_STACK, 64, 4.0),
        "layers.0.convolution": (TensorClass.HIDDEN, 64 * 5, 4.0),
    }
    for classes in ({}, {"experts": "hidden"}):
        with pytest.raises(ValueError, match="layers.0.experts"):
            tensor_shapes(*(described(width, **classes) for width in (64, 16, 32)))


def test_a_tensor_without_a_rule_is_named() -> None:
    one = json.dumps({"n_params": 6, "flops_per_token": 1.0, "tensors": {"in.weight": [3, 2]}})
    two = json.dumps({"n_params": 12, "flops_per_token": 1.0, "tensors": {"in.weight": [6, 2]}})
    with pytest.raises(ValueError, match="in.weight"):
        tensor_shapes(Description.parse(one), Description.parse(one), Description.parse(two))
    with pytest.raises(TrainerError, match="in.weight.*classes"):
        table_of(Description.parse(one), Description.parse(one), Description.parse(two))
    with pytest.raises(TrainerError, match="classes.*embedding.*got 'head'"):
        Description.parse(one.replace('"tensors"', '"classes": {"in.weight": "head"}, "tensors"'))
