"""Which training states are kept, and what goes: results and curves stay for ever, states only where a training may go on.

Kept are the states of running trials, of the best of each rung, of the longest end of each ladder stem (a longer ladder
goes on from there), of whatever these started from, all that a worker holds a lease on and, while any does, of the last hour. A state
that is needed after all is trained again from the nearest one that is kept, and counted as such.
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
from muscale.store.lease import Standing, expired_leases, is_held, process_of
from muscale.store.ledger import Ledger
from muscale.store.tables import decisions, leases, retrained, rungs, runs, segments, trials
from scaling.presentation import Result

RECENT_SECONDS = 3600.0  # a state is there a moment before its row is, and before the branch that will start from it
_UNFINISHED = ".unfinished"
_KEYS_AT_ONCE = 500  # forgotten in one transaction


@dataclass(frozen=True, kw_only=True)
class Pruning(Result):
    """What a pruning keeps and what goes.

    Attributes:
        kept: Bytes of the states that stay, by reason.
        gone: Bytes of the files that go, or went, by reason.
        files: How many go, by the same reasons.
        dry_run: Whether nothing was removed.
        retrained: How often a pruned state had to be trained again, so far.
        retrained_tokens: Over how many tokens.
        retrained_seconds: For how long.
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
        """A row for each reason: what happens, why, bytes."""
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
            f"  trained again so far, as a state had been pruned: {self.retrained} times, "
            f"{self.retrained_tokens:,} tokens, {self.retrained_seconds:.0f} s"
        )
        return "\n".join(lines)


def prune(
    ledger: Ledger, *, top_k: int = 3, dry_run: bool = False, expired: Collection[Standing] | None = None
) -> Pruning:
    """Remove the states that no rule keeps, and files that no row knows.

    Args:
        ledger: Of the study.
        top_k: Trials of each rung whose states are kept.
        dry_run: Only tell what would go.
        expired: Leases whose owners are gone; by default they are looked for, which may take as long as a lease lasts.
    """
    if expired is None:
        expired = expired_leases(ledger)
    facts = ledger.read(_facts, top_k)
    folder = ledger.directory / STATES
    live = [lease for lease in facts["leases"] if is_held(lease, expired)]
    reasons = _reasons(facts, {lease["name"] for lease in live})
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
        for start in range(0, len(forgotten), _KEYS_AT_ONCE):  # first, so that no row ever promises a file that is gone
            ledger.forget_states(forgotten[start : start + _KEYS_AT_ONCE])
        for path in (path for paths in going.values() for path in paths):
            path.unlink(missing_ok=True)
    return pruning


def _reasons(facts: dict[str, Any], held: set[str]) -> dict[str, str]:
    """Why a state is kept, by the segment's key."""
    states = {row["key"]: row for row in facts["states"]}
    reasons: dict[str, str] = {}

    def keep(keys: Iterable[str], reason: str) -> None:
        for key in keys:
            reasons.setdefault(key, reason)

    running = {facts["parents"].get(key, {}).get("line") for key in facts["running"]}
    keep((row["key"] for row in states.values() if row["line"] in held), "held by a worker")
    since = (datetime.now(UTC) - timedelta(seconds=RECENT_SECONDS)).isoformat(timespec="microseconds")
    keep((row["key"] for row in states.values() if held and row["created_at"] > since), "recent, while workers train")
    keep((row["key"] for row in states.values() if row["line"] in running), "running trial")
    keep(facts["leaders"], "best of a rung")
    longest: dict[str, dict[str, Any]] = {}
    for row in states.values():
        if row["line"] in facts["ladder"] and row["tokens"] > longest.get(row["line"], {"tokens": -1})["tokens"]:
            longest[row["line"]] = row
    keep((row["key"] for row in longest.values()), "end of a ladder stem")
    for key in list(reasons):
        above = facts["parents"].get(key, {}).get("parent")
        while above:
            keep([above], "what a kept one started from")
            above = facts["parents"].get(above, {}).get("parent")
    return reasons


def _leftovers(states: Path, curves: Path, known: set[Path], held: set[int]) -> Iterator[tuple[str, Path]]:
    """Old files that no row knows: states without one, and what a dead process was writing."""
    for folder in (states, curves):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            unfinished = path.name.endswith(_UNFINISHED)
            if path in known or not path.is_file() or not (unfinished or (folder == states and path.suffix == ".pt")):
                continue
            try:
                old = time.time() - path.stat().st_mtime > RECENT_SECONDS
            except FileNotFoundError:  # finished meanwhile
                continue
            writer = path.name.removesuffix(_UNFINISHED).rpartition(".")[2]
            if old and not (unfinished and writer.isdigit() and int(writer) in held):
                yield ("unfinished file" if unfinished else "state without a row"), path


def _facts(connection: sa.Connection, top_k: int) -> dict[str, Any]:
    """What the rules look at, in one snapshot."""
    s, r = segments.c, rungs.c
    states = (
        connection.execute(sa.select(s.key, s.line, s.tokens, s.state, s.created_at).where(s.state.is_not(None)))
        .mappings()
        .all()
    )
    parents = connection.execute(sa.select(s.key, s.line, s.parent)).mappings().all()
    place = sa.func.row_number().over(partition_by=(r.sweep, r.rung), order_by=(r.loss, r.sequence)).label("place")
    ranked = sa.select(r.segment, place).where(r.loss.is_not(None)).subquery()
    leaders = connection.execute(sa.select(ranked.c.segment).where(ranked.c.place <= top_k)).scalars()
    ladder = connection.execute(sa.select(runs.c.stem).where(runs.c.purpose == "ladder").distinct()).scalars()
    taken = connection.execute(sa.select(leases).where(leases.c.owner.is_not(None))).mappings()
    again = sa.select(sa.func.count(), sa.func.sum(retrained.c.tokens), sa.func.sum(retrained.c.seconds))
    return {
        "states": [dict(row) for row in states],
        "parents": {row["key"]: {"line": row["line"], "parent": row["parent"]} for row in parents},
        "running": _running(connection),
        "leaders": list(leaders),
        "ladder": set(ladder),
        "leases": [dict(row) for row in taken],
        "retrained": tuple(connection.execute(again.select_from(retrained)).one()),
    }


def _running(connection: sa.Connection) -> list[str]:
    """Segments from which trials go on that have not arrived where they were sent: their own last one, or their donor's."""
    sent = {(row.sweep, row.number): row.until for row in connection.execute(sa.select(trials))}
    donors: dict[tuple[str, int, int], int] = {}
    for row in connection.execute(sa.select(decisions).order_by(decisions.c.sequence)):
        sent[row.sweep, row.trial] = row.until
        if row.donor is not None:
            donors[row.sweep, row.trial, row.rung] = row.donor
    arrived = {(row.sweep, row.trial, row.rung): row for row in connection.execute(sa.select(rungs))}
    last: dict[tuple[str, int], int] = {}
    for sweep, trial, rung in arrived:
        last[sweep, trial] = max(rung, last.get((sweep, trial), rung))
    going = [(sweep, trial, rung) for (sweep, trial), rung in last.items() if rung < sent[sweep, trial]]
    starts = [arrived[sweep, donors.get((sweep, trial, rung), trial), rung] for sweep, trial, rung in going]
    return [row.segment for row in starts if row.loss is not None]


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _size(n_bytes: int) -> str:
    """A number of bytes as people read it."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
