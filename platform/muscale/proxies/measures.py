"""The measures that [scores] of a study file asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from muscale.errors import refusing
from muscale.settings import corpus as data
from muscale.settings.config import StudyConfig
from muscale.settings.scores import ScoresSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.hashing import content_key

if TYPE_CHECKING:
    from proxy_models.evaluation.measure import Measure
    from proxy_models.evaluation.tasks import Tasks


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measures of a study's runs: at every checkpoint, and at the end of a run alone."""

    always: tuple[Measure, ...]
    at_end: tuple[Measure, ...]

    @property
    def final(self) -> tuple[Measure, ...]:
        """All measures, as they are taken at the end of a run."""
        return (*self.always, *self.at_end)


def check_tasks(settings: ScoresSettings, directory: Path, *, runs: bool) -> None:
    """Raise an error for tasks that can't be used, before anything is trained for them.

    Args:
        directory: The study's.
        runs: Whether the tasks are to be run here, which needs lm-evaluation-harness.

    Raises:
        ValueError: If the folder lacks a task, or a task needs more than local files.
        MissingLibraryError: If lm-evaluation-harness is missing.
    """
    if not settings.tasks:
        return
    from proxy_models.evaluation.task_files import read_tasks

    folder = directory / settings.folder
    if not folder.is_dir():
        raise ValueError(f"scores.folder: must be a folder of task files, got {folder}")
    read_tasks(folder, settings.tasks)
    if runs:
        from proxy_models.evaluation.harness import version

        version()


def measures_of(
    config: StudyConfig,
    settings: ScoresSettings,
    ledger: Ledger,
    corpus: Corpus,
    directory: Path,
    on_progress: Callable[[int, int], None],
) -> Measures:
    """Return the measures of [scores]; the training text is searched for the tasks' items once.

    Args:
        on_progress: Called during that search with the bytes read and all bytes.

    Raises:
        StageError: If a task can't be used, lm-evaluation-harness is missing, or the corpus has no tokenizer for what needs one.
    """
    from proxy_models.evaluation.ablation import Ablation
    from proxy_models.evaluation.held_out_loss import HeldOutLoss
    from proxy_models.evaluation.memorisation import Memorisation
    from proxy_models.evaluation.quantised_loss import QuantisedLoss
    from proxy_models.evaluation.samples import Samples

    with refusing("scores"):
        if settings.tasks or settings.prompts:
            corpus.tokenizer()
        tasks = _tasks(config, settings, ledger, corpus, directory, on_progress)
    always: list[Measure] = [HeldOutLoss()]
    if tasks:
        always.append(tasks)
    if settings.prompts:
        always.append(Samples(prompts=settings.prompts, n_tokens=settings.sample_tokens))
    at_end: list[Measure] = []
    if settings.memorisation:
        at_end.append(Memorisation())
    if settings.quantised_bits:
        at_end.append(QuantisedLoss(bits=settings.quantised_bits))
    if settings.ablation:
        at_end.append(Ablation(parts=settings.ablation))
    return Measures(always=tuple(always), at_end=tuple(at_end))


def _tasks(
    config: StudyConfig,
    settings: ScoresSettings,
    ledger: Ledger,
    corpus: Corpus,
    directory: Path,
    on_progress: Callable[[int, int], None],
) -> Tasks | None:
    """The tasks, with their items that the training text contains; these are None for a corpus of tokens."""
    if not settings.tasks:
        return None
    from proxy_models.evaluation.contaminated_items import contaminated_items
    from proxy_models.evaluation.tasks import Tasks

    tasks = Tasks(folder=directory / settings.folder, names=settings.tasks, limit=settings.items)
    key = content_key([corpus.key, tasks.key])
    if (known := ledger.result(ResultKind.CONTAMINATION, key)) is None:
        sources = data.tokenized_sources(config.corpus, directory, directory, on_progress)
        if all(source.kind == "tokens" for source in sources.values()):
            return tasks
        found = contaminated_items(tasks, sources, validation_fraction=config.corpus.validation_fraction)
        known = {name: list(numbers) for name, numbers in found.items()}
        ledger.record_result(ResultKind.CONTAMINATION, key, known)
    return replace(tasks, contaminated={name: tuple(numbers) for name, numbers in known.items()})
