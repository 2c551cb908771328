"""[plan] takes one budget in one unit, and a device with what is known better of it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from muscale import StudyConfig, StudyFileError
from muscale.plans.costs import estimate
from muscale.settings.plan import PlanSettings
from scaling import Budget, accelerator

MakeStudy = Callable[..., Path]
H100 = 'plan.accelerator="H100 SXM"'


def with_plan(path: Path, table: str) -> Path:
    path.write_text(re.sub(r"\[plan\]\n[^\[]*", f"[plan]\n{table}\n\n", path.read_text()))
    return path


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("compute_flops = 1e15", Budget(compute_flops=1e15)),
        ("gpu_hours = 2.0", Budget.of_gpu_hours(2, "H100 SXM", 8)),
        ("dollars = 10.0", Budget.of_dollars(10, "H100 SXM", 8)),
        ("days = 0.5", Budget.of_days(0.5, "H100 SXM", 8)),
    ],
)
def test_a_budget_in_any_unit_is_that_of_scaling(make_study: MakeStudy, table: str, expected: Budget) -> None:
    path = with_plan(make_study(), f'{table}\naccelerator = "H100 SXM"\nn_devices = 8')
    config = StudyConfig.read(path)
    assert config.plan.budget.compute_flops == expected.compute_flops
    assert config.plan.budget.terms == expected.terms
    assert config.plan.budget.days == pytest.approx(expected.compute_flops / (8 * 86400 * 989.5e12 * 0.4))
    assert estimate(config).set_index("stage").loc["promote", "compute_flops"] == expected.compute_flops


def test_a_device_is_the_file_s_where_it_names_one() -> None:
    plain = PlanSettings(gpu_hours=1.0, accelerator="H100 SXM")
    assert plain.device == accelerator("H100 SXM")
    edited = PlanSettings(gpu_hours=1.0, accelerator="H100 SXM", mfu=0.5, peak_flops=1e15, dollars_per_hour=1.75)
    assert edited.budget.compute_flops == 3600 * 0.5e15
    assert edited.budget.dollars == pytest.approx(1.75)
    assert PlanSettings(compute_flops=1e15).device is None


def test_another_budget_takes_the_place_of_whichever_was_given() -> None:
    settings = PlanSettings(dollars=10.0, accelerator="H100 SXM", served_tokens=5.0)
    assert settings.at(1e15) == PlanSettings(compute_flops=1e15, accelerator="H100 SXM", served_tokens=5.0)
    with pytest.raises(ValueError, match="compute_flops.*nan"):
        settings.at(float("nan"))
    with pytest.raises(ValueError, match="1e\\+32.*1e\\+99"):
        settings.at(1e99)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("level = 0.9", "plan: .*exactly one of"),
        ("dollars = 5.0", "plan: .*plan.accelerator"),
        ('days = 2.0\naccelerator = "H200"', "plan: .*plan.n_devices"),
        ("compute_flops = 1e99", r"plan: .*1e\+32.*1e\+99"),
        ('dollars = 1e30\naccelerator = "H200"', r"plan: .*1e\+32.*\$1e\+30 for H200"),
        ('dollars = 1e-9\naccelerator = "H200"', "plan.dollars: .*1e-09 for H200"),
    ],
)
def test_a_budget_needs_what_its_unit_is_of(make_study: MakeStudy, table: str, words: str) -> None:
    with pytest.raises(StudyFileError, match=words):
        StudyConfig.read(with_plan(make_study(), table))


def test_the_page_on_planning_names_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    table = page.partition("## [plan]")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \|", table, re.M)
    assert {key for row in rows for key in row.split(", ")} - {"key"} == set(PlanSettings.model_fields)
