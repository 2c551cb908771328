"""Model cards of bundles: the recorded facts of a run, and the model's limits, in Markdown; user texts are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from muscale.bundles.bundle import llama_errors
from muscale.plans.plan import format_value
from proxy_models.data.kept_tokenizer import kept_name
from proxy_models.data.token_files import STATED

if TYPE_CHECKING:
    from muscale.full_runs.amend.train import Amended
    from muscale.full_runs.promote.promotion import Promotion
    from muscale.plans.plan import Plan
    from proxy_models.data.corpus import Corpus
    from proxy_models.evaluation.measure import Score
    from proxy_models.training.numerics import Numerics


def model_card(
    averaging: dict[str, Any] | None,
    *,
    name: str,
    plan: Plan,
    promotion: Promotion,
    numerics: Numerics,
    corpus: Corpus,
    lineage: dict[str, Any],
    scores: Sequence[Score] = (),
) -> str:
    """The card of a promoted run.

    Args:
        averaging: Losses of the last weights and of the average of checkpoints, if there is an average.
        promotion: The run's result next to its forecast.
        corpus: Training data.
        lineage: Results of sweep and fit as plain values, with caveats.
        scores: Scores of the last weights other than the held-out loss.
    """
    return _render(
        "model_card.md.jinja",
        averaging=averaging,
        name=name,
        plan=plan,
        promotion=promotion,
        numerics=numerics,
        corpus=corpus,
        epochs=corpus.epochs(plan.n_tokens, plan.model.context_length),
        warnings=corpus.warnings(plan.n_tokens, plan.model.context_length),
        tokenizer=kept_name(corpus.folder)
        if _has_tokenizer(corpus)
        else "not known, because the corpus was given as tokens",
        sweep=lineage["sweep"],
        fit=lineage["fit"],
        caveats=lineage["caveats"],
        scores=scores,
    )


def continuation_card(
    averaging: dict[str, Any] | None,
    *,
    study: str,
    done: Amended,
    numerics: Numerics,
    corpus: Corpus,
    n_tokens: int,
    scores: Sequence[Score] = (),
) -> str:
    """The card of a finished continuation; it and the runs before it read `n_tokens` of its corpus. `scores` as in `model_card`."""
    return _render(
        "continuation_card.md.jinja",
        averaging=averaging,
        study=study,
        done=done,
        numerics=numerics,
        corpus=corpus,
        epochs=corpus.epochs(n_tokens, numerics.model.context_length, run_tokens=numerics.run_tokens),
        scores=scores,
    )


def _has_tokenizer(corpus: Corpus) -> bool:
    return any(files.manifest["tokenizer"] != STATED for files in corpus.sources.values())


def _render(template: str, *, numerics: Numerics, corpus: Corpus, **values: Any) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"line": _line, "format_value": format_value}
    files = resources.files("muscale.bundles")
    text = "".join((files / name).read_text(encoding="utf-8") for name in (template, "card_use.md.jinja"))
    model = numerics.model
    return environment.from_string(text).render(
        numerics=numerics,
        model=model,
        corpus=corpus,
        has_tokenizer=_has_tokenizer(corpus),
        export_errors=llama_errors(model),
        **values,
    )


def _line(value: object) -> str:
    """Escape a text so that it stays on one line and in its table cell."""
    return " ".join(str(value).split()).replace("|", "\\|")
