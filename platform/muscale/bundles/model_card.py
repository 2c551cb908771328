"""The model card of a bundle: the recorded facts of a run, and the model's limits."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from muscale.plans.planning import format_value
from proxy_models.data.kept_tokenizer import kept_name
from proxy_models.data.token_files import STATED

if TYPE_CHECKING:
    from muscale.full_runs.promote.promotion import Promotion
    from muscale.plans.planning import Plan
    from proxy_models.data.corpus import Corpus
    from proxy_models.training.numerics import Numerics


def model_card(
    name: str,
    *,
    plan: Plan,
    promotion: Promotion,
    numerics: Numerics,
    corpus: Corpus,
    lineage: dict[str, Any],
    averaging: dict[str, Any] | None = None,
) -> str:
    """The text of the card in Markdown; users' texts are escaped.

    Args:
        name: The study's.
        plan: As registered.
        promotion: The run beside its forecast.
        numerics: Of the run.
        corpus: What it was trained on.
        lineage: Results of sweep and fit as plain values, with caveats.
        averaging: The losses of the last weights and of the average of checkpoints, where there is one.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["line"] = _line
    template = environment.from_string(
        (resources.files("muscale.bundles") / "model_card.md.jinja").read_text(encoding="utf-8")
    )
    stated = all(files.manifest["tokenizer"] == STATED for files in corpus.sources.values())
    return template.render(
        name=name,
        plan=plan,
        promotion=promotion,
        numerics=numerics,
        model=numerics.model,
        corpus=corpus,
        epochs=corpus.epochs(plan.n_tokens),
        warnings=corpus.warnings(plan.n_tokens),
        tokenizer="not known, as the corpus was given as tokens" if stated else kept_name(corpus.folder),
        sweep=lineage["sweep"],
        fit=lineage["fit"],
        caveats=lineage["caveats"],
        averaging=averaging,
        format_value=format_value,
    )


def _line(value: object) -> str:
    """A text that stays in its line, and in its cell of a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
