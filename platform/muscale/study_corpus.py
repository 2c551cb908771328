"""The text of a study: its corpus of tokens, written at first use, the check of its held-out text, and its cleaning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from muscale.actors.ray_map import cluster_map
from muscale.errors import StageError, refusing
from muscale.findings import StudyContents
from muscale.layout import CORPUS
from muscale.progress import Display, silent
from muscale.proxies.leak_check import LeakCheck, check_leaks, count_near_duplicates, known_leaks
from muscale.settings import corpus as data
from muscale.store.ledger import Ledger
from muscale.store.statements import find
from proxy_models.data.cleaning.cleaned import Cleaned
from proxy_models.data.cleaning.cleaning_step import MissingLibraryError
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import OtherCorpusError, discard_corpus
from proxy_models.data.sources import CorpusError


def open_corpus(contents: StudyContents, display: Display) -> Corpus:
    """Open the token files, which are written if the study has none; the first time, store initial weights and look for leaks.

    Raises:
        StageError: If the text can't be read, or has changed since runs were trained on it.
    """
    config, ledger, folder = contents.config, contents.ledger, contents.directory / CORPUS
    with refusing("corpus", CorpusError):
        if config.trainer:
            with display.reading("corpus"):
                return config.trainer.write_corpus(folder)
        try:
            corpus = _write(contents, folder, display)
        except OtherCorpusError:
            if ledger.is_begun:
                raise
            # nothing was trained on it; its settings, such as [corpus.clean], have changed since
            discard_corpus(folder)
            corpus = _write(contents, folder, display)
    _require_trained_on(corpus, ledger)
    data.require_fitting_model(corpus, config.model)
    for warning in data.cut_records(corpus, config.model.context_length):
        display.line(f"warning: {warning}")
    if config.initial_weights:
        from muscale import weights_folder  # slow to import: torch

        with display.reading("initial weights"):
            weights_folder.store(config, contents.directory, corpus, is_begun=ledger.is_begun)
    if not known_leaks(config, ledger, corpus):
        with display.reading("leaks") as on_progress:
            found = check_leaks(config, ledger, corpus, contents.directory, on_progress)
        if not found.passed:
            display.line(f"warning: {found.compared}; `muscale data check` lists the passages")
    return corpus


def check_corpus(contents: StudyContents, corpus: Corpus, display: Display) -> LeakCheck:
    """Measure how much held-out text, and how many near-duplicates, the training text contains.

    Raises:
        StageError: If a source can't be read.
    """
    checked = (contents.config, contents.ledger, corpus, contents.directory)
    try:
        with display.reading("near-duplicates") as on_progress:
            count_near_duplicates(*checked, on_progress)
    except MissingLibraryError as error:
        display.line(f"not counted: {error}")
    except CorpusError as error:
        raise StageError(f"data check: {error}") from error
    return check_leaks(*checked, silent)


def clean_corpus(contents: StudyContents, display: Display, confirm: Callable[[str], bool] | None) -> Cleaned:
    """Clean the text as set in [corpus.clean], or open the cleaned text.

    Args:
        confirm: As in `Study.clean_data`.

    Raises:
        StageError: If [corpus.clean] has no step, the text can't be read, or a step removes too much.
    """
    settings, directory = contents.config.corpus, contents.directory
    if not (settings.clean and settings.clean.is_on):
        raise StageError("data clean: [corpus.clean] of the study file must have a step, such as exact_duplicates")

    def confirmed(question: str) -> bool:
        with display.paused():
            return confirm is not None and confirm(question)

    resources = contents.config.resources
    with (
        refusing("corpus.clean", CorpusError),
        display.reading("clean") as on_progress,
        cluster_map(resources) as parallel,
    ):
        return data.write_cleaned(settings, directory, directory, on_progress, confirm=confirmed, parallel_map=parallel)


def _write(contents: StudyContents, folder: Path, display: Display) -> Corpus:
    config = contents.config
    with display.reading("corpus") as on_progress, cluster_map(config.resources) as parallel:
        return data.write(
            config.corpus, contents.directory, folder, config.model.vocab_size, on_progress, parallel_map=parallel
        )


def _require_trained_on(corpus: Corpus, ledger: Ledger) -> None:
    """Refuse a corpus other than that of the search's runs, and remove it: it would begin the whole study again."""
    for purpose in ("sweep", "tune"):
        newest = ledger.read(find, "runs", {"purpose": purpose}, ["-created_at"], limit=1)
        trained = newest and ledger.read(find, "segments", {"key": newest[0]["key"]}, limit=1)
        if trained and (before := trained[0]["numerics"]["corpus_key"]) != corpus.key:
            discard_corpus(corpus.folder)
            raise StageError(
                f"corpus: the text now gives corpus {corpus.key}, but the study's runs were trained on {before}: restore the "
                "text, or begin a study in another directory"
            )
