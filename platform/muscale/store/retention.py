"""Retention of training states: results and curves are kept forever, states only where training may continue.

Always kept are the states of running trials, of the best trials of each rung, of the longest end of each ladder stem (a longer
ladder continues from there), of all ancestors of these, and all states under a worker's lease. While anybody holds a lease, more
states are kept: every rung of a running sweep, since its trials may advance, be copied or be annealed from there; the longest end
of each other stem, since other runs may branch from it; and states of the last hour. If a removed state is needed after all,
training is repeated from the nearest kept state, and the repetition is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import sqlalchemy as sa

from muscale.layout import CURVES, STATES
from muscale.store.lease import Standing, expired_leases, is_held, process_of, sweep_lease, taken_leases
from muscale.store.ledger import Ledger
from muscale.store.ledger_tables import decisions, retrained, rungs, runs, segments, trials
from muscale.store.statements import KEYS_AT_ONCE, by_key
from scaling.presentation import Result

RECENT_SECONDS = 3600.0  # a state is written shortly before its row, and before the branch that will start from it
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, kw_only=True)
class Pruning(Result):
    """The states that pruning keeps and removes.

    Attributes:
        kept: Bytes of the kept states, by reason.
        gone: Bytes of the removed files, or of those that would be removed, by reason.
        files: Number of these files, by the same reasons.
        retrained: Number of times that a pruned state was trained again so far.
        retrained_tokens: Tokens of these repetitions.
        retrained_seconds: Seconds of these repetitions.
    """

    kept: dict[str, int]
    gone: dict[str, int]
    files: dict[str, int]
    dry_run: bool
    retrained: int
    retrained_tokens: int
    retrained_seconds: float

    @property
    def table(self) -> pd.DataFrame:
        """One row per reason: what happens, why, bytes."""
        rows = [("stays", reason, size) for reason, size in self.kept.items()]
        rows += [("goes", reason, size) for reason, size in self.gone.items()]
        return pd.DataFrame(rows, columns=["what", "reason", "bytes"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(self.__dict__)

    def __str__(self) -> str:
        verb = "would free" if self.dry_run else "freed"
        lines = [f"gc: {verb} {_size(sum(self.gone.values()))} in {sum(self.files.values())} files"]
        lines += [f"  {_size(size)}  {reason} ({self.files[reason]})" for reason, size in self.gone.items()]
        lines += [f"  {_size(size)} kept: {reason}" for reason, size in self.kept.items()]
        lines.append(
            f"  trained again so far because a state had been pruned: {self.retrained} times, "
            f"{self.retrained_tokens:,} tokens, {self.retrained_seconds:.0f} s"
        )
        return "\n".join(lines)


def prune(
    ledger: Ledger,
    *,
    top_k: int = 3,
    dry_run: bool = False,
    expired: Collection[Standing] | None = None,
    finished: str = "",
) -> Pruning:
    """Remove the states that no rule keeps, and files without a row.

    Args:
        top_k: Number of trials of each rung whose states are kept.
        expired: Leases whose owners are gone; by default they are determined, which may take as long as a lease lasts.
        finished: Sweep whose driver calls this at its end: it still holds the lease, but needs no states any more.
    """
    if expired is None:
        expired = expired_leases(ledger)
    facts = ledger.read(_facts, top_k)
    folder = ledger.directory / STATES
    live = [lease for lease in facts["leases"] if is_held(lease, expired)]
    reasons = _reasons(facts, {lease["name"] for lease in live}, finished)
    kept: Counter[str] = Counter()
    going: dict[str, list[Path]] = {}
    forgotten = []
    known = set()
    for row in facts["states"]:
        path = ledger.directory / row["state"]
        known.add(path)
        if reason := reasons.get(row["key"]):
            kept[reason] += _bytes(path)
        else:
            forgotten.append(row["key"])
            going.setdefault("state that no rule keeps", []).append(path)
    held = {process_of(lease["owner"]) for lease in live}
    for reason, path in _leftovers(folder, ledger.directory / CURVES, known, held):
        going.setdefault(reason, []).append(path)
    pruning = Pruning(
        kept=dict(kept),
        gone={reason: sum(map(_bytes, paths)) for reason, paths in going.items()},
        files={reason: len(paths) for reason, paths in going.items()},
        dry_run=dry_run,
        retrained=facts["retrained"][0],
        retrained_tokens=int(facts["retrained"][1] or 0),
        retrained_seconds=float(facts["retrained"][2] or 0.0),
    )
    if not dry_run:
        for start in range(0, len(forgotten), KEYS_AT_ONCE):  # rows first, so that no row ever refers to a removed file
            ledger.forget_states(forgotten[start : start + KEYS_AT_ONCE])
        for path in (path for paths in going.values() for path in paths):
            path.unlink(missing_ok=True)
    return pruning


def _reasons(facts: dict[str, Any], held: set[str], finished: str) -> dict[str, str]:
    """The reason why each state is kept, by the segment's key."""
    states = {row["key"]: row for row in facts["states"]}
    reasons: dict[str, str] = {}

    def keep(keys: Iterable[str], reason: str) -> None:
        for key in keys:
            reasons.setdefault(key, reason)

    keep((row["key"] for row in states.values() if row["line"] in held), "held by a worker")
    since = (datetime.now(UTC) - timedelta(seconds=RECENT_SECONDS)).isoformat(timespec="microseconds")
    keep((row["key"] for row in states.values() if held and row["created_at"] > since), "recent, while workers train")
    keep((row["key"] for row in states.values() if row["line"] in facts["running"]), "running trial")
    keep(facts["best"], "best of a rung")
    busy = held - {sweep_lease(finished)}
    searched: set[str] = set()
    for sweep, keys in facts["rungs"].items():
        searched |= keys
        if sweep_lease(sweep) in busy:
            keep(keys, "sweep that runs")
    longest: dict[str, dict[str, Any]] = {}
    for row in states.values():
        if row["tokens"] > longest.get(row["line"], {"tokens": -1})["tokens"]:
            longest[row["line"]] = row
    keep((row["key"] for row in longest.values() if row["line"] in facts["ladder"]), "end of a ladder stem")
    if busy:
        ends = {row["key"] for row in longest.values()}
        keep(ends - searched, "end of a stem, while workers train")
    for key in list(reasons):
        above = facts["parents"].get(key)
        while above:
            keep([above], "parent of a kept state")
            above = facts["parents"].get(above)
    return reasons


def _leftovers(states: Path, curves: Path, known: set[Path], held: set[int]) -> Iterator[tuple[str, Path]]:
    """Old files without a row: states, and unfinished files of dead processes."""
    for folder in (states, curves):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            unfinished = path.name.endswith(_UNFINISHED)
            if path in known or not path.is_file() or not (unfinished or (folder == states and path.suffix == ".pt")):
                continue
            try:
                old = time.time() - path.stat().st_mtime > RECENT_SECONDS
            except FileNotFoundError:  # it was finished meanwhile
                continue
            writer = path.name.removesuffix(_UNFINISHED).rpartition(".")[2]
            if old and not (unfinished and writer.isdigit() and int(writer) in held):
                yield ("unfinished file" if unfinished else "state without a row"), path


def _facts(connection: sa.Connection, top_k: int) -> dict[str, Any]:
    """Rows that the rules need, on one snapshot; only segments that have a state, and their ancestors."""
    s, r = segments.c, rungs.c
    query = sa.select(s.key, s.line, s.tokens, s.state, s.created_at).where(s.state.is_not(None))
    states = [dict(row) for row in connection.execute(query).mappings()]
    place = sa.func.row_number().over(partition_by=(r.sweep, r.rung), order_by=(r.loss, r.sequence)).label("place")
    ranked = sa.select(r.segment, place).where(r.loss.is_not(None)).subquery()
    best = [*connection.execute(sa.select(ranked.c.segment).where(ranked.c.place <= top_k)).scalars()]
    ladder = connection.execute(sa.select(runs.c.stem).where(runs.c.purpose == "ladder").distinct()).scalars()
    again = sa.select(sa.func.count(), sa.func.sum(retrained.c.tokens), sa.func.sum(retrained.c.seconds))
    return {
        "states": states,
        "parents": _parents(connection, [*(row["key"] for row in states), *best]),
        "running": {row.line for row in by_key(connection, sa.select(s.line), s.key, _running(connection))},
        "best": best,
        "rungs": _rungs(connection),
        "ladder": set(ladder),
        "leases": taken_leases(connection),
        "retrained": tuple(connection.execute(again.select_from(retrained)).one()),
    }


def _rungs(connection: sa.Connection) -> dict[str, set[str]]:
    """Segments with a state at which trials of each sweep reached a rung."""
    query = sa.select(rungs.c.sweep, rungs.c.segment).join(segments, segments.c.key == rungs.c.segment)
    found: dict[str, set[str]] = {}
    for sweep, key in connection.execute(query.where(segments.c.state.is_not(None))):
        found.setdefault(sweep, set()).add(key)
    return found


def _parents(connection: sa.Connection, keys: Iterable[str]) -> dict[str, str | None]:
    """The parents of these segments and of all their ancestors."""
    query = sa.select(segments.c.key, segments.c.parent)
    found: dict[str, str | None] = {}
    wanted = [*dict.fromkeys(keys)]
    while wanted:
        new = {row.key: row.parent for row in by_key(connection, query, segments.c.key, wanted)}
        found |= new
        wanted = [parent for parent in dict.fromkeys(new.values()) if parent and parent not in found]
    return found


def _running(connection: sa.Connection) -> list[str]:
    """Segments from which trials continue that have not reached their target rung: their last segment, or their donor's."""
    r, d = rungs.c, decisions.c
    last = sa.select(r.sweep, r.trial, sa.func.max(r.rung).label("rung")).group_by(r.sweep, r.trial).subquery()
    sent = sa.select(d.sweep, d.trial, sa.func.max(d.until).label("until")).group_by(d.sweep, d.trial).subquery()
    own = (trials.c.sweep == last.c.sweep) & (trials.c.number == last.c.trial)
    decided = (sent.c.sweep == last.c.sweep) & (sent.c.trial == last.c.trial)
    going = (
        sa.select(last)
        .join(trials, own)
        .outerjoin(sent, decided)
        .where(last.c.rung < sa.func.coalesce(sent.c.until, trials.c.until))
    )
    found: list[str] = []
    for sweep, trial, rung in connection.execute(going).all():
        copied = sa.select(d.donor).where(d.sweep == sweep, d.trial == trial, d.rung == rung)
        donor = connection.execute(copied).scalar()
        here = (r.sweep == sweep) & (r.trial == (trial if donor is None else donor)) & (r.rung == rung)
        found += connection.execute(sa.select(r.segment).where(here, r.loss.is_not(None))).scalars()
    return found


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _size(n_bytes: int) -> str:
    """Format a number of bytes."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
