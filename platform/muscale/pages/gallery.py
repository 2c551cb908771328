"""The gallery: one self-contained page of every evaluated checkpoint: scores over training, samples, and two checkpoints compared."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from muscale.errors import StageError
from muscale.findings import StudyContents
from muscale.full_runs.checkpoints.evaluated_checkpoints import EvaluatedCheckpoint, evaluated_checkpoints, scores_of
from muscale.pages.report import write_page
from muscale.pages.score_figures import colors_of, draw_over_tokens
from muscale.pages.sections import Drawing, Section, as_table, count, drawn, escaped, moment
from muscale.plans.score_forecasts import PlannedScore, registered_scores
from muscale.store.ledger import now
from proxy_models.evaluation.held_out_loss import HeldOutLoss
from proxy_models.evaluation.memorisation import Memorisation
from proxy_models.evaluation.smooth_scores import CHANCE, TASKS

_OVER_TRAINING = (HeldOutLoss.name, TASKS, Memorisation.name)
"""Measures with a figure over the training tokens; the others are taken at the ends of runs."""
_GUESSED = ("accuracy", "probability")
"""Metrics whose figure shows the score of a guess."""
_KEY = 6  # characters of a key in a name


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Checkpoints on a page, with the names of their runs."""

    checkpoints: tuple[EvaluatedCheckpoint, ...]
    names: Mapping[str, str]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The scores, with the runs by name."""
        scores = scores_of(self.checkpoints)
        return scores.assign(run=scores["run"].map(self.names))

    @cached_property
    def runs(self) -> dict[str, bool]:
        """Whether each run is a full run, by name."""
        return {self.names[one.run]: one.is_full for one in self.checkpoints}

    def only(self, runs: Collection[str]) -> Gallery:
        """Return the gallery of some runs, or of all if `runs` is empty; raise StageError for an unknown name."""
        if unknown := [run for run in runs if run not in self.runs]:
            raise StageError(f"gallery: --run must be one of {self._listed}; got {unknown[0]!r}")
        kept = [one for one in self.checkpoints if not runs or self.names[one.run] in runs]
        return Gallery(checkpoints=tuple(kept), names=self.names)

    def find(self, named: str) -> int:
        """Return the number of the checkpoint named RUN@TOKENS, or of the last of RUN; raise StageError if there is none."""
        run, _, tokens = named.partition("@")
        found = [
            number
            for number, one in enumerate(self.checkpoints)
            if self.names[one.run] == run and tokens in ("", str(one.tokens))
        ]
        if found:
            return found[-1]
        known = sorted({one.tokens for one in self.checkpoints if self.names[one.run] == run})
        rule = (
            f"{run}@TOKENS with TOKENS one of {known}" if known else f"RUN@TOKENS or RUN with RUN one of {self._listed}"
        )
        raise StageError(f"gallery: --compare must name {rule}; got {named!r}")

    @property
    def ends(self) -> tuple[int, int]:
        """Numbers of the first and the last checkpoint of the last run; of all if that run has only one."""
        last = [number for number, one in enumerate(self.checkpoints) if one.run == self.checkpoints[-1].run]
        return last[0] if len(last) > 1 else 0, last[-1]

    @property
    def _listed(self) -> str:
        return ", ".join(repr(run) for run in self.runs)


def open_gallery(study: StudyContents) -> Gallery:
    """Return all evaluated checkpoints of a study that have a score or a sample.

    Raises:
        StageError: If there is none.
    """
    found = [one for one in evaluated_checkpoints(study.ledger) if one.scores or one.samples]
    if not found:
        raise StageError(
            f"gallery: {study.path}: no checkpoint has a sample or a score yet; set prompts or tasks in [scores] of the study file, "
            "then run `muscale evaluate`"
        )
    return Gallery(checkpoints=tuple(found), names=run_names(found))


def run_names(checkpoints: Sequence[EvaluatedCheckpoint]) -> dict[str, str]:
    """Return a name for each run: "full run", or its N, with the seed and the start of its key where runs need them."""
    about = {one.run: one for one in checkpoints}
    sizes = {run: "full run" if one.is_full else count(one.n_params).replace(" ", "") for run, one in about.items()}
    seeds: dict[str, set[int]] = {}
    for run, size in sizes.items():
        seeds.setdefault(size, set()).add(about[run].seed)
    named = {
        run: f"{size}-seed{about[run].seed}" if not about[run].is_full and len(seeds[size]) > 1 else size
        for run, size in sizes.items()
    }
    often = Counter(named.values())
    return {run: name if often[name] == 1 else f"{name} {run[:_KEY]}" for run, name in named.items()}


def write_gallery(
    study: StudyContents, path: Path, *, runs: Collection[str] = (), compare: tuple[str, str] | None = None
) -> Path:
    """Write the gallery of a study atomically and return its path.

    Args:
        runs: Names of the runs to show; all by default.
        compare: Names of the two checkpoints that the page compares first.

    Raises:
        StageError: If nothing was evaluated, or a name is unknown.
    """
    gallery = open_gallery(study).only(runs)
    first, second = map(gallery.find, compare) if compare else gallery.ends
    prompts = study.config.scores.prompts if study.config.scores else ()
    sections = [
        *_over_training(gallery, study),
        *_samples(gallery, prompts),
        *_compared(gallery, first, second),
        _table(gallery),
    ]
    n_runs, n_checkpoints = len(gallery.runs), len(gallery.checkpoints)
    return write_page(
        path,
        sections,
        name=f"{study.config.name}: samples and scores",
        written=f"written {moment(now())} · {n_checkpoints} checkpoints of {n_runs} runs",
        completed=study.commands.completed_markup,
        scripts=("report.js", "gallery.js"),
    )


def _over_training(gallery: Gallery, study: StudyContents) -> list[Section]:
    scores = gallery.scores[gallery.scores["measure"].isin(_OVER_TRAINING)]
    if scores.empty:
        return []
    colors, planned = colors_of(gallery.runs), _planned(gallery, study)
    groups: dict[str, list[Drawing]] = {}
    for (measure, name, metric), rows in scores.groupby(["measure", "name", "metric"], sort=False):
        if metric in (CHANCE, "repetitions"):
            continue
        guesses = scores.loc[(scores["name"] == name) & (scores["metric"] == CHANCE), "value"]
        group, title = (name, metric) if measure == TASKS else (measure, _joined(name, metric))
        forecast, end = planned.get((name, metric), (None, None))
        figure = draw_over_tokens(
            rows,
            colors,
            title=title.replace("_", " "),
            chance=guesses.mean() if len(guesses) and metric.startswith(_GUESSED) else None,
            forecast=forecast,
            end=end,
        )
        groups.setdefault(group, []).extend(drawn(figure, f"{group}: {title} over tokens"))
    return [
        Section(
            title="Scores over training",
            command="evaluate",
            about="Filled diamonds end a run after its cooldown. The open diamond is the full run's forecast with its interval, "
            "and a dotted line is the score of a guess. Standard errors are over items.",
            group="Scores",
            template="gallery_scores.html.jinja",
            values={"groups": groups, "colors": colors},
        )
    ]


def _planned(gallery: Gallery, study: StudyContents) -> dict[tuple[str, str], tuple[PlannedScore, int]]:
    """Return the registered forecast of each task and metric, with the tokens of its run."""
    row = study.ledger.latest_forecast()
    found = registered_scores(row["plan"], study.ledger) if row else None
    if row is None or found is None:
        return {}
    return {(score.task, score.metric): (score, int(row["payload"]["n_tokens"])) for score in found.scores}


def _samples(gallery: Gallery, prompts: Sequence[str]) -> Iterator[Section]:
    texts: dict[str, dict[int, str]] = {prompt: {} for prompt in prompts}
    for number, one in enumerate(gallery.checkpoints):
        for sample in one.samples:
            texts.setdefault(sample.prompt, {})[number] = sample.text
    if shown := {prompt: found for prompt, found in texts.items() if found}:
        yield Section(
            title="Samples",
            command="evaluate",
            about="What each checkpoint writes after the same prompts, with the same random numbers.",
            group="Texts",
            template="gallery_samples.html.jinja",
            values={"texts": shown, "labels": [_label(gallery, one) for one in gallery.checkpoints]},
        )


def _compared(gallery: Gallery, first: int, second: int) -> Iterator[Section]:
    if len(gallery.checkpoints) < 2:
        return
    columns = list(dict.fromkeys((s.measure, s.name, s.metric) for one in gallery.checkpoints for s in one.scores))
    values = {
        "columns": [_joined("" if measure == TASKS else measure, *names) for measure, *names in columns],
        "checkpoints": [_values(gallery, one, columns) for one in gallery.checkpoints],
        "compared": [first, second],
    }
    yield Section(
        title="Two checkpoints",
        command="evaluate",
        about="Words that differ are marked. The standard error of a difference takes the two scores as independent; "
        "on the same items it is usually smaller.",
        group="Texts",
        template="gallery_compared.html.jinja",
        values={"data": escaped(json.dumps(values))},
    )


def _joined(*parts: str) -> str:
    return " ".join(dict.fromkeys(part for part in parts if part))


def _values(gallery: Gallery, one: EvaluatedCheckpoint, columns: list[tuple[str, str, str]]) -> dict[str, Any]:
    known = {(s.measure, s.name, s.metric): s for s in one.scores}
    scores = [known.get(column) for column in columns]
    return {
        "run": gallery.names[one.run],
        "label": _label(gallery, one),
        "scores": [[s.value, s.standard_error] if s and math.isfinite(s.value) else None for s in scores],
    }


def _label(gallery: Gallery, one: EvaluatedCheckpoint) -> dict[str, str]:
    """Return what is written above a checkpoint's text."""
    return {
        "run": gallery.names[one.run],
        "tokens": f"{count(one.tokens)} tokens" + (", end" if one.anneals else ""),
        "about": f"N = {count(one.n_params)}" + (f" · loss {one.val_loss:.4f}" if one.val_loss is not None else ""),
    }


def _table(gallery: Gallery) -> Section:
    return Section(
        title="Every score",
        command="evaluate",
        about="One row for each checkpoint and score.",
        group="Scores",
        table=as_table(gallery.scores[["run", "tokens", "measure", "name", "metric", "value", "standard_error", "n"]]),
    )
