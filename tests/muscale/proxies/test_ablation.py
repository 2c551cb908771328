"""What an ablation trains, and a small one from end to end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError, Study, StudyConfig
from muscale.cli import app
from muscale.plans.costs import estimate
from muscale.proxies import ablation
from muscale.settings.ablation import AblateSettings, swaps
from proxy_models.architecture.config import ModelConfig
from proxy_models.training.numerics import Numerics
from tests.proxy_models.families import Recurrent

MakeStudy = Callable[..., Path]


def test_each_swap_changes_one_component() -> None:
    model = ModelConfig(d_model=32, n_layers=2)
    found = swaps(model, AblateSettings().components)
    assert [(name, value) for name, value, _ in found] == [
        *(("activation", value) for value in ("gelu", "relu", "relu2")),
        ("norm", "layernorm"),
        *(("positions", value) for value in ("learned", "alibi", "none")),
        *((name, True) for name in ("qk_norm", "parallel", "tied", "biases")),
    ]
    for name, value, swapped in found:
        plain, other = model.to_dict(), swapped.to_dict()
        differs = {key for key in plain if plain[key] != other[key]}
        assert differs == ({name, "mlp_ratio"} if name == "activation" else {name})
        assert other[name] == value
    of_mlp = [m.n_params_by_group["mlp"] for name, _, m in found if name == "activation"]
    assert of_mlp == [model.n_params_by_group["mlp"]] * 3, "as many parameters with and without a gate"


def test_runs_differ_by_the_swap_and_the_seed_alone(make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), ["ablate.components=['norm', 'tied']", "ablate.seeds=[4, 5]"])
    numerics = Numerics(model=config.model, base=config.model, corpus_key="c", seed=0, evaluation_tokens=1)
    found = ablation.variants(config.ablate, numerics, config.hyperparameters, config.sweep.n_tokens)
    assert [(v.component, v.value, v.job.chain.numerics.seed) for v in found] == [
        *(("", "", seed) for seed in (4, 5)),
        *(("norm", "layernorm", seed) for seed in (4, 5)),
        *(("tied", "True", seed) for seed in (4, 5)),
    ]
    assert len({v.job.chain.key for v in found}) == 6
    assert {v.job.chain.segments for v in found} == {found[0].job.chain.segments}
    costs = estimate(config).set_index("stage").loc["ablate"]
    assert costs["runs"] == 6
    assert costs["n_tokens"] == sum(v.job.chain.last.end for v in found)


def test_a_family_without_components_is_refused_and_costs_nothing(make_study: MakeStudy) -> None:
    model = Recurrent(vocab_size=256, context_length=128).member(32, 2)
    config = StudyConfig.read(make_study()).model_copy(update={"model": model})
    numerics = Numerics(model=model, base=model, corpus_key="c", seed=0, evaluation_tokens=1)
    with pytest.raises(StageError, match="ablate: the components are those of the built-in decoder"):
        ablation.variants(config.ablate, numerics, config.hyperparameters, config.sweep.n_tokens)
    costs = estimate(config).set_index("stage")
    assert costs.loc["ablate", "runs"] == 0
    assert (costs.loc[["sweep", "transfer", "ladder"], "compute_flops"] > 0).all()


def test_a_small_one_from_end_to_end(
    make_study: MakeStudy, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    settings = [
        "sweep.trials=1",
        "sweep.n_tokens=4096",
        "ablate.components=['norm', 'positions']",
        "ablate.seeds=[0, 1]",
    ]
    set_ = [part for setting in settings for part in ("--set", setting)]
    assert app(["ablate", str(path), "--json", *set_], result_action="return_value") == 0
    output = json.loads(capsys.readouterr().out)
    assert {(row["component"], row["value"]) for row in output["table"]} == {
        ("norm", "layernorm"),
        *(("positions", value) for value in ("learned", "alibi", "none")),
    }
    assert output["dof"] == 4
    study = Study.open(path, settings, quiet=True)
    trained = study.runs()
    again = study.ablate()
    assert len(study.runs()) == len(trained), "what the ledger knows is not trained again"
    assert again.loss == output["loss"]
    assert (trained["purpose"] == "ablate").sum() == 10
