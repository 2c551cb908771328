"""Each notebook as a user runs it, from top to bottom in a kernel of its own, on a micro-study in the quickstart's place."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.muscale.conftest import MICRO, write_text

pytestmark = pytest.mark.cluster

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FIGURE = "application/vnd.plotly.v1+json"
WITHOUT_FIGURES = ("06_cluster",)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's `notebooks` beside its `runs`; what one notebook trained, the next one knows."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(FOLDER, root / "notebooks")
    write_text(root / "runs/quickstart/text")
    (root / "runs/quickstart/study.toml").write_text(MICRO)
    return root / "notebooks"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_found(path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As an activated environment has it: what a cell calls by name is what is tested.
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (FOLDER.parent, FOLDER.parent / "platform"))))
    notebook = nbformat.read(place / path.name, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(place)}}).execute()
    shown = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] in ("execute_result", "display_data")
    ]
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert any("text/html" in output.get("data", {}) for output in last.outputs), "its last result is shown as markup"
    assert path.stem in WITHOUT_FIGURES or any(FIGURE in data for data in shown)
    for figure in (data[FIGURE] for data in shown if FIGURE in data):
        assert figure["data"], "a figure has something in it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
