"""The hooks before a commit are the checks of `make check`, and CI runs `.ci/run`."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def read_yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_hooks_are_the_checks_without_the_tests() -> None:
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    checks = recipe.replace("$(BIN)", ".venv/bin").split("\n")
    (local,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert {(hook["language"], hook["pass_filenames"]) for hook in local["hooks"]} == {("system", False)}
    assert [hook["entry"] for hook in local["hooks"]] == [
        line.strip() for line in checks if line and "pytest" not in line
    ]


def test_ci_runs_every_check_on_the_oldest_python_and_reads_no_secret() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    assert job["steps"][-1]["run"].endswith(".ci/run")
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    versions = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert versions == [oldest]
