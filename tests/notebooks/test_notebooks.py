"""Each notebook as a user runs it, from top to bottom, on a micro-study in the quickstart's place."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

from tests.muscale.conftest import SEVEN_RATES

pytestmark = pytest.mark.cluster

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIGURE = "application/vnd.plotly.v1+json"
ITS_OWN_RAY = ("06_cluster",)
"""Starts a cluster, and draws nothing."""
OWN_SPACE = ("07_from_tune",)
"""Searches a space of its own, so it trains every stage anew."""
LONG = (
    *ITS_OWN_RAY,
    *OWN_SPACE,
    *("02_transfer", "04_decide_and_promote", "09_clean_a_corpus", "10_scores", "11_experts", "12_amend"),
)
"""Train for half a minute or longer; `make soak` runs them."""


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory: pytest.TempPathFactory, planned_study: Path) -> Path:
    """The place where each notebook reuses what is trained."""
    return checkout(tmp_path_factory.mktemp("checkout"), planned_study)


@pytest.fixture
def place(path: Path, request: pytest.FixtureRequest, make_study: Callable[[], Path], tmp_path: Path) -> Path:
    """The place of a notebook: its own, where it has another ledger or another space than the others."""
    if path.stem in ITS_OWN_RAY + OWN_SPACE:
        (study := make_study()).write_text(SEVEN_RATES)
        return checkout(tmp_path / "checkout", study)
    return Path(request.getfixturevalue("shared_place"))


def checkout(root: Path, study: Path) -> Path:
    """The `notebooks` of a checkout, next to a copy of a study."""
    shutil.copytree(FOLDER, root / "notebooks")
    shutil.copytree(study.parent, root / "runs/quickstart")
    return root / "notebooks"


def run(notebook: NotebookNode, _place: Path) -> list[list[dict[str, Any]]]:
    """What each code cell shows, by media type. It runs beside the tests, on the Ray that they share, and imports nothing anew."""
    shell: Any = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    shown = []
    try:
        for cell in code_cells(notebook):
            with capture_output() as captured:
                result = shell.run_cell(cell.source)
            result.raise_error()
            last = [] if result.result is None else [shell.display_formatter.format(result.result)[0]]
            shown.append([*(output.data for output in captured.outputs), *last])
    finally:
        InteractiveShell.clear_instance()
    return shown


def run_in_kernel(notebook: NotebookNode, place: Path) -> list[list[dict[str, Any]]]:
    """What each code cell shows, by media type; in a process of its own, whose environment the notebook may change."""
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(place)}}).execute()
    return [[output.get("data", {}) for output in cell.outputs] for cell in code_cells(notebook)]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.soak if path.stem in LONG else ()) for path in NOTEBOOKS],
)
@pytest.mark.usefixtures("ray_cluster")
def test_a_notebook_runs_and_shows_what_it_found(path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As an activated environment has it: what a cell calls by name is what is tested.
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (FOLDER.parent, FOLDER.parent / "platform"))))
    monkeypatch.chdir(place)
    shown = (run_in_kernel if path.stem in ITS_OWN_RAY else run)(nbformat.read(place / path.name, as_version=4), place)
    assert any("text/html" in data for data in shown[-1]), "its last result is shown as markup"
    figures = [data[FIGURE] for cell in shown for data in cell if FIGURE in data]
    assert path.stem in ITS_OWN_RAY or figures
    for figure in figures:
        assert figure["data"], "a figure has something in it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = code_cells(nbformat.read(path, as_version=4))
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
