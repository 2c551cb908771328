"""Commands on the data: data check, data clean."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cyclopts import App

from muscale.cli.application import INSPECT, app, command
from muscale.cli.ending import Ending
from muscale.cli.options import Options, StudyFile
from muscale.cli.running import run_stage

if TYPE_CHECKING:
    from muscale.proxies.leak_check import LeakCheck
    from muscale.study import Study

DATA = App(
    name="data",
    group=INSPECT,
    help="Look for held-out text in the training text, and clean the text.",
    help_epilogue="Example: muscale data check study.toml",
)
app.command(DATA)


@command(INSPECT, example="muscale data check study.toml", within=DATA)
def check(study: StudyFile, *, options: Options = Options()) -> int:
    """Look for held-out text in the training text; exit code 1 if there is more than corpus.most_leaked allows.

    Print the share found in each source, the files and lines of the worst passages (up to 1,000 with --json), and the share of
    near-duplicates within the training text. The study's other commands look for held-out text once for each corpus, and the
    gate of a full run includes the result.
    """

    def ending(opened: Study, found: LeakCheck) -> Ending:
        from muscale.settings.cleaning import CleanSettings  # slow to import: pydantic's models
        from muscale.settings.corpus import sources

        if found.passed:
            return Ending(next=(options.line("run", study, "--dry-run"),))
        corpus = opened.config.corpus
        can_clean = not CleanSettings(leaks=True).errors(sources(corpus, opened.directory))
        if not can_clean or (corpus.clean and corpus.clean.leaks):
            return Ending()  # no step removes the rest
        return Ending(next=(options.line("data clean", study, "--set", "corpus.clean.leaks=true"),))

    return run_stage(
        study,
        options,
        lambda opened: opened.check_data(),
        None,
        failed=lambda found: not found.passed,
        ending=ending,
    )


@command(INSPECT, example="muscale data clean study.toml", within=DATA)
def clean(study: StudyFile, *, options: Options = Options()) -> int:
    """Clean the text as set in [corpus.clean], and print how much each step removed, with examples.

    The study's other commands do the same before they tokenize. In a terminal, this command asks for confirmation before a step
    removes more than corpus.clean.most_removed of a source.
    """
    return run_stage(
        study,
        options,
        lambda opened: opened.clean_data(_ask if sys.stdin.isatty() and not options.json else None),
        None,
        ending=lambda _, cleaned: Ending(wrote={"text": cleaned.folder}, next=(options.line("data check", study),)),
    )


def _ask(question: str) -> bool:
    print(question, file=sys.stderr)
    return input("continue? [y/N] ").strip().lower() in ("y", "yes")
