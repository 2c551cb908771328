"""Nothing that a user gives is unpickled or run: whatever could do so in our sources stands here, with the reason why it may."""

from __future__ import annotations

import ast
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from muscale.full_runs.checkpoints.stored_weights import PlainPlanner, RecordReader, alone

ROOT = Path(__file__).parents[2]
SOURCES = ("platform/muscale", "scaling", "search_spaces", "proxy_models")
MODULES = frozenset(
    ("pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "tarfile", "zipfile", "runpy", "dbm", "imp")
)
"""That unpickle, unpack or run what is in a file."""
CALLS = frozenset(
    (
        "unpack_archive",
        "read_pickle",
        "unsafe_load",
        "full_load",
        "load_from_checkpoint",
        "extractall",
    )
)
ALLOWED = {
    (
        "platform/muscale/full_runs/checkpoints/stored_weights.py",
        "pickle",
    ): "an Unpickler that finds the classes of torch's record and nothing else",
    (
        "platform/muscale/full_runs/checkpoints/stored_weights.py",
        "FileSystemReader",
    ): "its subclass reads the record with that Unpickler",
    ("platform/muscale/fingerprint.py", "zipfile"): "writes a wheel, opens none",
    (
        "platform/muscale/actors/tune_adapter.py",
        "pickle",
    ): "reads the error that Tune wrote a moment ago, in a temporary folder that the same process made",
    ("platform/muscale/importers/wandb_sweep.py", "yaml.load"): "with a subclass of SafeLoader",
    ("proxy_models/evaluation/task_files.py", "yaml.load"): "with a subclass of SafeLoader",
    ("proxy_models/training/state.py", "zipfile"): "compares the checksums of a state's records, extracts none",
}


def suspects(tree: ast.AST) -> Iterator[str]:
    """Names of what could unpickle, unpack or run what a file says."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name.split(".")[-1] for name in names if MODULES & set(name.name.split(".")))
            case ast.ImportFrom(module=module, names=names):
                parts = {*(module or "").split("."), *(name.name for name in names)}
                yield from sorted(parts & (MODULES | {"FileSystemReader"}))
            case ast.Call(func=ast.Name(id=name)) if name in ("eval", "exec", "compile", "__import__"):
                yield name
            case ast.Call(func=ast.Attribute(attr=name)) if name in CALLS:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen")):
                yield "os.system"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                if not is_constant(keywords, "weights_only", True):
                    yield "torch.load"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load"), keywords=keywords):
                if any(keyword.arg == "allow_pickle" for keyword in keywords) and not is_constant(
                    keywords, "allow_pickle", False
                ):
                    yield "np.load"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr=name)) if name not in (
                "safe_load",
                "safe_dump",
            ):
                yield f"yaml.{name}"
            case ast.Call(func=ast.Name(id="load_sharded"), keywords=keywords):
                if not any(keyword.arg == "storage_reader" for keyword in keywords):
                    yield "load_sharded"  # with torch's own reader, which unpickles the record in full
            case ast.Call(keywords=keywords) if is_constant(keywords, "shell", True):
                yield "shell"


def is_constant(keywords: list[ast.keyword], name: str, value: bool) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in keywords)


def test_what_could_unpickle_or_run_a_file_is_allowed_by_name_and_reason() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for name in suspects(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from ray import cloudpickle",
        "import tarfile as t",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "shutil.unpack_archive(path)",
        "pd.read_pickle(path)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "load_sharded(state, checkpoint_id=path)",
        "from torch.distributed.checkpoint import FileSystemReader",
    ],
)
def test_the_search_finds_each_of_them(source: str) -> None:
    assert list(suspects(ast.parse(source)))


class Planted:
    """What a pickle does when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.proof,)


def test_a_load_without_pickle_is_no_suspect() -> None:
    assert not list(suspects(ast.parse("np.load(path, allow_pickle=False)")))


def test_a_checkpoint_s_settings_are_values_and_run_no_program(tmp_path: Path) -> None:
    proof, state = (
        tmp_path / "proof",
        {"a": torch.ones(3), "settings": {"rate": 0.5, "betas": (0.9, 0.95), "name": "x"}},
    )
    with alone():
        save(state, checkpoint_id=tmp_path / "good")
        read = {"a": torch.zeros(3), "settings": {"rate": 0.0, "betas": (0.0, 0.0), "name": ""}}
        load(read, storage_reader=RecordReader(tmp_path / "good"), planner=PlainPlanner())
        assert read["settings"] == state["settings"]
        assert torch.equal(read["a"], state["a"])  # type: ignore[arg-type]
        save({"settings": Planted(proof)}, checkpoint_id=tmp_path / "bad")
        proof.unlink(missing_ok=True)
        with pytest.raises(CheckpointException, match="Weights only load failed"):
            load({"settings": 0.0}, storage_reader=RecordReader(tmp_path / "bad"), planner=PlainPlanner())
        assert not proof.exists()
        load({"settings": 0.0}, checkpoint_id=tmp_path / "bad")
        assert proof.exists(), "torch's own reading runs it"
    proof.unlink()
    pickle.load(io.BytesIO(pickle.dumps(Planted(proof))))
    assert proof.exists()
