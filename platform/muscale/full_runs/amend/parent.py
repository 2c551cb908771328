"""The parent of a continuation: a checkpoint of a full run, the trainings that led to the checkpoint, and the data they have read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder, manifest_hash
from muscale.full_runs.full_run import FullRun, InitialState
from muscale.layout import FULL_RUNS, INITIAL_WEIGHTS
from muscale.plans.plan import Plan
from muscale.settings.config import StudyConfig
from muscale.settings.continuation_file import ParentSettings
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics

PLAN = "plan"


@dataclass(frozen=True, kw_only=True)
class LineageSegment:
    """The part of a run up to the checkpoint from which the next run of the lineage starts.

    Attributes:
        run: Key of the plan or the continuation.
        name: Name of the continuation; "plan" for a promoted run.
        tokens: Tokens trained up to the checkpoint.
        corpus: Key of the run's corpus.
        folder: Folder of that corpus, relative to the study's directory.
        sources: Keys of the corpus's token files, by source.
        position: Tokens of the corpus at which the run started.
        seed: Seed of the data order.
        evaluation_tokens: Held-out tokens.
    """

    run: str
    name: str
    tokens: int
    corpus: str
    folder: str
    sources: dict[str, str]
    position: int
    seed: int
    evaluation_tokens: int

    @classmethod
    def of(cls, corpus: Corpus, directory: Path, numerics: Numerics, **values: Any) -> Self:
        """Make the segment from a corpus and the numerics of a run."""
        return cls(
            corpus=corpus.key,
            folder=str(corpus.folder.relative_to(directory)),
            sources={name: files.key for name, files in corpus.sources.items()},
            seed=numerics.seed,
            evaluation_tokens=numerics.evaluation_tokens,
            **values,
        )

    @property
    def label(self) -> str:
        """Name and key."""
        return f"{self.name} {self.run}"

    def __str__(self) -> str:
        return f"{self.label}: {self.tokens:,} tokens of corpus {self.corpus} from token {self.position:,}"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The checkpoint from which a continuation starts.

    Attributes:
        checkpoint: Path of the checkpoint, which may be gone.
        recipe: Recipe of the last step before the checkpoint.
        segments: Segments of the checkpoint's run, to its end.
        lineage: Segments, oldest first; the last segment belongs to the checkpoint's run.
    """

    checkpoint: Path
    recipe: Recipe
    numerics: Numerics
    segments: tuple[Segment, ...]
    lineage: tuple[LineageSegment, ...]

    @property
    def run(self) -> str:
        """Key of the run's plan or continuation."""
        return self.lineage[-1].run

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.checkpoint.parent.parent

    @property
    def tokens(self) -> int:
        """Tokens that the run had trained at the checkpoint."""
        return self.lineage[-1].tokens

    @property
    def factor(self) -> float:
        """Factor of the schedule on the rate of the run's next step, or of its end."""
        following = next((one for one in self.segments if one.end > self.tokens), self.segments[-1])
        return following.rate_factor(self.tokens)

    @property
    def tokens_before(self) -> int:
        """Tokens of the whole lineage."""
        return sum(past.tokens for past in self.lineage)


def find_parent(wanted: ParentSettings, ledger: Ledger, corpus: Corpus, numerics: Numerics) -> Parent:
    """Find the parent that a file names; `require_checkpoint` checks that its checkpoint exists.

    Args:
        wanted: [parent] of the continuation file.
        ledger: Ledger of the study, which has all checkpoints.
        numerics: Numerics of the study's full runs.

    Raises:
        StageError: If there is no such run, or the batch still grows at the checkpoint.
    """
    run = wanted.run or _promoted_last(ledger)
    found = find_full_run(run, ledger, corpus, numerics)
    if found is None:
        raise StageError(
            f"parent.run: must be the key of a plan, or the key or name of a continuation, of this study, got {run!r}"
        )
    key, segments = found.key, found.segments
    end = segments[-1].end
    tokens = wanted.tokens or end
    if tokens > end:
        raise StageError(f"parent.tokens: must be at most the {end} of run {key}, got {tokens}")
    recipe = next(s.recipe for s in segments if s.start < tokens <= s.end)
    if tokens < recipe.batch_ramp_tokens:
        raise StageError(
            f"parent.tokens: must be after the batch ramp of {recipe.batch_ramp_tokens} tokens, got {tokens} of run {key}"
        )
    own = LineageSegment.of(
        found.corpus,
        ledger.directory,
        found.numerics,
        run=key,
        name=found.name,
        tokens=tokens,
        position=found.position,
    )
    path = CheckpointFolder(ledger.directory / FULL_RUNS / key / CHECKPOINTS).path(tokens)
    return Parent(
        checkpoint=path, recipe=recipe, numerics=found.numerics, segments=segments, lineage=(*found.before, own)
    )


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A plan or a continuation of a study.

    Attributes:
        name: Name of the continuation; "plan" for a plan.
        position: Tokens of the corpus at which the run starts.
        before: The lineage before the run.
    """

    key: str
    name: str
    numerics: Numerics
    segments: tuple[Segment, ...]
    corpus: Corpus
    position: int = 0
    before: tuple[LineageSegment, ...] = ()


def find_full_run(run: str, ledger: Ledger, corpus: Corpus, numerics: Numerics) -> FoundRun | None:
    """Find a plan by its key, or a continuation by its key or name.

    Args:
        corpus: Corpus of the study.
        numerics: Numerics of the study's full runs.

    Raises:
        StageError: If several continuations have this name.
    """
    key, started = find_amendment(run, ledger)
    if started:
        return FoundRun(
            key=key,
            name=started["name"],
            numerics=Numerics.from_dict(started["numerics"]),
            segments=tuple(map(Segment.from_dict, started["segments"])),
            corpus=Corpus.open(ledger.directory / started["folder"]),
            position=started["position"],
            before=tuple(LineageSegment(**values) for values in started["lineage"]),
        )
    registered = ledger.forecast(run)
    if registered is None:
        return None
    chain = Plan.of_row(registered).chain(numerics)
    return FoundRun(key=run, name=PLAN, numerics=chain.numerics, segments=chain.segments, corpus=corpus)


def full_run_of(parent: Parent, config: StudyConfig, ledger: Ledger) -> FullRun:
    """The full run of a parent, with the [promote] and [resources] of a study file as they are now."""
    own, state = parent.lineage[-1], None
    if started := ledger.result(ResultKind.AMENDMENT_STARTED, parent.run):
        before = parent.lineage[-2]
        recipe = next(one.recipe for one in run_segments(before.run, ledger) if one.start < before.tokens <= one.end)
        branched_at = CheckpointFolder(ledger.directory / FULL_RUNS / before.run / CHECKPOINTS).path(before.tokens)
        state = InitialState(
            checkpoint=branched_at, manifest_hash=started["manifest_hash"], recipe=recipe, position=own.position
        )
    return FullRun.of(
        config,
        numerics=replace(parent.numerics, guard=config.promote.guard),
        segments=parent.segments,
        directory=parent.folder,
        corpus=ledger.directory / own.folder,
        initial_state=state,
        initial_weights=ledger.directory / INITIAL_WEIGHTS,
    )


def require_checkpoint(parent: Parent) -> None:
    """Refuse a parent whose checkpoint is gone, without reading a file: raise StageError naming the existing checkpoints."""
    if parent.checkpoint.is_dir():
        return
    kept = CheckpointFolder(parent.checkpoint.parent).kept()
    there = f"has checkpoints after {', '.join(map(str, reversed(kept)))} tokens" if kept else "has no checkpoint"
    raise StageError(
        f"parent.tokens: run {parent.run} {there} in {parent.checkpoint.parent}, got {parent.tokens}; "
        "promote.keep_every_tokens keeps more checkpoints"
    )


def parent_hash(parent: Parent) -> str:
    """Check every file of the parent's checkpoint, and return its manifest hash; raise StageError if it is damaged."""
    if found := manifest_hash(parent.checkpoint):
        return found
    raise StageError(f"{parent.checkpoint}: does not match the hashes of its manifest; name another by parent.tokens")


def _promoted_last(ledger: Ledger) -> str:
    found = ledger.latest_result(ResultKind.PROMOTION)
    if found is None:
        raise StageError("parent.run: no promoted run has ended yet; run `muscale promote` first, or name a run")
    return str(found["payload"]["plan"])


def run_segments(run: str, ledger: Ledger) -> tuple[Segment, ...]:
    """Segments of a plan's run or an amended run, by its key; raise StageError if there is no such run."""
    if started := ledger.result(ResultKind.AMENDMENT_STARTED, run):
        return tuple(map(Segment.from_dict, started["segments"]))
    if registered := ledger.forecast(run):
        return Plan.of_row(registered).segments
    raise StageError(f"parent.run: no plan or amended run of this study has the key {run!r}")


def begun_last(ledger: Ledger) -> str:
    """Key of the full run that began last, promoted or amended; raise StageError if none has begun."""
    kinds = (ResultKind.PROMOTION_STARTED, ResultKind.AMENDMENT_STARTED)
    begun = [(row["created_at"], str(row["key"])) for kind in kinds if (row := ledger.latest_result(kind))]
    if not begun:
        raise StageError("parent.run: no full run has begun yet; run `muscale promote` first")
    return max(begun)[1]


def recorded_parent(wanted: ParentSettings, reason: str, changes: Mapping[str, Any], ledger: Ledger) -> ParentSettings:
    """Name the parent of the run that was last started with these changes; otherwise the run that began last.

    So the same amendment, run again after a kill, resumes its run although that is now the one that began last.
    """
    for row in reversed(ledger.results(ResultKind.AMENDMENT_STARTED)):
        started, parent = row["payload"], row["payload"]["lineage"][-1]
        same = (started.get("reason", ""), started.get("changes", {})) == (reason, dict(changes))
        if same and wanted.run in (None, parent["run"], parent["name"]) and wanted.tokens in (None, parent["tokens"]):
            return ParentSettings(run=parent["run"], tokens=parent["tokens"])
    run = wanted.run or begun_last(ledger)
    tokens = wanted.tokens or newest_checkpoint(run, ledger)
    if tokens is None:
        raise StageError(f"amend: run {run} has no checkpoint yet; wait for its first, or name another run with --run")
    return ParentSettings(run=run, tokens=tokens)


def newest_checkpoint(run: str, ledger: Ledger) -> int | None:
    """Tokens of a run's newest checkpoint, by the run's key or name; None if it has none."""
    key, _ = find_amendment(run, ledger)
    found = CheckpointFolder(ledger.directory / FULL_RUNS / key / CHECKPOINTS).newest()
    return found and found[0]


def find_amendment(run: str, ledger: Ledger) -> tuple[str, dict[str, Any] | None]:
    """Key and record of the continuation with this key or name, or no record; raises StageError if several have this name."""
    rows = ledger.results(ResultKind.AMENDMENT_STARTED)
    found = {row["key"]: row["payload"] for row in rows if run in (row["key"], row["payload"]["name"])}
    if run in found:
        return run, found[run]
    if len(found) > 1:
        raise StageError(
            f"parent.run: {run!r} is the name of {len(found)} continuations; give the key of one: {', '.join(found)}"
        )
    return next(iter(found.items()), (run, None))


def plain(lineage: tuple[LineageSegment, ...]) -> list[dict[str, Any]]:
    """The lineage as plain values."""
    return [asdict(past) for past in lineage]


def position_in(corpus: Corpus, lineage: Sequence[LineageSegment], seed: int) -> int:
    """Tokens of the corpus at which a run starts: after all tokens read before in the same order, so none is repeated.

    Raises:
        StageError: If the data order differs.
    """
    before = [past for past in lineage if past.corpus == corpus.key]
    if not before:
        return 0
    last = before[-1]
    if seed != last.seed:
        raise StageError(
            f"seed: must be {last.seed}, the data order in which {last.label} read this corpus; another order would repeat tokens; "
            f"got {seed}"
        )
    return last.position + last.tokens


def read_again(corpus: Corpus, lineage: Sequence[LineageSegment], position: int) -> list[str]:
    """One line for each source that was read before as part of another corpus, and is now read from its start again.

    A run that begins at a `position` of its corpus reads every source on.
    """
    lines: list[str] = []
    for name, files in corpus.sources.items() if position == 0 else ():
        readers = [past for past in lineage if past.corpus != corpus.key and files.key in past.sources.values()]
        if readers and corpus.evaluation_weights[name]:
            lines.append(
                f"{name} was already read by {readers[-1].label}; it is read again from its start, in another order"
            )
    return lines
