"""Plans of runs that branch off a checkpoint: by a continuation file, or by an amendment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from muscale.errors import StageError, refusing
from muscale.full_runs.amend.amendment import Amendment
from muscale.full_runs.amend.control import require_control
from muscale.full_runs.amend.parent import Parent, find_parent, position_in, recorded_parent, require_checkpoint
from muscale.layout import CORPORA
from muscale.proxies.leak_check import shared_text
from muscale.settings.amendment_file import AmendmentFile
from muscale.settings.config import StudyConfig
from muscale.settings.continuation_file import ContinuationFile
from muscale.settings.corpus import CorpusSettings, require_weighted_losses
from muscale.settings.fixed_values import unfit_values
from muscale.settings.further_corpus import write_corpus
from muscale.settings.own_model import require_same_family
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.architecture.families import ModelFamily
from proxy_models.architecture.member import Member
from proxy_models.data.batches import evaluation_sets
from proxy_models.data.corpus import Corpus
from proxy_models.data.corpus_writing import write_remixed
from proxy_models.data.mixture import Mixture
from proxy_models.hashing import content_key
from proxy_models.recipes.continued import amended, continued
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics

OnProgress = Callable[[int, int], None]
"""Called with written bytes and total bytes of a corpus."""
M = TypeVar("M", bound=Member)


def plan_continuation(
    path: Path,
    config: StudyConfig,
    ledger: Ledger,
    first: Corpus,
    numerics: Numerics,
    on_progress: OnProgress = lambda _done, _total: None,
) -> Amendment:
    """Read a continuation file, and write its corpus if it is new; trains nothing.

    Raises:
        StudyFileError: If the file can't be used.
        StageError: If there is no such parent, or it can't be continued this way.
    """
    file = ContinuationFile.read(path, vocab_size=config.model.vocab_size)
    with refusing(path, StageError):
        parent = find_parent(file.parent, ledger, first, numerics)
        corpus, evaluation = _corpus(file.own_corpus, parent, path.resolve().parent, config, ledger, first, on_progress)
        segments = _continued(file, parent)
        return _plan(
            parent,
            config,
            ledger,
            name=file.name,
            segments=segments,
            corpus=corpus,
            evaluation_tokens=evaluation,
            seed=file.seed,
            shared=_shared(corpus, parent, config, ledger, on_progress) if file.own_corpus else (),
            changes=file.changes | {"n_tokens": parent.tokens_before + segments[-1].end},
        )


def plan_amendment(
    file: AmendmentFile,
    where: Path | None,
    config: StudyConfig,
    ledger: Ledger,
    first: Corpus,
    numerics: Numerics,
    on_progress: OnProgress = lambda _done, _total: None,
) -> Amendment:
    """Plan what an amendment states, and write its corpus if it is new; trains nothing.

    Without `parent.run` it amends the run that began last, and without `parent.tokens` that run's newest checkpoint; or it resumes
    the run that was started with the same reason and changes.

    Args:
        where: File of the amendment, to whose folder paths are relative; None: to the study's folder.

    Raises:
        StageError: If there is no such parent, or its checkpoint can't take the change; the message names the key.
    """
    with refusing(where or "amend", StageError):
        wanted = recorded_parent(file.parent, file.reason, file.changes, ledger)
        parent = find_parent(wanted, ledger, first, numerics)
        base = where.resolve().parent if where else ledger.directory
        corpus, evaluation = _corpus(file.own_corpus, parent, base, config, ledger, first, on_progress)
        try:
            segments = amended(
                parent.segments,
                parent.tokens,
                file.hyperparameters.values,
                n_tokens=file.n_tokens,
                before=parent.tokens_before - parent.tokens,
            )
        except ValueError as error:
            place = "" if str(error).startswith("n_tokens") else "hyperparameters: "
            raise StageError(f"{place}{error}") from error
        if unfit := unfit_values(parent.numerics.model, "embedding_rate", [file.hyperparameters.embedding_rate or 1.0]):
            raise StageError(f"hyperparameters.embedding_rate: {unfit}")
        position = None
        if file.mixture or file.until_fraction:
            position = parent.lineage[-1].position + parent.tokens
            corpus = _remixed(corpus, file, parent, position + segments[-1].end, ledger)
        return _plan(
            parent,
            config,
            ledger,
            position=position,
            numerics=_with_model(parent.numerics, file.model),
            name=file.name or f"amended_{parent.tokens}",
            segments=segments,
            corpus=corpus,
            evaluation_tokens=evaluation,
            seed=file.seed,
            shared=_shared(corpus, parent, config, ledger, on_progress) if file.own_corpus else (),
            reason=file.reason,
            changes=file.changes,
            control=file.control,
        )


def _plan(
    parent: Parent,
    config: StudyConfig,
    ledger: Ledger,
    *,
    segments: tuple[Segment, ...],
    corpus: Corpus,
    evaluation_tokens: int,
    seed: int | None,
    position: int | None = None,
    numerics: Numerics | None = None,
    **stated: Any,
) -> Amendment:
    """Return the run on a corpus, refused if it can't be trained; a run that has not started needs its checkpoint.

    Without `position` it starts after all that earlier runs have read of the corpus, and without `numerics` it has the parent's.
    """
    require_same_family(parent.numerics.model, config.model)
    seeds = [past.seed for past in parent.lineage if past.corpus == corpus.key]
    numerics = replace(
        numerics or parent.numerics,
        corpus_key=corpus.key,
        seed=[parent.numerics.seed, *seeds][-1] if seed is None else seed,
        evaluation_tokens=evaluation_tokens,
        guard=config.promote.guard,
        stages_by_fraction=corpus.stages_by_fraction,
        run_tokens=None,
    ).for_run((corpus.key == parent.lineage[-1].corpus and parent.numerics.run_tokens) or segments[-1].end)
    planned = Amendment(
        parent=parent,
        numerics=numerics,
        segments=segments,
        corpus=corpus,
        position=position_in(corpus, parent.lineage, numerics.seed) if position is None else position,
        on_spike=config.promote.spike_policy,
        directory=ledger.directory,
        **stated,
    )
    _require_trainable(planned, config)
    if planned.control is not None:
        require_control(planned, planned.control)
    if ledger.result(ResultKind.AMENDMENT_STARTED, planned.key) is None:
        require_checkpoint(parent)
    return planned


def _corpus(
    own: CorpusSettings | None,
    parent: Parent,
    base: Path,
    config: StudyConfig,
    ledger: Ledger,
    first: Corpus,
    on_progress: OnProgress,
) -> tuple[Corpus, int]:
    """The corpus and its evaluated tokens: the parent's, or that of a [corpus], which inherits settings for held-out text."""
    if own is None:
        return Corpus.open(ledger.directory / parent.lineage[-1].folder), parent.numerics.evaluation_tokens
    defaults = {
        "evaluation_tokens": parent.numerics.evaluation_tokens,
        "validation_fraction": config.corpus.validation_fraction,  # so that the study's held-out text stays held out
    }
    settings = own.model_copy(
        update={name: value for name, value in defaults.items() if name not in own.model_fields_set}
    )
    corpus = write_corpus(
        settings,
        first,
        base=base,
        directory=ledger.directory,
        vocab_size=config.model.vocab_size,
        on_progress=on_progress,
    )
    if corpus.stages_by_fraction and corpus.key in {past.corpus for past in parent.lineage}:
        raise StageError(
            "corpus: its stages end at fractions of a run, and an earlier run of the lineage has read it; leave [corpus] out to read "
            "on in its last stage, or set another mixture"
        )
    return corpus, settings.evaluation_tokens


def _shared(
    corpus: Corpus, parent: Parent, config: StudyConfig, ledger: Ledger, on_progress: OnProgress
) -> tuple[str, ...]:
    """Name the earlier corpora of whose held-out text a new corpus trains on more than corpus.most_leaked."""
    found = []
    for past in {past.corpus: past for past in parent.lineage if past.corpus != corpus.key}.values():
        report = shared_text(corpus, Corpus.open(ledger.directory / past.folder), ledger, on_progress)
        if report and report.share > config.corpus.most_leaked:
            found.append(
                f"the run trains on {report.share:.1%} of the held-out words of {past.label}: its loss on them will be too low, and "
                "shows no forgetting"
            )
    return tuple(found)


def _remixed(corpus: Corpus, file: AmendmentFile, parent: Parent, end: int, ledger: Ledger) -> Corpus:
    """The parent's corpus with other weights from the checkpoint on, or with another start of its last stage.

    Each source is read on where it stopped.

    Args:
        end: Tokens of the corpus at the run's end.
    """
    key = "mixture" if file.mixture else "until_fraction"
    mixture = corpus.mixture_of(parent.numerics.run_tokens)
    if mixture is None:
        raise StageError(f"{key}: the parent's corpus must have several sources, but {corpus.folder} has one")
    with refusing(key):
        if file.until_fraction:
            mixture = _with_last_stage(mixture, file.until_fraction, parent, end)
        else:
            mixture = mixture.reweighted(file.mixture, parent.lineage[-1].position + parent.tokens)
    folder = ledger.directory / CORPORA / content_key([corpus.key, mixture.to_dict()])
    return write_remixed(corpus, folder, mixture)


def _with_last_stage(mixture: Mixture, until_fraction: float, parent: Parent, end: int) -> Mixture:
    """The mixture whose last stage begins at a share of the whole run; raises ValueError if that can't be changed any more."""
    if len(mixture.stages) < 2:
        raise ValueError("the parent's corpus must have several stages, got one")
    now = parent.lineage[-1].position + parent.tokens
    elsewhere = parent.tokens_before - now  # tokens of the lineage that are not of this corpus
    if mixture.last_stage_begins <= now:
        raise ValueError(
            f"the last stage began after {mixture.last_stage_begins + elsewhere:,} tokens, not after the checkpoint at "
            f"{parent.tokens_before:,}"
        )
    begins = round(until_fraction * (elsewhere + end)) - elsewhere
    if begins < now:
        least = parent.tokens_before / (elsewhere + end)
        raise ValueError(f"must be at least {least:.4g}, the checkpoint's share of the run, got {until_fraction}")
    return mixture.with_last_stage(begins)


def _with_model(numerics: Numerics, changes: Mapping[str, Any]) -> Numerics:
    """The numerics with settings of the model that leave its tensors as they are."""
    if not changes:
        return numerics

    def changed(model: M) -> M:
        if unknown := next((name for name in changes if not hasattr(model, name)), None):
            raise StageError(f"model.{unknown}: must be a setting of the model's family, got {changes[unknown]!r}")
        with refusing("model"):
            found = ModelFamily(base=replace(model, **changes)).at()
        if found.n_params_total != model.n_params_total:
            raise StageError(
                f"model: must keep the shapes of the checkpoint's {model.n_params_total} parameters, got {found.n_params_total} with "
                + ", ".join(f"{name} = {value!r}" for name, value in changes.items())
            )
        return found

    return replace(numerics, model=changed(numerics.model), base=changed(numerics.base))


def _continued(file: ContinuationFile, parent: Parent) -> tuple[Segment, ...]:
    before = parent.recipe
    if file.optimizer == before.optimizer:
        raise StageError(
            f"optimizer: must differ from the parent's, omit it to keep the parent's; got {file.optimizer!r}"
        )
    try:
        return continued(
            before,
            file.n_tokens,
            learning_rate=file.learning_rate or file.learning_rate_factor * before.learning_rate,
            rewarm_tokens=file.rewarm_tokens,
            schedule=file.schedule,
            cooldown_fraction=file.cooldown_fraction,
            final_fraction=file.final_fraction,
            optimizer=file.optimizer,
        )
    except ValueError as error:
        raise StageError(str(error)) from error


def _require_trainable(planned: Amendment, config: StudyConfig) -> None:
    """Refuse too little held-out text, steps that are no whole sequences, an optimizer without muP rules, and a wrong layout."""
    numerics, recipe = planned.numerics, planned.segments[0].recipe
    context = numerics.model.context_length
    for key, tokens in {
        "hyperparameters.batch_tokens": recipe.ramp.first_batch_tokens,
        "parent.tokens": planned.position,
    }.items():
        if tokens % context:
            raise StageError(f"{key}: must be a multiple of the context length, {context} tokens, got {tokens}")
    require_weighted_losses(planned.corpus, numerics.model)
    with refusing("corpus.evaluation_tokens"):
        evaluation_sets(planned.corpus, context, numerics.evaluation_tokens)
    with refusing("optimizer"):
        numerics.parametrization(recipe.optimizer)
    if layout_errors := list(config.promote.parallelism.layout_errors(numerics.model)):
        raise StageError("; ".join(layout_errors))
    try:
        run = planned.full_run(config, manifest_hash="")
    except ValueError as error:
        raise StageError(str(error)) from error
    run.require_ranks(config.promote.sizes)
