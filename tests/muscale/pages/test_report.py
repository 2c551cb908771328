"""The report: self-contained, escaped, and naming the command for what is missing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from muscale import Study, StudyConfig
from muscale.findings import findings
from muscale.full_runs.checkpoints.evaluation import CheckpointEvaluation
from muscale.layout import FULL_RUNS, METRICS
from muscale.pages.contents import ReportContents, gather
from muscale.pages.report import write_report
from muscale.pages.sections import Section, with_code
from muscale.plans.next_stems import choose
from muscale.plans.plan import register
from muscale.plans.planning import Planner
from muscale.plans.use_case_card import card_of
from proxy_models.data.corpus_writing import write_corpus
from proxy_models.data.sources import Source
from proxy_models.evaluation.measure import Sample
from tests.muscale.planted import large_and_small, planted_fit, planted_horizon

MakeStudy = Callable[..., Path]

COLUMNS = ["purpose", "label", "n_params", "n_tokens", "learning_rate", "loss", "seconds"]


def page(tmp_path: Path, **known: object) -> str:
    values = {
        "name": "s",
        "created_at": "2026-01-02T03:04:05+00:00",
        "runs": pd.DataFrame(columns=COLUMNS),
        **known,
    }
    return write_report(ReportContents(**values), tmp_path / "report.html").read_text()


def test_an_empty_report_names_the_command_for_each_section(tmp_path: Path) -> None:
    text = page(tmp_path)
    for command in ("check", "sweep", "transfer", "fit", "promote", "plan"):
        assert f"<code>muscale {command}</code>" in text


def test_a_page_does_not_name_a_check_that_the_study_does_not_have(tmp_path: Path) -> None:
    """A study of a training program, or from given weights, refuses `muscale check`."""
    assert "Coordinate check" in page(tmp_path)
    assert "Coordinate check" not in page(tmp_path, has_check=False)


def test_the_page_loads_nothing_from_elsewhere_and_contains_plotly_once(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert not re.findall(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)\s*=""", text)
    assert text.count("plotly.js v") == 1


def test_a_line_of_the_full_run_s_metrics_that_is_half_written_is_no_fault(make_study: MakeStudy) -> None:
    study = Study.open(make_study(), quiet=True)
    made = Planner(study.config, study.config.hyperparameters, planted_horizon(), planted_fit()).plan()
    folder = study.directory / FULL_RUNS / register(made, study.ledger).key
    folder.mkdir(parents=True)
    (folder / METRICS).write_text('{"tokens": 256, "train_loss": 3.0}\n{"tokens": 512, "train_')
    curve = gather(study.contents, findings(study.contents)).curve
    assert curve is not None
    assert curve[["tokens", "train_loss"]].to_numpy().tolist() == [[256, 3.0]]
    study.report()


def test_a_name_that_a_user_chose_is_escaped(tmp_path: Path) -> None:
    runs = pd.DataFrame([["sweep", "<script>alert(2)</script>", 1, 1, 0.1, 1.0, 1.0]], columns=COLUMNS)
    text = page(tmp_path, name="<script>alert(1)</script>", runs=runs)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;script&gt;alert(2)" in text


def promoted(loss: float, *, inside: bool, **source_losses: float) -> dict[str, object]:
    return {
        "forecast": 1.0,
        "low": 0.9,
        "high": 1.1,
        "level": 0.9,
        "loss": loss,
        "source_losses": source_losses,
        "inside": inside,
        "relative_error": 0.05,
        "registered_at": "2026-01-02T03:04:05.6+00:00",
        "started_at": "2026-01-02T03:04:06+00:00",
        "finished_at": "2026-01-02T04:04:06+00:00",
        "world_size": 2,
        "forced": False,
        "verdict": "pass",
    }


@pytest.mark.parametrize(("loss", "word"), [(1.05, "inside"), (1.3, "outside")])
def test_the_summary_compares_the_measured_loss_with_the_forecast(tmp_path: Path, loss: float, word: str) -> None:
    text = page(tmp_path, promotion=promoted(loss, inside=word == "inside"))
    assert f"forecast 1.0000, measured {loss:.4f}: {word}, error +5.00 %" in text
    assert "Registered 2026-01-02 03:04:05 UTC" in text


def test_what_the_newest_checkpoint_wrote_stands_with_its_loss_escaped(tmp_path: Path) -> None:
    sample = Sample(prompt="<b>", text="</pre>", temperature=1.0, seed=0)
    found = CheckpointEvaluation(
        checkpoint="tokens=512", tokens=512, val_loss=2.5, source_losses={"web": 2.25}, samples=(sample,), seconds=1.0
    )
    text = page(tmp_path, evaluated=found)
    assert "<p>tokens=512: held-out loss 2.5000 nats per token</p><p>web 2.2500</p>" in text
    assert "&#39;&lt;b&gt;&#39; → &#39;&lt;/pre&gt;&#39;" in text


def test_a_result_is_shown_as_names_with_values_as_sentences_and_as_items() -> None:
    result = "all is well\n  D      2 to 3\nstatus   ok\n'a  b' → 'c  d'\nassumed\n- 6  N  D\n- `tied`"
    section = Section(title="s", command="fit", about="", result=result)
    assert section.lines == [
        ("sentences", [["all is well"]]),
        ("pairs", [["D", "2 to 3"], ["status", "ok"]]),
        ("sentences", [["'a  b' → 'c  d'"], ["assumed"]]),
        ("items", [["6  N  D"], ["`tied`"]]),
    ]
    assert "<li>6  N  D</li><li><code>tied</code></li>" in section.markup


def planted_plan(study: Path) -> dict[str, Any]:
    config = StudyConfig.read(study)
    return Planner(config, config.hyperparameters, planted_horizon(), planted_fit()).plan().to_dict()


def test_a_command_in_a_sentence_is_code_and_the_rest_is_escaped() -> None:
    assert with_code("`a <b>` has <i>") == "<code>a &lt;b&gt;</code> has &lt;i&gt;"


def test_the_plan_shows_values_of_every_kind(tmp_path: Path, make_study: MakeStudy) -> None:
    stages = [{"after": 0.4, "learning_rate": 0.5}, {"after": 0.8, "beta2": 0.98}]
    values = {"learning_rate": 0.0123456, "optimizer": "lion", "zero_readout": True, "stages": stages}
    plan = planted_plan(make_study()) | {"rules": dict.fromkeys(values, "as given"), "hyperparameters": values}
    text = page(tmp_path, plan=plan)
    shown_stages = "after 40%: learning_rate × 0.5; after 80%: beta2 = 0.98"
    for name, shown in zip(values, ("0.01235", "lion", "True", shown_stages), strict=True):
        assert f'<td>{name}</td><td>{shown}</td><td class="why">as given</td>' in text


def test_the_use_case_stands_with_its_sizes_and_its_cheapest_run(tmp_path: Path, make_study: MakeStudy) -> None:
    config, law = (
        StudyConfig.read(make_study(), {"use_case.targets.loss": 2.4, "use_case.max_params": 90_000.0}),
        planted_fit(),
    )
    card = card_of(config, law, Planner(config, config.hyperparameters, planted_horizon(), law).plan())
    assert card is not None
    assert card.cheapest is not None
    section = page(tmp_path, use_case=card).partition('<section id="the-use-case">')[2].partition("</section>")[0]
    assert section.count("<tr") == len(card.shown) + 1
    assert f"N = {card.cheapest['n_params']:,}" in section
    assert "max_params" in section
    assert '<section id="the-use-case">' not in page(tmp_path)


def test_a_mixture_s_sources_stand_with_their_epochs_their_warnings_and_their_losses(
    tmp_path: Path, make_study: MakeStudy
) -> None:
    corpus = large_and_small(tmp_path)
    epochs = corpus.epochs(100_000)
    assert epochs["large"] < 1 < 4 < epochs["small"]
    assert "epochs in the full run" not in page(tmp_path, corpus=corpus)
    plan = planted_plan(make_study()) | {"n_tokens": 100_000}
    text = page(tmp_path, corpus=corpus, plan=plan, promotion=promoted(1.0, inside=True, large=0.8125, small=1.25))
    for name, value in (("large", epochs["large"]), ("small", epochs["small"]), ("large", 0.8125), ("small", 1.25)):
        assert re.search(rf"<td>{name}</td>\s*(<td>.*</td>\s*)*<td>{re.escape(f'{value:.4g}')}</td>", text)
    assert f"warning: small: {epochs['small']:.1f} epochs" in text
    assert "warning: large" not in text


def test_the_law_s_figures_each_stand_alone_with_the_next_runs(tmp_path: Path, make_study: MakeStudy) -> None:
    config = StudyConfig.read(make_study(), ["plan.compute_flops=2e11"])
    law, source = planted_fit(noise=3e-3), Source(path=str(tmp_path / "study" / "text"))
    corpus = write_corpus(tmp_path / "corpus", source)
    plan = Planner(config, config.hyperparameters, planted_horizon(), law, corpus=corpus).plan()
    further = choose(config, law, plan, corpus, width=1e-4)
    without = page(tmp_path, fit=law)
    text = page(tmp_path, fit=law, plan=plan.to_dict(), corpus=corpus, next_runs=further)
    of_law = ("loss against compute", "loss over size and tokens", "best size and tokens against compute")
    for label in (*of_law, "uncertainty of the law&#39;s parameters"):
        assert without.count(f'aria-label="{label}"') == text.count(f'aria-label="{label}"') == 1
    for label in ("loss against size at the plan&#39;s compute", "the loss of the full run by each fit"):
        assert f'aria-label="{label}' not in without
        assert text.count(f'aria-label="{label}') == 1
    assert "<code>muscale plan</code>" in without.split("What to run next")[1]
    assert all(line in text for line in further.lines)
    assert f"<li>data: {plan.decision['epochs']:.3g} epochs over the corpus</li>" in text


def test_a_profile_is_drawn_of_the_floor_and_of_the_split_of_compute(tmp_path: Path) -> None:
    text = page(tmp_path, fit=planted_fit())
    section = text[text.index("Profile likelihood of the law") :]
    assert "profile likelihood of the irreducible loss E" in section
    assert "profile likelihood of the exponent of the best size" in section
