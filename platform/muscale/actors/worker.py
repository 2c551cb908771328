"""Worker that trains chains to their end: it checks the ledger, resumes from the nearest kept state, and records the outcome."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from muscale.actors.corpora import open_corpus
from muscale.actors.stalls import ended_where_stalled
from muscale.environment import device_name, environment
from muscale.fingerprint import require_same_package
from muscale.idle_experts import idle_experts
from muscale.layout import CORPUS, CURVES, EVALUATED, INITIAL_WEIGHTS, STALLS, STATES
from muscale.programs.program_trainer import ProgramTrainer
from muscale.store.evaluations import Evaluated, missing, record
from muscale.store.lease import lease, record_segment
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import retrained
from muscale.store.lineage import Chain
from muscale.store.outcome import Outcome
from proxy_models.data.corpus import Corpus
from proxy_models.evaluation.loaded_model import loaded_model
from proxy_models.evaluation.measure import Subject
from proxy_models.files import atomic_write
from proxy_models.training.attended import attended_length
from proxy_models.training.averaging import Tail
from proxy_models.training.compilation import Compile
from proxy_models.training.device import datasheet_flops
from proxy_models.training.optimizer import multipliers_of
from proxy_models.training.state import StateError, TrainState
from proxy_models.training.trainer import SegmentResult, Trainer

if TYPE_CHECKING:
    from muscale.actors.ranks import Followers
    from muscale.settings.tables import ResourceSettings

OnStep = Callable[[int, float], None]
_RETRAINED_TOLERANCE = 1e-3  # relative: another machine or thread count may have trained the recorded loss
_log = logging.getLogger(__name__)


def open_worker(ledger: Ledger, resources: ResourceSettings, package: str) -> Worker:
    """The worker of this process, for the study of a ledger; with several ranks to a trial it is the first and starts the others.

    Raises:
        PackageMismatchError: If the driver runs another package than this process.
    """
    require_same_package(package)
    torch.set_num_threads(resources.threads)
    followers = None
    if resources.ranks_per_trial > 1:
        from muscale.actors.ranks import Followers

        followers = Followers(resources, package)
    return Worker(
        ledger,
        compiled=resources.compile,
        device=resources.device,
        device_share=resources.device_share,
        stall_seconds=60 * resources.stall_minutes,
        followers=followers,
    )


class Worker:
    """Trains chains of one study in this process, on one device, and keeps its models loaded between chains.

    With followers it is the first of several ranks, each with its own device; only the first rank reads and writes the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        compiled: Compile,
        device: str = "cpu",
        device_share: float = 1.0,
        stall_seconds: float = math.inf,
        followers: Followers | None = None,
    ) -> None:
        self.ledger, self._followers = ledger, followers
        self.stall_seconds = stall_seconds  # without a step, after which this process ends itself
        self.directory = ledger.directory
        corpus = Corpus.open(self.directory / CORPUS)
        mesh = followers.mesh if followers else None
        self.ranks = mesh.size() if mesh else 1
        self.trainer: Trainer | ProgramTrainer
        if corpus.is_own_data:
            self.trainer = ProgramTrainer(corpus, self.directory, stall_seconds)
            self.stall_seconds = math.inf  # the program alone is ended, and its fault has a message
            return
        self.trainer = Trainer(
            corpus,
            device=device,
            compile=compiled,
            device_share=device_share,
            mesh=mesh,
            initial_weights=self.directory / INITIAL_WEIGHTS,
        )
        # so that a neighbour's allocations don't fail because of ours
        if device_share < 1 and self.trainer.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(device_share, self.trainer.device)

    def evaluate(self, point: Evaluated) -> Outcome:
        """Reach the end of the point's chain, and take the measures of its weights that the ledger lacks."""
        outcome = self.reach(point.chain, goes_on=bool(missing(self.ledger, [point])))
        if outcome.diverged or not missing(self.ledger, [point]):
            return outcome
        with lease(self.ledger, f"evaluation of {point.chain.key}") as token:
            ledger = self.ledger.under(f"evaluation of {point.chain.key}", token)
            for wanted in missing(ledger, [point]):  # none if another worker has taken them meanwhile
                subject = self._subject(point.chain)
                for measure in wanted.measures:
                    began = time.perf_counter()
                    found = measure.measure(subject)
                    record(ledger, point.chain, measure, found, seconds=time.perf_counter() - began)
        return outcome

    def _subject(self, chain: Chain) -> Subject:
        """The weights at the end of a chain that was reached, as measures see them."""
        self._read_corpus(chain.numerics.corpus_key)
        state, recipe = self._state(chain), chain.last.recipe
        return Subject(
            model=loaded_model(
                state.weights,
                chain.numerics,
                multipliers_of(chain.numerics.parametrization(recipe.optimizer), recipe),
                device=self.trainer.device,
            ),
            numerics=chain.numerics,
            text=self.trainer.corpus,
            tokens=chain.last.end,
            progress=self.directory / EVALUATED / chain.key,
        )

    def reach(self, chain: Chain, on_step: OnStep | None = None, *, goes_on: bool = False) -> Outcome:
        """Return the outcome at the end of the chain, training only the part that the ledger lacks.

        The state after annealing is kept only if training continues from it, as between cycles, or it is evaluated.
        """
        if known := self.ledger.outcome(chain):
            return known
        if chain.parent and (before := self.reach(chain.parent, on_step, goes_on=True)).diverged:
            return before
        with lease(self.ledger, chain.line) as token:
            if not self.ledger.outcome(chain):
                keep = goes_on or not chain.anneals
                start, result = self._advance(chain, on_step)
                self._count_repeated(chain, start, result.seconds)
                self._record(chain, token, start, result, keep=keep)
        return self.reach(chain)

    def _advance(self, chain: Chain, on_step: OnStep | None) -> tuple[int, SegmentResult]:
        """Train the last segment from the nearest state that is kept; returns where that was, and the result."""
        self._read_corpus(chain.numerics.corpus_key)
        state = self._nearest_state(chain)
        if state is None and chain.parent:
            state = self._state(chain.parent)
        start = state.tokens if state else 0
        remainder = replace(chain.last, start=start)
        stall_file = self.directory / STALLS / f"{chain.key}.txt"
        averaged = _is_averaged(chain)
        with (
            ended_where_stalled(stall_file, self.stall_seconds, f"segment {chain.key}") as moves,
            self._followers.training(
                self.trainer.corpus.folder,
                self.directory / INITIAL_WEIGHTS,
                chain.numerics,
                remainder,
                state,
                averaged=averaged,
            )
            if self._followers
            else nullcontext(),
        ):
            return start, self.trainer.train(
                chain.numerics, remainder, state, averaged=averaged, on_step=on_step, moves=moves
            )

    def _read_corpus(self, key: str) -> None:
        """Turn to the corpus of a chain; one that the study does not know is the trainer's to refuse."""
        trainer = self.trainer
        if isinstance(trainer, Trainer) and key != trainer.corpus.key and (corpus := open_corpus(self.directory, key)):
            trainer.read(corpus)

    def _nearest_state(self, chain: Chain) -> TrainState | None:
        """The last kept state on the chain's own line that its training can resume from."""
        for row in self.ledger.line(chain.line):
            if row["tokens"] <= _latest_start(chain) and (state := self._load(row)):
                return state
        return None

    def _count_repeated(self, chain: Chain, start: int, seconds: float) -> None:
        """Count what was trained again on the chain's own line, as a state that lay nearer had been pruned."""
        if chain.anneals:
            return  # the states of such ends are not kept in the first place
        for row in self.ledger.line(chain.line):
            if start < row["tokens"] <= _latest_start(chain) and row["loss"] is not None:
                share = (row["tokens"] - start) / (chain.last.end - start)
                self.ledger.insert(retrained, key=row["key"], tokens=row["tokens"] - start, seconds=share * seconds)
                return

    def _state(self, chain: Chain) -> TrainState:
        """The state at the end of a chain that was reached, retrained if pruned; raises RuntimeError if the loss differs."""
        row = self.ledger.segment(chain.key) or {}
        if state := self._load(row):
            return state
        start, result = self._advance(chain, None)
        if (
            result.state is None
            or result.loss is None
            or not math.isclose(result.loss, row["loss"], rel_tol=_RETRAINED_TOLERANCE)
        ):
            raise RuntimeError(
                f"segment {chain.key} came out at a loss of {result.loss} when it was trained again from a pruned state, "
                f"but {row['loss']} is recorded"
            )
        self.ledger.insert(retrained, key=chain.key, tokens=chain.last.end - start, seconds=result.seconds)
        return result.state

    def _load(self, row: dict[str, Any]) -> TrainState | None:
        if not row.get("state"):
            return None
        try:
            return TrainState.load(self.directory / row["state"])
        except FileNotFoundError:  # pruned since the row was read, or lost
            return None
        except StateError as error:
            _log.warning("%s; continuing without it, from the previous one", error)
            return None

    def _record(self, chain: Chain, token: int, trained_from: int, result: SegmentResult, *, keep: bool) -> None:
        state = None
        if result.state and keep:
            state = f"{STATES}/{chain.key}.pt"
            result.state.save(self.directory / state)
        self._write_curve(chain, result)
        if warning := idle_experts(result.curve.figures.get("dead_experts", ())):
            _log.warning("segment %s: %s", chain.key, warning)
        divergence = result.divergence
        row = {
            **chain.row(),
            "trained_from": trained_from,
            "loss": result.loss,
            "source_losses": dict(result.source_losses),
            "averaged_loss": result.averaged_loss,
            "diverged_at_step": divergence.step if divergence else None,
            "diverged_because": divergence.reason if divergence else None,
            "seconds": result.seconds,
            "state": state,
            "environment": environment(self.trainer.device, world_size=self.ranks, compiled=result.compiled),
        }
        record_segment(self.ledger, chain.line, token, row)

    def _write_curve(self, chain: Chain, result: SegmentResult) -> None:
        trainer, numerics = self.trainer, chain.numerics
        peak = datasheet_flops(device_name(trainer.device), numerics.precision)
        attended = (
            attended_length(numerics.model, trainer.corpus, numerics.run_tokens or chain.last.end) if peak else None
        )
        curve = result.curve.table(
            bytes_per_token=trainer.corpus.bytes_per_token,
            train_flops_per_token=numerics.model.train_flops_within(attended),
            peak_flops=peak * self.ranks if peak else None,
        )
        path = self.directory / CURVES / f"{chain.key}.parquet"
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as unfinished:
            curve.to_parquet(unfinished, index=False, write_page_checksum=True)


def _is_averaged(chain: Chain) -> bool:
    """Whether averaged weights are evaluated at the end, as rungs on stems are ranked by them: if all of them are its own."""
    last = chain.last
    return not chain.anneals and Tail().begins(last.end, last.recipe.batch_tokens) >= last.start


def _latest_start(chain: Chain) -> int:
    """The tokens at which a training of the last segment may start at the latest: before what is averaged begins."""
    last = chain.last
    return Tail().begins(last.end, last.recipe.batch_tokens) if _is_averaged(chain) else last.end - 1
