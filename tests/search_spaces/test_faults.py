"""Tables that break a rule of spaces are refused where they stand: a line each, `keys of the space => name | words`."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from search_spaces import Fixed, Prior, Space, SpaceError, Uniform

BASE = """
optimizer = { distribution = "choice", values = ["adamw", "lion", "sgd"] }
n_layers = { distribution = "integer", low = 1, high = 8 }
mix = { distribution = "simplex", parts = ["web", "code"] }
a = { distribution = "uniform", low = 0, high = 1 }
b = { distribution = "uniform", low = 0, high = 1 }
c = { distribution = "uniform", low = 0, high = 1 }
"""
UNIT = 'distribution="uniform", low=0, high=1'
SIMPLEX = 'distribution="simplex", parts=["web", "code"]'
FAULTS = f"""
x=0.003 => x | distribution | 0.003
x={{low=0, high=1}} => x | distribution
x={{distribution="loguniform"}} => x | 'loguniform' | 'log_uniform'
x={{distribution="uniform", low=0, hihg=1}} => x | 'hihg' | 'high'
x={{distribution="integer", log=true}} => x | low and high
x={{distribution="uniform", low="0", high=1}} => x | low | '0'
x={{distribution="uniform", low=0, high=inf}} => x | high | inf
x={{distribution="uniform", low=-1.5e308, high=1.5e308}} => x | high - low
x={{distribution="uniform", low=1, high=1}} => x | low < high | high = 1
x={{distribution="log_uniform", low=0, high=1}} => x | low > 0 | low = 0
x={{distribution="log_uniform", low=1e-300, high=1e300}} => x | high / low
x={{distribution="integer", low=1.0, high=2}} => x | low | 1.0
x={{distribution="integer", low=1, high=2199023255552}} => x | 2**40 | 2199023255552
x={{distribution="integer", low=0, high=3, log=true}} => x | low >= 1 | low = 0
x={{distribution="integer", low=1, high=3, log="yes"}} => x | log | 'yes'
x={{distribution="choice", values="adamw"}} => x | values | 'adamw'
x={{distribution="choice", values=["adamw"]}} => x | two | "fixed"
x={{distribution="choice", values=[1, 2, 1]}} => x | differ | [1, 2, 1]
x={{distribution="choice", values=[1, true]}} => x | differ
x={{distribution="choice", values=[0.1, nan]}} => x | nan
x={{distribution="choice", values=[[0.9, 0.95], [0.9, 0.99]]}} => x | [0.9, 0.95]
x={{distribution="ordinal", values=["a", "a"]}} => x | differ
x={{{SIMPLEX}, low=0.1}} => x | low | 0.1
x={{{SIMPLEX}, low={{cod=0.1}}}} => x | low | 'cod'
x={{{SIMPLEX}, low={{code=-0.1}}}} => x | low.code | -0.1
x={{{SIMPLEX}, low={{code=0.5, web=0.499999}}}} => x | 1e-05 | 0.999999
x={{distribution="simplex", parts=["web", "web"]}} => x | parts
x={{distribution="simplex", parts="web"}} => x | parts | 'web'
x={{{UNIT}, prior=0.5}} => x | prior
x={{{UNIT}, prior={{centre=0.5}}}} => x | prior | spread
x={{{UNIT}, prior={{center=0.5, spread=1}}}} => x | 'center' | 'centre'
x={{{UNIT}, prior={{centre=2, spread=1}}}} => x | centre | 0 … 1 | got 2
x={{{UNIT}, prior={{centre=0.5, spread=0}}}} => x | spread | got 0
x={{{UNIT}, prior={{centre=0.5, spread=1e6}}}} => x | spread | 1000
x={{distribution="choice", values=["a", "b"], prior={{centre="a", spread=1}}}} => x | below 1 | got 1
x={{{SIMPLEX}, prior={{centre={{web=1, code=0}}, spread=0.5}}}} => x | lower bound
x={{{SIMPLEX}, prior={{centre={{web=0.5, code=0.5}}, spread=2}}}} => x | below 1 | got 2
x={{{SIMPLEX}, prior={{centre={{web=[1], code="x"}}, spread=0.5}}}} => x | centre | web [1]
x={{{UNIT}, when={{optimiser=["adamw"]}}}} => x | 'optimiser' | 'optimizer'
x={{{UNIT}, when={{optimizer=["adam"]}}}} => x | optimizer = 'adam' | adamw
x={{{UNIT}, when={{optimizer="adamw"}}}} => x | when.optimizer | 'adamw'
x={{{UNIT}, when={{optimizer=[]}}}} => x | when.optimizer
x={{{UNIT}, when={{optimizer=[["adamw"]]}}}} => x | when.optimizer
x={{{UNIT}, when={{}}}} => x | when
x={{{UNIT}, when={{n_layers={{min=3}}}}}} => x | when.n_layers | 'min'
x={{{UNIT}, when={{n_layers={{}}}}}} => x | when.n_layers
x={{{UNIT}, when={{n_layers={{low="3"}}}}}} => x | when.n_layers | '3'
x={{{UNIT}, when={{n_layers={{low=9}}}}}} => x | n_layers >= 9
x={{{UNIT}, when={{n_layers={{low=2.2, high=2.8}}}}}} => x | n_layers in 2.2 … 2.8
x={{{UNIT}, when={{n_layers={{low=3, high=2}}}}}} => x | low = 3, high = 2
x={{{UNIT}, when={{optimizer={{low=1}}}}}} => x | optimizer >= 1
x={{{UNIT}, when={{mix=[0.5]}}}} => x | mix
x={{{UNIT}, when={{x=[1]}}}} => sweep.space | x → x
x={{{UNIT}, when={{y=[1]}}}} ;; y={{{UNIT}, when={{x=[1]}}}} => sweep.space | → y
constraints.order={{les=["a", "b"]}} => constraints.order | 'les' | 'less' | register_constraint
constraints.order={{less=["a"]}} => constraints.order | ['a']
constraints.order={{less=["a", "a"]}} => constraints.order | differ
constraints.order={{less="ab"}} => constraints.order | 'ab'
constraints.order={{multiple_of=["a", "b", "c"]}} => constraints.order | two
constraints.order={{less={{names=["a", "b"], bound=1}}}} => constraints.order | bound
constraints.order={{sum_at_most=["a", "b"]}} => constraints.order | bound
constraints.order={{sum_at_most={{names=["a", "b"], bound="1"}}}} => constraints.order | bound | '1'
constraints.order={{sum_at_most={{name=["a", "b"]}}}} => constraints.order | 'name'
constraints.order={{less=["a", "b"], at_most=["b", "c"]}} => constraints.order | one rule
constraints.order="a < b" => constraints.order | 'a < b'
constraints.order={{less=["a", "optimizer"]}} => sweep.space | less | optimizer
constraints.order={{less=["a", "bb"]}} => sweep.space | 'bb'
constraints=3 => constraints | 3
""".strip().splitlines()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_table_that_breaks_a_rule_is_refused_where_it_stands(fault: str) -> None:
    keys, _, expected = fault.rpartition(" => ")
    name, *words = expected.split(" | ")
    with pytest.raises(SpaceError) as error:
        Space.from_dict(tomllib.loads(BASE + keys.replace(" ;; ", "\n")), where="study.toml: sweep.space")
    message = str(error.value)
    assert message.startswith("study.toml: sweep.space")
    assert [word for word in (f"{name}: ", *words) if word not in message] == []


@pytest.mark.parametrize("table", [{}, {"": {"distribution": "fixed", "value": 1}}, [], {"a": 0.1}])
def test_a_space_is_a_table_of_named_tables(table: Any) -> None:
    with pytest.raises(SpaceError, match="^study.toml: sweep.space"):
        Space.from_dict(table, where="study.toml: sweep.space")


def test_objects_that_break_a_rule_are_refused() -> None:
    with pytest.raises(SpaceError, match="dropout.*0.1"):
        Space({"dropout": 0.1})  # type: ignore[dict-item]
    with pytest.raises(SpaceError, match="constraints"):
        Space({"constraints": Uniform(low=0, high=1)})
    with pytest.raises(SpaceError, match="fixed.*prior"):
        Fixed(value=1, prior=Prior(centre=1, spread=1))
