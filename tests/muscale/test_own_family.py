"""A study whose file names a model family: every stage trains its members, and readers import nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StageError, StudyConfig, StudyDirectoryError, StudyFileError
from muscale.cli import entry
from muscale.layout import MEMBERS
from muscale.new_study import FAMILY, write_study
from muscale.settings.own_model import announce, require_same_family
from muscale.store.ledger_tables import ResultKind
from muscale.study import Study
from proxy_models.architecture import counted
from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.member import ModuleConfig
from tests.proxy_models.families import TRANSFORMERS
from tests.quick import quick_and_soak

MakeStudy = Callable[..., Path]
ROOT = Path(__file__).parents[2]
PATHS = (str(ROOT / "platform"), str(ROOT))
NAME = "tests.proxy_models.families:Recurrent"
SMALL = (
    "model.context_length=16",
    "sweep.trials=2",
    "transfer.widths=[16, 32]",
    "transfer.horizons=[1.0, 2.0]",
    "fit.n_bootstrap=100",
    'sweep.space.learning_rate={distribution="log_uniform", low=0.03, high=0.1}',
)
ALONE = ("--set", "sweep.trials=1", "--set", "resources.workers=1")
READERS = (
    ["report", "STUDY"],
    ["runs", "STUDY"],
    ["watch", "STUDY"],
    ["calibration", "STUDY", "STUDY"],
    ["sync", "STUDY"],
    ["export-optuna", "STUDY", "optuna.sqlite"],
    ["gc", "STUDY", "--dry-run"],
)
READ = """
import sys
from pathlib import Path
from muscale.cli import entry
from muscale.search.prior_runs import runs_of
from muscale.study import Study
study = Path(sys.argv[1])
for command in {commands}:
    code = entry.run([word.replace("STUDY", str(study)) for word in command])
    assert code in (0, 1), (command, code)  # 1: outside the interval
assert len(runs_of(study.parent))
print("plan", Study.open(study, {small}, quiet=True).plan().key)
"""


@pytest.fixture
def own_study(make_study: MakeStudy) -> Path:
    """A micro-study of recurrent networks."""
    return with_family(make_study(), NAME)


def with_family(path: Path, name: str, **args: object) -> Path:
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
    named = f'[model]\nfamily = "{name}"\n' + (f"args = {{ {table} }}\n" if args else "")
    path.write_text(path.read_text().replace("[model]\n", named))
    return path


def test_an_open_layout_needs_a_family_whose_steps_are_predicted_and_only_what_trains_knows(
    own_study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StudyConfig.read(own_study, trains=True)
    with pytest.raises(StudyFileError, match="promote.sharding: "):
        StudyConfig.read(own_study, ("promote.sharding=auto",), trains=True)
    Study.open(own_study, quiet=True, trains=True)  # which writes the record of members
    monkeypatch.delitem(sys.modules, NAME.partition(":")[0])
    assert StudyConfig.read(own_study, ("promote.sharding=auto",)).promote.sharding == "auto"


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster", "transformers")
@pytest.mark.parametrize(("name", "low", "high"), [("Qwen3Config", 0.03, 0.1), ("GPT2Config", 0.005, 0.02)])
def test_every_stage_trains_a_config_of_transformers(make_study: MakeStudy, name: str, low: float, high: float) -> None:
    study = with_family(make_study(), f"transformers:{name}", **TRANSFORMERS[name])
    rates = f'sweep.space.learning_rate={{distribution="log_uniform", low={low}, high={high}}}'
    assert entry.run(["run", str(study), "--force", *settings(rates)]) in (0, 1)
    runs = Study.open(study, (*SMALL, rates), quiet=True).runs()
    assert set(runs["purpose"]) == {"sweep", "transfer", "ladder", "full"}


@pytest.mark.usefixtures("transformers")
def test_a_study_of_a_config_of_transformers_is_read_without_it(
    make_study: MakeStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_family(make_study(), "transformers:Qwen3Config", **TRANSFORMERS["Qwen3Config"])
    trained = Study.open(path, quiet=True, trains=True).config.model
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert Study.open(path, quiet=True).config.model == trained
    path.write_text(path.read_text().replace("head_dim", "head_size"))
    with pytest.raises(StudyFileError, match=r"model.args.head_size:.*head_dim"):
        monkeypatch.undo()
        StudyConfig.read(path, trains=True)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("name", "args", "key"),
    [
        ("GPTNeoXConfig", {"hidden_size": 32, "num_attention_heads": 5}, "num_attention_heads"),
        (
            "Qwen3Config",
            {**TRANSFORMERS["Qwen3Config"], "num_attention_heads": 8, "num_key_value_heads": 3},
            "num_key_value_heads",
        ),
        (
            "MistralConfig",
            {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 0},
            "num_key_value_heads",
        ),
        ("LlamaConfig", {"hidden_size": 32, "num_attention_heads": 4, "hidden_act": "nonsense"}, "hidden_act"),
    ],
)
def test_sizes_that_a_config_of_transformers_refuses_are_a_fault_of_the_file(
    make_study: MakeStudy, name: str, args: dict[str, object], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_family(make_study(), f"transformers:{name}", **args)
    assert entry.run(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path.name}: model" in said
    assert key in said


@pytest.mark.usefixtures("transformers")
def test_a_multiplier_that_no_model_of_transformers_has_is_a_fault_of_the_file(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_family(make_study(), "transformers:Qwen3Config", **TRANSFORMERS["Qwen3Config"])
    searched = 'sweep.space.attention_multiplier={distribution="log_uniform", low=0.5, high=2.0}'
    assert entry.run(["check", str(path), "--set", searched]) == 2
    assert f"{path.name}: sweep.space.attention_multiplier: " in capsys.readouterr().err
    StudyConfig.read(path, [searched.replace("attention", "embedding")], trains=True)


def settings(*more: str) -> list[str]:
    return [word for setting in (*SMALL, *more) for word in ("--set", setting)]


def run_as_reader(study: Path, folder: Path, *, promotes: bool) -> subprocess.CompletedProcess[str]:
    """Every command that only reads, in a process where importing the family would leave a file and fail."""
    trap = folder / "trap" / "tests"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text(f"open({str(folder / 'imported')!r}, 'w')\nraise SystemExit('imported')\n")
    commands = [[*command, *settings()] for command in READERS if promotes or command[0] != "watch"]
    return subprocess.run(
        [sys.executable, "-c", READ.format(commands=commands, small=list(SMALL)), str(study)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(trap.parent), *PATHS))},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("promotes", quick_and_soak((False, True), False))
def test_every_stage_trains_the_family_and_readers_import_nothing(
    own_study: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], promotes: bool
) -> None:
    command = [*(("run", "--force") if promotes else ("plan",)), str(own_study), *settings()]
    assert entry.run(command) in (0, 1)
    shown = capfd.readouterr()
    assert f"importing the model family {NAME} from" in shown.err
    assert not promotes or "measured" in shown.out
    study = Study.open(own_study, SMALL, quiet=True)
    runs = study.runs()
    assert set(runs["purpose"]) == {"sweep", "transfer", "ladder"} | ({"full"} if promotes else set())
    before = len(runs)
    assert entry.run(command) in (0, 1)
    assert len(Study.open(own_study, SMALL, quiet=True).runs()) == before, "trained again"

    read = run_as_reader(own_study, tmp_path, promotes=promotes)
    assert read.returncode == 0, read.stdout + read.stderr
    assert not (tmp_path / "imported").exists()
    (plan,) = (path.name for path in (own_study.parent / "full_runs").iterdir()) if promotes else (study.plan().key,)
    assert f"plan {plan}" in read.stdout


@pytest.fixture
def written_study(make_study: MakeStudy, tmp_path: Path) -> Path:
    """A micro-study of the family that `muscale init --family` writes, which lies next to it."""
    path = make_study()
    write_study(tmp_path / "new", family=True)
    shutil.copy(tmp_path / "new" / FAMILY[0], path.parent)
    path.write_text(path.read_text().replace("[model]\n", '[model]\nfamily = "my_family:Convolutions"\n'))
    return path


@pytest.mark.soak
@pytest.mark.cluster
def test_a_module_on_pythonpath_reaches_ray_s_workers(written_study: Path) -> None:
    folder = written_study.parent
    done = subprocess.run(
        [*(sys.executable, "-m", "muscale", "sweep", "study.toml", *ALONE, "--json")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *PATHS))},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"importing the model family my_family:Convolutions from {folder / FAMILY[0]}" in done.stderr
    assert json.loads(done.stdout)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_lack_the_module_are_named_with_the_remedy(
    written_study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(written_study.parent))
    monkeypatch.setitem(sys.modules, "my_family", None)
    monkeypatch.delitem(sys.modules, "my_family")
    with pytest.raises(StageError, match="my_family can't be imported .*PYTHONPATH"):
        Study.open(written_study, ALONE[1::2], quiet=True, trains=True).sweep()


def test_an_error_inside_the_model_is_not_an_internal_one(
    written_study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written_study.parent / FAMILY[0]
    file.write_text(file.read_text().replace("self.down(F.silu(gate) * value)", "self.down(gate[..., :1])"))
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.setitem(sys.modules, "my_family", None)
    monkeypatch.delitem(sys.modules, "my_family")
    assert entry.run(["check", str(written_study)]) == 2
    assert f"{file}:24, in forward: RuntimeError" in capsys.readouterr().err


def test_a_parameter_that_a_full_run_can_t_shard_fails_the_check(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    study = with_family(make_study(), "tests.muscale.full_runs.train.test_one_rank:WithScalar")
    assert entry.run(["check", str(study)]) == 2
    assert "layers.0.scale" in capsys.readouterr().err


def test_the_family_that_init_writes_passes_its_test_and_is_a_valid_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_study(tmp_path / "new", family=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FAMILY[1]],
        cwd=tmp_path / "new",
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path / "new"), *PATHS))},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    monkeypatch.delitem(sys.modules, "my_family", raising=False)
    config = StudyConfig.read(Path(written.path), trains=True)
    largest = max(
        config.family.at(width=stem.width).train_flops_per_token * stem.n_tokens for stem in config.ladder.stems
    )
    budget = config.plan.budget.compute_flops
    assert budget is not None
    assert budget / largest == pytest.approx(2.5, abs=0.05), "as its comment says"
    monkeypatch.delitem(sys.modules, "my_family")
    for _ in range(2):
        with pytest.raises(StudyDirectoryError, match="exists"):
            write_study(tmp_path / "new", family=True)
        Path(written.path).unlink(missing_ok=True)


def test_a_model_of_a_family_that_the_study_file_does_not_name_is_not_trained(own_study: Path) -> None:
    named = Study.open(own_study, quiet=True, trains=True).config.model
    decoder = ModelConfig(d_model=32, n_layers=1, context_length=32)
    require_same_family(named, named)
    for model, base in ((named, decoder), (decoder, named)):
        with pytest.raises(StageError, match="family"):
            require_same_family(model, base)


def test_a_study_is_not_read_before_its_members_are_counted(own_study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "_counted", {})
    with pytest.raises(StudyFileError, match=rf"model.family:.*\(.*{MEMBERS}"):
        Study.open(own_study, quiet=True)
    first = Study.open(own_study, quiet=True, trains=True).config.model
    assert isinstance(first, ModuleConfig)
    monkeypatch.setattr(counted, "_counted", {})
    again = Study.open(own_study, quiet=True)
    assert again.config.model == first
    with pytest.raises(StudyFileError, match="ladder.stems: width 96, depth 3"):
        monkeypatch.setitem(sys.modules, NAME.partition(":")[0], None)
        StudyConfig.read(own_study, {"ladder.stems": [{"width": 96, "depth": 3, "n_tokens": 16384}]})


def test_another_source_wants_another_directory(own_study: Path) -> None:
    study = Study.open(own_study, quiet=True, trains=True)
    study.ledger.record_result(ResultKind.OWN_METHODS, "key", {})
    file = own_study.parent / MEMBERS
    record = json.loads(file.read_text())
    record["members"] = [member | {"source": "0" * 64} for member in record["members"]]
    file.write_text(json.dumps(record))
    with pytest.raises(StudyDirectoryError, match="model.source"):
        Study.open(own_study, quiet=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (NAME, "nowhere.at_all:RNN", r"model.family: nowhere.at_all can't be imported .*PYTHONPATH"),
        (NAME, "rnn", r"model.family: must be \"package.module:Class\" or an entry point .* got 'rnn'"),
        (NAME, "json:JSONDecoder", "model.family: must be a subclass of proxy_models.Family"),
        ("d_model = 32", "d_model = 36", "model: .*multiple of 8, got 36"),
        ("d_model = 32", "d_model = 32\nargs = { state = 1 }", "model.args.state: unknown key"),
        ("d_model = 32", "d_model = 32\nargs = { vocab_size = 1 }", "model.args.vocab_size: "),
        ("d_model = 32", "d_model = 32\nhead_dim = 16", "model.head_dim: unknown key"),
        ("[promote]", "[promote]\ntensor_parallel = 2", "promote.tensor_parallel must be 1"),
        ("[promote]", "[variants.v.model]\nargs = 3\n\n[promote]", "variants.v.model.args: "),
    ],
)
def test_each_fault_is_named(own_study: Path, old: str, new: str, message: str) -> None:
    own_study.write_text(own_study.read_text().replace(old, new))
    with pytest.raises(StudyFileError, match=message):
        StudyConfig.read(own_study, trains=True)
    assert not (own_study.parent / MEMBERS).exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model": {}, "members": []}', '{"model": {}, "members": [{}]}', "[" * 9999]
)
def test_a_damaged_record_is_one_sentence(own_study: Path, text: str) -> None:
    (own_study.parent / MEMBERS).write_text(text)
    with pytest.raises(StudyFileError, match=rf"{MEMBERS}: not a record of members: "):
        StudyConfig.read(own_study)


def test_a_family_in_nested_folders_without_init_files_is_announced_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "models.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    announce("outer.inner.models:Recurrent")
    assert capfd.readouterr().err.endswith(f"from {tmp_path / 'outer/inner/models.py'}\n")
    assert "outer" not in sys.modules


def test_an_entry_point_is_a_name(own_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site" / "recurrent-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: recurrent\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[muscale.families]\nrnn = {NAME}\n")
    monkeypatch.syspath_prepend(str(installed.parent))
    by_class = StudyConfig.read(own_study, trains=True).model
    own_study.write_text(own_study.read_text().replace(NAME, "rnn"))
    assert StudyConfig.read(own_study, trains=True).model == by_class
