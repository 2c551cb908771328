"""[use_case] names known targets and devices, and leaves the recorded form of other studies as it was."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StudyConfig, StudyFileError
from muscale.settings.use_case import UseCaseSettings
from scaling import MemoryLimit

MakeStudy = Callable[..., Path]
LOSS = "use_case.targets.loss=2.5"


def test_a_study_without_the_table_keeps_its_recorded_form(make_study: MakeStudy) -> None:
    path = make_study()
    assert "use_case" not in StudyConfig.read(path).to_dict()
    table = StudyConfig.read(path, [LOSS]).to_dict()["use_case"]
    assert table["targets"] == {"loss": 2.5}
    assert table.keys() == UseCaseSettings.model_fields.keys()


def test_the_memory_is_that_of_the_stored_bits() -> None:
    settings = UseCaseSettings(targets={"loss": 2.5}, serving_device="H200", serving_devices=2, serving_bits=4)
    assert settings.memory == MemoryLimit.serving("H200", n_devices=2, bytes_per_param=0.5)
    assert UseCaseSettings(targets={"loss": 2.5}).memory is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["use_case.max_params=8e9"], "use_case.targets"),
        (["use_case.targets={}"], "use_case.targets"),
        (["use_case.targets.mmlu=0.5"], "use_case.targets.*mmlu"),
        (["use_case.targets.loss=0"], "use_case.targets.loss.*0"),
        ([LOSS, 'use_case.serving_device="H100"'], "use_case.serving_device.*H100"),
        ([LOSS, "use_case.serving_bits=5"], "use_case.serving_bits.*16.*5"),
        ([LOSS, "use_case.probability=1.0"], "use_case.probability.*1.0"),
        ([LOSS, "use_case.latency_ms_per_token=20"], "use_case.*serving_device"),
        ([LOSS, "use_case.deadline_days=30"], "use_case.deadline_days.*plan.accelerator"),
        ([LOSS, "use_case.deadline_day=30"], "use_case.deadline_day.*deadline_days"),
    ],
)
def test_bad_settings_are_named(make_study: MakeStudy, overrides: list[str], named: str) -> None:
    with pytest.raises(StudyFileError, match=named):
        StudyConfig.read(make_study(), overrides)


def test_a_deadline_needs_the_devices_that_train(make_study: MakeStudy) -> None:
    devices = ['plan.accelerator="H100 SXM"', "plan.n_devices=8"]
    assert StudyConfig.read(make_study(), [LOSS, "use_case.deadline_days=30", *devices]).use_case is not None


def test_the_page_on_planning_names_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    table = page.partition("## [use_case]")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \|", table, re.M)
    assert {key for row in rows for key in row.split(", ")} - {"key"} == set(UseCaseSettings.model_fields)
