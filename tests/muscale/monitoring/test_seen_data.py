"""The documents of a step of any run, and the marks of epochs on the full run's loss curve."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from muscale import StageError, Study, StudyFileError
from muscale.actors.worker import Worker
from muscale.cli import app
from muscale.errors import RunSelectionError
from muscale.findings import findings
from muscale.full_runs.promote.promotion import FULL_RUN_LABEL
from muscale.layout import CORPUS, FULL_RUNS, METRICS
from muscale.monitoring.run_figures import curve_data, draw_curve, epoch_marks
from muscale.monitoring.seen_data import SeenData
from muscale.pages.contents import gather
from muscale.plans.plan import register
from muscale.plans.planning import Planner
from muscale.proxies.ladder import branches
from muscale.store.ledger_tables import runs
from muscale.store.lineage import Chain
from muscale.store.statements import find
from proxy_models.data.batches import TokenStream, training_stream
from proxy_models.data.token_files import MANIFEST
from tests.muscale.planted import planted_fit, planted_horizon

MakeStudy = Callable[..., Path]


def trained_run(study: Study, purpose: str = "ladder", label: str = "a run") -> Chain:
    """A run of two segments, in the ledger."""
    torch.set_num_threads(1)
    numerics, h = study.config.shared_numerics(study.corpus, study.directory), study.config.hyperparameters
    (job,) = branches(replace(numerics, seed=3), h, [4096], tuned_at=4096, purpose=purpose, label="a run")
    job = replace(job, label=label)
    Worker(study.ledger, compiled=False).reach(job.chain)
    study.ledger.insert(runs, **job.row(job.chain.key))
    return job.chain


def text_of(sequences: torch.Tensor) -> list[str]:
    return [bytes(row.tolist()).replace(b"\0", b"").decode() for row in sequences]


@pytest.mark.parametrize("purpose", ["sweep", "tune"])
def test_a_study_whose_search_was_trained_does_not_begin_again_on_another_text(
    make_study: MakeStudy, purpose: str
) -> None:
    path = make_study()
    study = Study.open(path, quiet=True)
    chain, folder, changed = trained_run(study, purpose=purpose), path.parent / CORPUS, path.parent / "text" / "new.txt"
    key = chain.numerics.corpus_key
    shutil.rmtree(folder)
    assert Study.open(path, quiet=True).corpus.key == key, "written again from the same text"
    shutil.rmtree(folder)
    changed.write_text("words that no run has seen " * 50)
    with pytest.raises(StageError, match=key):
        _ = Study.open(path, quiet=True).corpus
    assert not (folder / MANIFEST).exists(), "what is not the study's corpus does not stay"
    changed.unlink()
    assert Study.open(path, quiet=True).corpus.key == key


def test_the_documents_of_a_step_hold_the_text_that_was_trained_on(
    make_study: MakeStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_study()
    study = Study.open(path, quiet=True)
    chain, corpus = trained_run(study), study.corpus
    assert len(chain.segments) > 1
    (row,) = study.ledger.runs().to_dict("records")
    parts = study.ledger.read(find, "segments")
    assert row["seconds"] == pytest.approx(sum(part["seconds"] for part in parts)), "of the whole run"
    context, batch = study.config.model.context_length, study.config.hyperparameters.batch_tokens
    stream, seen = training_stream(corpus, context, 3), SeenData.of(study.contents, chain.key[:8])
    last = chain.last.end // batch - 1
    for step in (0, 5, last):
        found = seen.batch(step)
        texts = found.groupby("sequence")["text"].agg("".join).tolist()
        assert texts == text_of(stream.batch(step * batch, batch))
        for row in found.to_dict("records"):
            assert row["text"] in (path.parent / "text" / row["file"]).read_text()
    for step in (-1, last + 1):
        with pytest.raises(StageError, match=str(last)):
            seen.batch(step)
    with pytest.raises(RunSelectionError):
        SeenData.of(study.contents, "nothing")
    study.ledger.close()
    asked = ["runs", str(path), "--batch", chain.key[:8], "5"]
    assert app([*asked, "--json"], result_action="return_value") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(seen.batch(5).to_json(orient="records"))
    table = path.parent / "batch.csv"
    assert app([*asked, "--export", str(table)], result_action="return_value") == 0
    assert pd.read_csv(table)["token"].tolist() == [row["token"] for row in printed]
    with pytest.raises(StudyFileError):
        app([*asked, "--where", "loss<2"], result_action="return_value")


def test_a_full_run_s_steps_and_epochs(make_study: MakeStudy) -> None:
    path = make_study()
    for file in sorted((path.parent / "text").iterdir())[15:]:
        file.unlink()
    study = Study.open(path, ["corpus.evaluation_tokens=512"], quiet=True)
    corpus, config = study.corpus, study.config
    made = Planner(config, config.hyperparameters, planted_horizon(), planted_fit(), corpus=corpus).plan()
    plan = register(made, study.ledger)
    seen = SeenData.of(study.contents, plan.key)
    for beginning in (plan.key[:8], trained_run(study, "full", f"{FULL_RUN_LABEL}{plan.key}").key[:8]):
        assert SeenData.of(study.contents, beginning).segments == seen.segments
    run = plan.chain(config.shared_numerics(corpus, corpus.folder.parent))
    stream = training_stream(corpus, config.model.context_length, run.numerics.seed)
    assert isinstance(stream, TokenStream)
    number, (tokens, batch) = 7, list(run.segments[0].steps())[7]
    texts = seen.batch(number).groupby("sequence")["text"].agg("".join).tolist()
    assert texts == text_of(stream.batch(tokens, batch))
    starts = seen.epoch_starts()
    length = stream.sequences_per_epoch * config.model.context_length
    assert starts["tokens"].tolist() == list(range(length, plan.n_tokens, length))
    assert starts["epoch"].tolist() == list(range(2, 2 + len(starts)))
    assert len(starts) > 2
    folder = study.directory / FULL_RUNS / plan.key
    folder.mkdir(parents=True)
    steps = [{"tokens": n * batch, "train_loss": 5 - n * 0.001} for n in range(1, 1 + 5 * length // (2 * batch))]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in steps))
    contents = gather(study.contents, findings(study.contents))
    assert contents.epochs is not None
    assert contents.epochs.equals(starts)
    assert contents.curve is not None
    marks = epoch_marks(curve_data(contents.curve), starts)
    assert marks["epoch"].tolist() == [2, 3]
    assert marks["train_loss"].tolist() == pytest.approx([5 - 0.001 * length * n / batch for n in (1, 2)], abs=0.01)
    assert "corpus: epoch begins" in study.report().read_text()
    study.ledger.close()


def test_of_many_epochs_every_nth_is_marked() -> None:
    data = pd.DataFrame({"tokens": [10.0, 1000.0], "train_loss": [4.0, 2.0]})
    many = pd.DataFrame({"source": "a", "epoch": range(2, 102), "tokens": range(10, 1010, 10)})
    few = pd.DataFrame({"source": "b", "epoch": [2], "tokens": [505]})
    marks = epoch_marks(data, pd.concat([many, few]))
    assert marks[marks["source"] == "a"]["epoch"].tolist() == list(range(2, 102, 9))
    assert marks[marks["source"] == "b"]["train_loss"].tolist() == [3.0]
    forecast = {"loss": 2.0, "low": 1.9, "high": 2.1, "level": 0.9}
    names = [trace.name for trace in draw_curve(data, forecast, None, epochs=pd.concat([many, few])).data]
    assert {"a: epoch begins", "b: epoch begins"} <= set(names)
    unmarked = draw_curve(data, forecast, None, epochs=many[many["tokens"] > 1000])
    assert len(unmarked.data) == len(names) - 2
