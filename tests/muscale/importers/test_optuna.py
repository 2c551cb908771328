"""Optuna's studies: one as a space and as known results, a sweep as one, and optuna-dashboard that opens it."""

from __future__ import annotations

import itertools
import json
import math
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState

from muscale import StageError
from muscale.importers.import_space import import_space
from muscale.importers.results import describe_results, is_outside, outside_results, record_results
from muscale.search.methods import resolve_searcher
from muscale.search.optuna_export import export_optuna
from muscale.search.prior_runs import usable_runs
from muscale.search.sweep import Sweep
from muscale.store.cancels import cancel_trial
from muscale.store.ledger_tables import ResultKind
from search_spaces import Choice, Fixed, Integer, LogUniform, Ordinal, Space, Uniform
from tests.muscale.command_lines import muscale
from tests.muscale.planted_sweep import plant

MakeStudy = Callable[..., Path]


def storage(path: Path) -> str:
    return f"sqlite:///{path}"


def write_study(path: Path, name: str = "theirs", n_trials: int = 8) -> None:
    study = optuna.create_study(
        storage=storage(path), study_name=name, sampler=optuna.samplers.RandomSampler(seed=0), direction="minimize"
    )

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("learning_rate", 0.004, 0.03, log=True)
        trial.suggest_float("share", 0.0, 1.0, step=0.25)
        trial.suggest_int("layers", 1, 4)
        trial.suggest_int("batch", 256, 1024, step=256)
        trial.suggest_categorical("init_scale", [0.5, 1.0, 2.0])
        trial.suggest_categorical("norm", ["pre", "post"])
        trial.suggest_float("one", 2.0, 2.0)
        if trial.number == 3:
            raise ArithmeticError("diverged")
        return 2.0 + abs(rate - 0.01)

    study.optimize(objective, n_trials=n_trials, catch=ArithmeticError)
    study._storage.remove_session()


def test_a_study_is_a_space(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    write_study(path)
    before = path.read_bytes()
    found = import_space(str(path))
    assert dict(found.space) == {
        "learning_rate": LogUniform(low=0.004, high=0.03),
        "share": Ordinal(values=(0.0, 0.25, 0.5, 0.75, 1.0)),
        "layers": Integer(low=1, high=4),
        "batch": Ordinal(values=(256, 512, 768, 1024)),
        "init_scale": Ordinal(values=(0.5, 1.0, 2.0)),
        "norm": Choice(values=("pre", "post")),
        "one": Fixed(value=2.0),
    }
    assert found.settings == {"trials": 8}
    assert path.read_bytes() == before, "it is only read"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["theirs.db"]


def test_of_several_studies_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    write_study(path, "first", 1)
    write_study(path, "second", 1)
    assert import_space(f"{path}#second").source.endswith("#second")
    with pytest.raises(StageError, match="first, second"):
        import_space(str(path))
    with pytest.raises(StageError, match="'third'"):
        import_space(f"{path}#third")
    with pytest.raises(StageError, match="none.db"):
        import_space(str(tmp_path / "none.db"))
    other = tmp_path / "other.db"
    sqlite3.connect(other).close()
    with pytest.raises(StageError, match="other.db"):
        import_space(str(other))


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS trial_id FROM n"


DISTRIBUTION = "UPDATE trial_params SET param_value = 0, distribution_json = "


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (f"DROP TABLE trials; CREATE VIEW trials AS {ENDLESS}", "trials: .*view"),
        ("DELETE FROM study_directions", ""),
        ("DROP TABLE trials", "trials"),
        ("UPDATE trials SET state = 'DONE'", "DONE"),
        (f"{DISTRIBUTION}'{{'", ""),
        (f"""{DISTRIBUTION}'{{"name": "FloatDistribution", "attributes": {{"low": [], "high": 1}}}}'""", ""),
        (f"""{DISTRIBUTION}'{{"name": "CategoricalDistribution", "attributes": {{"choices": [[1]]}}}}'""", r"\[1\]"),
        ("UPDATE studies SET study_name = x'ff'", ""),
    ],
)
def test_a_storage_made_wrong_is_refused_without_warnings(
    tmp_path: Path, statement: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "theirs.db"
    write_study(path, n_trials=2)
    caplog.clear()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(statement)
    connection.close()
    with pytest.raises(StageError, match=rf"^optuna: {path}: .*{message}") as refusal:
        import_space(str(path))
    assert len(str(refusal.value)) < 1000
    assert caplog.records == []
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.db"]


def test_outside_results_inform_the_searcher_and_are_no_runs(swept: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    write_study(path)
    assert is_outside(path)
    assert not is_outside(Path(swept.ledger.storage.name)), "a ledger is no storage of Optuna's"
    space = swept.config.sweep.space
    warm_started = Sweep(config=swept.config, ledger=swept.ledger, numerics=swept.numerics, learn_from=(str(path),))
    table = warm_started.prior_runs()
    assert len(table) == 8
    assert set(table["source"]) == {str(path)}
    assert table["loss"].isna().sum() == 1, "what failed has no loss"
    assert set(table["n_params"]) == {swept.config.model.n_params}
    settings = swept.config.sweep.model_copy(update={"searcher": "auto"})
    assert resolve_searcher(settings, table) == "across_scales"
    assert resolve_searcher(settings, swept.prior_runs()) == "tpe"
    record_results(swept.ledger, swept.key, path, table)
    record_results(swept.ledger, swept.key, path, table)
    noted = swept.ledger.latest_result(ResultKind.OUTSIDE_RESULTS)
    assert noted is not None
    assert noted["payload"] | {"sha256": ""} == {
        "sweep": swept.key,
        "source": str(path),
        "n_results": 8,
        "asserted": True,
        "sha256": "",
    }
    assert swept.ledger.runs().empty, "they are no rows that a law could be fitted from"
    assert usable_runs(swept.ledger.runs(), swept.plan.defaults, space, swept.numerics).empty
    assert "reported by the user" in describe_results(path, table)


def test_a_command_takes_one_of_several_studies_by_its_name(
    make_study: MakeStudy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.db"
    write_study(path, "first")
    write_study(path, "second")
    done = muscale(capsys, "sweep", make_study(), "--learn-from", f"{path}#second", "--dry-run")
    assert (done.code, done.err) == (0, "")


def test_a_suggestion_follows_imported_results(swept: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    rates = [0.004 * 1.09**k for k in range(24)]
    best = 0.0075
    pd.DataFrame(
        [(rate, scale, 2 + 0.3 * abs(rate / best - 1) ** 2, "a note") for rate in rates for scale in (0.5, 1.0, 2.0)],
        columns=["learning_rate", "init_scale", "loss", "note"],
    ).to_csv(path, index=False)
    config = swept.config.model_copy(update={"sweep": swept.config.sweep.model_copy(update={"searcher": "auto"})})
    warm_started = Sweep(config=config, ledger=swept.ledger, numerics=swept.numerics, learn_from=(str(path),))
    record = warm_started.record()
    engine = warm_started.engine(record, lambda _result: None, lambda *_run: None)
    engine.next()
    assert record.rounds[0].searcher == "across_scales"
    assert record.configs[0]["learning_rate"] == pytest.approx(best, rel=0.25)


SPACE = Space(
    {
        "learning_rate": LogUniform(low=0.004, high=0.03),
        "layers": Integer(low=1, high=4),
        "norm": Choice(values=("pre", "post")),
        "x": Uniform(low=0, high=1),
    }
)
GOOD = {"learning_rate": [0.01], "layers": [2], "norm": ["pre"], "x": [0.5], "loss": [2.0]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": [-1.0]}, "learning_rate: .*-1.0 in row 0"),
        ({"layers": [2.5]}, "layers: .*2.5 in row 0"),
        ({"norm": ["middle"]}, "norm: .*'middle' in row 0"),
        ({"x": ["much"]}, "x: .*'much' in row 0"),
        ({"loss": [0.0]}, "loss: .*0.0.* in row 0"),
        ({"loss": ["low"]}, "loss: .*'low' in row 0"),
        ({"n_tokens": [0]}, "n_tokens: .*0.* in row 0"),
        ({"x": None}, "no column x.*learning_rate"),
    ],
)
def test_faulty_results_are_refused_with_file_column_and_value(
    tmp_path: Path, changed: dict[str, list[object]], message: str
) -> None:
    path = tmp_path / "results.csv"
    columns = {name: values for name, values in {**GOOD, **changed}.items() if values is not None}
    pd.DataFrame(columns).to_csv(path, index=False)
    with pytest.raises(StageError, match=rf"results\.csv: {message}"):
        outside_results(path, SPACE, n_params=1000, n_tokens=1000)


def test_inactive_cells_of_a_conditional_space_are_not_looked_at(tmp_path: Path) -> None:
    tau = {"distribution": "log_uniform", "low": 0.01, "high": 1.0, "when": {"optimizer": ["adamw"]}}
    space = Space.from_dict({"optimizer": {"distribution": "choice", "values": ["adamw", "lion"]}, "tau": tau})
    path = tmp_path / "results.csv"
    for separator, cell in itertools.product(",;", ("", "0", "-", "NA")):
        lines = ["optimizer,tau,loss", "adamw,.1,2.9", f"lion,{cell},2.88", "adamw,0.2,2.87"]
        path.write_text("\n".join(lines).replace(",", separator) + "\n")
        found = outside_results(path, space, n_params=1000, n_tokens=1000)
        assert found["tau"].tolist() == pytest.approx([0.1, math.nan, 0.2], nan_ok=True)
        assert found["loss"].tolist() == [2.9, 2.88, 2.87]


def test_results_of_steps_are_those_of_the_imported_space(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    study = optuna.create_study(storage=storage(path), sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(lambda trial: 1 + trial.suggest_float("init_scale", 0.1, 1.3, step=0.1), n_trials=20)
    study._storage.remove_session()
    space = import_space(str(path)).space
    tenths = tuple(n / 10 for n in range(1, 14))
    assert space["init_scale"] == Ordinal(values=tenths)
    found = outside_results(path, space, n_params=1000, n_tokens=1000)
    assert len(found) == 20
    assert set(found["init_scale"]) <= set(tenths)


def test_a_study_that_maximises_informs_no_searcher(tmp_path: Path) -> None:
    for direction in ("maximize", "minimize"):
        study = optuna.create_study(storage=f"sqlite:///{tmp_path / direction}.db", direction=direction)
        study.optimize(lambda trial: 1 + trial.suggest_float("learning_rate", 0.001, 0.1, log=True), n_trials=2)
    space = Space({"learning_rate": LogUniform(low=0.001, high=0.1)})
    assert len(outside_results(tmp_path / "minimize.db", space, n_params=1000, n_tokens=1000)) == 2
    with pytest.raises(StageError):
        outside_results(tmp_path / "maximize.db", space, n_params=1000, n_tokens=1000)


def test_results_keep_their_own_scale_and_diverged_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    pd.DataFrame({**GOOD, "loss": [float("nan")], "n_params": [5000]}).to_parquet(path)
    found = outside_results(path, SPACE, n_params=1000, n_tokens=2000)
    assert found[["n_params", "n_tokens"]].to_numpy().tolist() == [[5000, 2000]]
    assert found["loss"].isna().all()


def test_an_exported_sweep_is_a_study_of_optunas(swept: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sweep.db"
    with pytest.raises(StageError, match="no trials yet"):
        export_optuna(swept, file)
    plant(swept)
    annealed = pd.DataFrame({"trial": [0, 0], "n_tokens": [8192, 4096], "loss": [1.5, 2.25]})
    monkeypatch.setattr(type(swept), "annealed_runs", lambda _sweep, _record: annealed)
    assert "4 trials" in export_optuna(swept, file)
    study = optuna.load_study(study_name="micro", storage=storage(file))
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING]
    first, last = swept.plan.rung_tokens
    assert study.trials[0].intermediate_values == {first: 2.0, last: 1.8}
    assert (study.best_value, study.best_trial.number) == (1.8, 0)
    assert study.trials[0].params == {"learning_rate": 0.008, "init_scale": 1}, "an ordinal by its rank"
    assert study.trials[0].user_attrs["values"] == {"learning_rate": 0.008, "init_scale": 1.0}
    shown = [[trial.user_attrs.get(name) for name in ("annealed_loss", "annealed_tokens")] for trial in study.trials]
    assert shown == [[1.5, 8192], *[[None, None]] * 3]
    assert study.trials[0].distributions["learning_rate"] == optuna.distributions.FloatDistribution(
        0.004, 0.03, log=True
    )
    assert study.trials[2].intermediate_values == {}
    study._storage.remove_session()
    with pytest.raises(StageError, match=r"sweep\.db"):
        export_optuna(swept, file)


def test_a_cancelled_trial_is_exported_as_one_that_was_stopped(swept: Sweep, tmp_path: Path) -> None:
    plant(swept)
    for trial in (1, 3):
        cancel_trial(swept.ledger, swept.key, trial, "it is in the way")
    export_optuna(swept, tmp_path / "sweep.db")
    study = optuna.load_study(study_name="micro", storage=storage(tmp_path / "sweep.db"))
    assert [trial.state for trial in study.trials] == [
        *(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.PRUNED)
    ]
    assert [trial.value for trial in study.trials] == [1.8, 2.5, None, None]
    study._storage.remove_session()


def test_a_narrowed_sweep_is_exported_with_the_space_of_its_first_round(swept: Sweep, tmp_path: Path) -> None:
    """A value that a later round leaves out has no place in that round's space, and a rank would mean two values."""
    rates = LogUniform(low=1e-3, high=1e-1)
    rounds = [
        (("adamw", "lion", "muon"), (0.9, 0.95, 0.98), ("lion", 0.98)),
        (("adamw", "muon"), (0.95, 0.98), ("muon", 0.98)),
    ]
    record = swept.record()
    for optimizers, betas, (optimizer, beta2) in rounds:
        space = Space({"learning_rate": rates, "optimizer": Choice(values=optimizers), "beta2": Ordinal(values=betas)})
        record.begin_round("random", space)
        record.start({"learning_rate": 0.01, "optimizer": optimizer, "beta2": beta2}, 0)
    export_optuna(swept, tmp_path / "sweep.db")
    study = optuna.load_study(study_name="micro", storage=storage(tmp_path / "sweep.db"))
    assert [trial.params["optimizer"] for trial in study.trials] == ["lion", "muon"]
    assert [trial.params["beta2"] for trial in study.trials] == [2, 2]
    study._storage.remove_session()


@pytest.mark.skipif(find_spec("optuna_dashboard") is None, reason="needs optuna-dashboard, of muscale[dev]")
def test_optuna_dashboard_opens_an_exported_sweep(swept: Sweep, tmp_path: Path) -> None:
    file = tmp_path / "sweep.db"
    plant(swept)
    export_optuna(swept, file)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = "from optuna_dashboard._cli import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", command, storage(file), "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        (summary,) = ask(port, "studies", server)["study_summaries"]
        assert summary["study_name"] == "micro"
        study = ask(port, f"studies/{summary['study_id']}", server)
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert [trial["state"] for trial in study["trials"]] == ["Complete", "Pruned", "Fail", "Running"]
    assert study["best_trials"][0]["values"] == [1.8]


def ask(port: int, what: str, server: subprocess.Popen[bytes]) -> dict[str, list[dict[str, object]]]:
    """What its API answers, once it does."""
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, "it ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/{what}", timeout=20) as answer:
                return dict(json.loads(answer.read()))
        except (ConnectionError, urllib.error.URLError):
            assert time.monotonic() < deadline
            time.sleep(0.2)
