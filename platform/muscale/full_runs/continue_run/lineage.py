"""Where a stage goes on: the checkpoint of a full run of the study, and every stretch of training that led to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from muscale.errors import StageError
from muscale.full_runs.checkpoints.folder import CHECKPOINTS, CheckpointFolder, seal_of
from muscale.layout import FULL_RUNS
from muscale.plans.planning import Plan
from muscale.settings.stage_file import ParentSettings
from muscale.store.ledger import Ledger
from muscale.store.lineage import Chain
from muscale.store.tables import ResultKind
from proxy_models.data.corpus import Corpus
from proxy_models.recipes.recipe import Recipe
from proxy_models.recipes.segments import Segment
from proxy_models.training.numerics import Numerics

"""Of the ledger's results, by key: what a stage trains, as it was first launched."""
PLAN = "plan"


@dataclass(frozen=True, kw_only=True)
class LineageSegment:
    """What a run of a lineage trained, up to the checkpoint that the next one goes on from.

    Attributes:
        run: Key of its plan, or of the stage.
        name: The stage's, "plan" of a promoted run.
        tokens: That it trained.
        corpus: Key of what it read.
        folder: Of that corpus, relative to the study's directory.
        sources: Keys of the corpus's token files, by source.
        position: Where it began in the corpus, tokens.
        seed: Of the order that it was read in.
        evaluation_tokens: That were held out.
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
        """With what a corpus and the numbers of a run say of it."""
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
        """Its name and its key."""
        return f"{self.name} {self.run}"

    def __str__(self) -> str:
        return f"{self.label}: {self.tokens:,} tokens of corpus {self.corpus} from {self.position:,} on"


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The state that a stage goes on from.

    Attributes:
        checkpoint: Where it lies, or lay.
        recipe: Of the last step before it.
        numerics: Of its run.
        lineage: Every stretch that led to it, the first one first; the last is of its own run.
    """

    checkpoint: Path
    recipe: Recipe
    numerics: Numerics
    lineage: tuple[LineageSegment, ...]

    @property
    def run(self) -> str:
        """Key of its plan, or of the stage."""
        return self.lineage[-1].run

    @property
    def tokens(self) -> int:
        """Of its run at the checkpoint."""
        return self.lineage[-1].tokens

    @property
    def tokens_before(self) -> int:
        """Of the whole lineage."""
        return sum(stretch.tokens for stretch in self.lineage)


def find_parent(wanted: ParentSettings, ledger: Ledger, corpus: Corpus, chain_of: Callable[[Plan], Chain]) -> Parent:
    """The checkpoint that is meant; whether it is there, and whole, is for `require_checkpoint` to tell.

    Args:
        wanted: [parent] of the stage file.
        ledger: The study's, as are all checkpoints.
        corpus: The study's.
        chain_of: What a plan trains.

    Raises:
        StageError: If there is no such run, or the checkpoint lies where the batch still grows.
    """
    directory = ledger.directory
    run = wanted.run or _promoted_last(ledger)
    key, started = find_stage(run, ledger)
    numerics: Numerics
    segments: tuple[Segment, ...]
    if started:
        numerics = Numerics.from_dict(started["numerics"])
        segments = tuple(map(Segment.from_dict, started["segments"]))
        name, position = started["name"], started["position"]
        corpus = Corpus.open(directory / started["folder"])
        before = tuple(LineageSegment(**stretch) for stretch in started["lineage"])
    elif registered := ledger.forecast(run):
        chain = chain_of(Plan.of_row(registered))
        key, name, position, before = run, PLAN, 0, ()
        numerics, segments = chain.numerics, chain.segments
    else:
        raise StageError(
            f"parent.run: must be the key of a plan or of a stage of this study, or a stage's name, got {run!r}"
        )
    checkpoints = CheckpointFolder(directory / FULL_RUNS / key / CHECKPOINTS)
    end = segments[-1].end
    tokens = wanted.tokens or end
    if tokens > end:
        raise StageError(f"parent.tokens: must be at most the {end} of run {key}, got {tokens}")
    recipe = next(s.recipe for s in segments if s.start < tokens <= s.end)
    if tokens < recipe.batch_ramp_tokens:
        raise StageError(
            f"parent.tokens: must lie behind the batch ramp of {recipe.batch_ramp_tokens} tokens, got {tokens} of run {key}"
        )
    own = LineageSegment.of(corpus, directory, numerics, run=key, name=name, tokens=tokens, position=position)
    path = checkpoints.path(tokens)
    return Parent(checkpoint=path, recipe=recipe, numerics=numerics, lineage=(*before, own))


def require_checkpoint(parent: Parent) -> None:
    """Refuse a parent without its checkpoint; reads no file of it.

    Raises:
        StageError: Naming those that there are.
    """
    if parent.checkpoint.is_dir():
        return
    kept = CheckpointFolder(parent.checkpoint.parent).kept()
    there = f"has checkpoints after {', '.join(map(str, reversed(kept)))} tokens" if kept else "has no checkpoint"
    raise StageError(
        f"parent.tokens: run {parent.run} {there} in {parent.checkpoint.parent}, got {parent.tokens}; "
        "promote.keep_every_tokens keeps more of a run, and a run that has not ended has none of its end"
    )


def sealed(parent: Parent) -> str:
    """The seal of the parent's checkpoint, of which every file is hashed.

    Raises:
        StageError: If it is not whole.
    """
    if found := seal_of(parent.checkpoint):
        return found
    raise StageError(f"{parent.checkpoint}: does not hold the hashes of its manifest; name another by parent.tokens")


def _promoted_last(ledger: Ledger) -> str:
    found = ledger.latest_result(ResultKind.PROMOTION)
    if found is None:
        raise StageError("parent.run: no run was promoted to its end yet; run `muscale promote` first, or name a run")
    return str(found["payload"]["plan"])


def find_stage(run: str, ledger: Ledger) -> tuple[str, dict[str, Any] | None]:
    """Key and record of the stage with this key or name, no record where there is none.

    Raises:
        StageError: If it is the name of several.
    """
    rows = ledger.results(ResultKind.CONTINUATION_STARTED)
    found = {row["key"]: row["payload"] for row in rows if run in (row["key"], row["payload"]["name"])}
    if run in found:
        return run, found[run]
    if len(found) > 1:
        raise StageError(
            f"parent.run: {run!r} is the name of {len(found)} stages; give the key of one: {', '.join(found)}"
        )
    return next(iter(found.items()), (run, None))


def plain(lineage: tuple[LineageSegment, ...]) -> list[dict[str, Any]]:
    """Its stretches as plain values."""
    return [asdict(stretch) for stretch in lineage]
