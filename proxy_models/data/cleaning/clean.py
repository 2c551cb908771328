"""Cleaning of sources into a folder of JSON Lines: each step removes documents or lines, and is counted, with examples.

    folder/cleaning.json        manifest, written last
    folder/NAME/00000.jsonl     documents that are left, with the file, line and split from which they came
    folder/.work                files of steps while cleaning is unfinished; the same call continues from them

A document keeps its split. Where duplicates lie on both sides, the held-out copy is kept and training copies are removed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from proxy_models.data.cleaning.cleaned import COUNTS, FORMAT, Cleaned, share_removed
from proxy_models.data.cleaning.cleaning_step import CleaningStep, Judge, require_library
from proxy_models.data.cleaning.shard_passes import Map, ShardPasses
from proxy_models.data.cleaning.text_shards import Shard, documents, shards_of, write, write_all
from proxy_models.data.corpus import NAME, NAMED
from proxy_models.data.sources import CLEANING, CorpusError, Source, SourceFile
from proxy_models.data.token_files import OnProgress, replace
from proxy_models.files import LOCK, atomic_write, folder_lock

MOST_REMOVED = 0.5
MOST_EXAMPLES = 5  # of a step, for each source
_WORK = ".work"
_REQUEST = "request.json"
_READ = "read"
_CLIPPED = 300  # characters of an example
_Counts = dict[str, dict[str, Any]]  # what a step removed, by source


class RemovesTooMuchError(CorpusError):
    """A step would remove a larger share of a source than allowed; the next call continues with this step."""


def clean(
    sources: Mapping[str, Source],
    folder: Path,
    steps: Sequence[CleaningStep],
    *,
    validation_fraction: float,
    most_removed: float = MOST_REMOVED,
    confirm: Callable[[str], bool] = lambda question: False,
    on_progress: OnProgress | None = None,
    parallel_map: Map = map,
) -> Cleaned:
    """Write the cleaned text of sources into `folder`, or open it if it is finished; an interrupted call continues.

    Args:
        steps: Steps in the order in which they run.
        validation_fraction: Share of documents that is held out; determines the splits.
        most_removed: Largest share of a source's bytes that a step may remove without confirmation.
        confirm: Asked with a question if a step would remove more; True continues.
        on_progress: Called with the bytes done and all bytes, over all passes.
        parallel_map: `map`, or a function like it that calls in parallel and keeps the order.

    Raises:
        RemovesTooMuchError: If a step would remove more of a source than `most_removed`, and this is not confirmed.
        CorpusError: If a source can't be read, the folder holds the text of other sources or of other steps, or a step's library
            is missing.
    """
    if not steps:
        raise ValueError("cleaning needs at least one step, got none")
    for name, source in sources.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"{NAMED}, got {name!r}")
        if source.kind == "tokens":
            raise CorpusError(f"{source}: tokens can't be cleaned; give text")
    sources = dict(sorted(sources.items()))
    with folder_lock(folder):
        finished = (folder / CLEANING).exists()
        place = folder / CLEANING if finished else folder / _WORK / _REQUEST
        known = _read(place) if place.exists() else {"sources": {}}
        listed = {name: [SourceFile(**file) for file in source["files"]] for name, source in known["sources"].items()}
        prints = {name: source.fingerprint(listed.get(name, ())) for name, source in sources.items()}
        request = {
            "format": FORMAT,
            "validation_fraction": validation_fraction,
            "steps": [{"step": step.name, **step.identity()} for step in steps],
            "sources": {
                name: {"source": source.to_dict(), "files": [asdict(file) for file in prints[name]]}
                for name, source in sources.items()
            },
        }
        request = json.loads(json.dumps(request))  # as it is read again
        if place.exists():
            _require_same(known, request, folder)
        elif there := sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, _WORK)):
            raise CorpusError(f"{folder}: must be new or hold cleaned text, found {there[0]}; choose another folder")
        if finished:
            shutil.rmtree(folder / _WORK, ignore_errors=True)
            return Cleaned.open(folder)
        for step in steps:
            require_library(step.name)
        (folder / _WORK).mkdir(exist_ok=True)
        replace(folder / _WORK / _REQUEST, json.dumps(request, indent=1).encode())
        n_bytes = sum(file.bytes for files in prints.values() for file in files)
        passes = ShardPasses(parallel_map, on_progress, n_bytes, 1 + sum(step.passes for step in steps))
        run = _Run(folder=folder, passes=passes, most_removed=most_removed, confirm=confirm)
        run.read(sources, prints, validation_fraction)
        return run.finish(request, *run.steps(steps))


@dataclass(frozen=True, kw_only=True)
class _Run:
    folder: Path
    passes: ShardPasses
    most_removed: float
    confirm: Callable[[str], bool]

    @property
    def work(self) -> Path:
        return self.folder / _WORK

    def read(
        self, sources: Mapping[str, Source], prints: Mapping[str, Sequence[SourceFile]], validation_fraction: float
    ) -> None:
        """Write the documents of every source in shards; those that an earlier call wrote are skipped."""
        place, finished = self.work / _READ, self.work / "read.json"
        total = sum(file.bytes for files in prints.values() for file in files)
        done = 0
        for name, source in sources.items() if not finished.exists() else ():
            (place / name).mkdir(parents=True, exist_ok=True)
            there = sorted((place / name).glob("*.json"))
            stream = documents(source, validation_fraction)
            stream = islice(stream, sum(_read(file)["documents_left"] for file in there), None)
            sizes = accumulate((file.bytes for file in prints[name]), initial=done)
            before = dict(zip((file.path for file in prints[name]), sizes, strict=False))
            for number, shard in enumerate(shards_of(stream), len(there)):
                write_all((document for document, _ in shard), place / name / f"{number:05}.jsonl")
                n_bytes = sum(document.n_bytes for document, _ in shard)
                counts = {"documents_left": len(shard), "bytes_left": n_bytes}
                replace(place / name / f"{number:05}.json", json.dumps(counts).encode())
                _, (file, of_file) = shard[-1]
                self.passes.report((before[file] + of_file) / max(1, total))
            if source.fingerprint(prints[name]) != list(prints[name]):
                shutil.rmtree(self.work)
                raise CorpusError(f"{source}: changed while it was read; clean it again")
            done += sum(file.bytes for file in prints[name])
        replace(finished, b"{}")
        self.passes.n_done += 1

    def steps(self, steps: Sequence[CleaningStep]) -> tuple[Path, list[_Counts]]:
        """Run every step that is not finished; return the folder of the last one, and the counts of all."""
        place, counts = self.work / _READ, []
        for number, step in enumerate(steps, 1):
            before, place, record = place, self.work / f"step{number}", self.work / f"step{number}.json"
            done = self.passes.n_done
            if not record.exists():
                replace(record, json.dumps(self._step(step, _shards(before), place)).encode())
            self.passes.n_done = done + step.passes
            shutil.rmtree(before, ignore_errors=True)
            counts.append(_read(record))
        return place, counts

    def _step(self, step: CleaningStep, shards: Sequence[Shard], place: Path) -> _Counts:
        learned = self.work / "learned"
        judge, facts = step.learn(shards, partial(self.passes.over, shards, learned, ".npz"))
        files = self.passes.over(shards, place, ".json", partial(_judge_shard, judge))
        found: _Counts = {}
        for shard, file in zip(shards, files, strict=True):
            counts = _read(file)
            row = found.setdefault(
                shard.source, {"step": step.name, **facts, **dict.fromkeys(COUNTS, 0), "examples": []}
            )
            for name in COUNTS:
                row[name] += counts[name]
            row["examples"] += counts["examples"][: MOST_EXAMPLES - len(row["examples"])]
        for source, row in found.items():
            for example in row["examples"]:
                twin = example.pop("twin")
                example["kept"] = _place_of(twin, shards) if twin >= 0 else ""
            if (share := share_removed(row)) > self.most_removed:
                question = (
                    f"{step.name}: removes {share:.1%} of the bytes of {source}, as {_described(row['examples'])}"
                )
                if not self.confirm(question):
                    raise RemovesTooMuchError(
                        f"{question}; at most {self.most_removed:.1%} is allowed: set most_removed to "
                        f"{math.ceil(100 * share) / 100:g} to continue, or change the step"
                    )
        shutil.rmtree(learned, ignore_errors=True)
        return found

    def finish(self, request: dict[str, Any], place: Path, counts: Sequence[_Counts]) -> Cleaned:
        """Move the files of the last step to their place, and write the manifest."""
        for file in sorted(place.glob("*/*.jsonl")):
            target = self.folder / file.parent.name / file.name
            target.parent.mkdir(exist_ok=True)
            if file.stat().st_size:
                file.replace(target)
        removed = {name: [step[name] for step in counts if name in step] for name in request["sources"]}
        replace(self.folder / CLEANING, json.dumps({**request, "removed": removed}, indent=1).encode())
        shutil.rmtree(self.work)
        return Cleaned.open(self.folder)


def _judge_shard(judge: Judge, shard: Shard, target: Path) -> None:
    """Write what a step leaves of a shard, and its counts."""
    counts: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "examples": []}
    with (
        atomic_write(target.with_name(f"{shard.path.stem}.jsonl")) as unfinished,
        unfinished.open("wb") as output,
    ):
        for document, verdict in judge(shard):
            counts["documents"] += 1
            counts["bytes"] += document.n_bytes
            if verdict.text:
                left = document if verdict.text is document.text else dataclasses.replace(document, text=verdict.text)
                write(left, output)
                counts["documents_left"] += 1
                counts["bytes_left"] += left.n_bytes
            if verdict.reason and len(counts["examples"]) < MOST_EXAMPLES:
                text = (verdict.removed or document.text)[:_CLIPPED]
                where = {"file": document.file, "line": document.line}
                counts["examples"].append({**where, "reason": verdict.reason, "twin": verdict.twin, "text": text})
    target.write_text(json.dumps(counts))


def _shards(place: Path) -> list[Shard]:
    """Return the shards that a step left, in order of source and number."""
    shards: list[Shard] = []
    first = 0
    for file in sorted(place.glob("*/*.json")):
        counts = _read(file)
        n_documents = counts["documents_left"]
        path, n_bytes = file.with_suffix(".jsonl"), counts["bytes_left"]
        shards.append(Shard(path=path, source=file.parent.name, first=first, n_documents=n_documents, n_bytes=n_bytes))
        first += n_documents
    return shards


def _place_of(number: int, shards: Sequence[Shard]) -> str:
    """Return the source, file and line of a document."""
    shard = shards[bisect_right([shard.first for shard in shards], number) - 1]
    document = shard.document(number)
    return f"{shard.source}, {document.file}:{document.line}"


def _described(examples: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{e['file']}:{e['line']} ({e['reason']}) {e['text'][:60]!r}" for e in examples[:3])


def _require_same(known: Mapping[str, Any], request: Mapping[str, Any], folder: Path) -> None:
    """Refuse a folder that holds the text of other sources, or of other steps.

    Raises:
        CorpusError: Naming the first difference.
    """
    before, now = ({**found, "sources": None} for found in (known, request))
    differing = [key for key in request if before.get(key) != now[key]]
    for name in sorted({*known["sources"], *request["sources"]}):
        old, new = (_content(found["sources"].get(name)) for found in (known, request))
        differing += sorted({*dict(old - new), *dict(new - old)})
    if differing:
        raise CorpusError(
            f"{folder}: holds cleaned text of other sources or settings: {len(differing)} differ, the first is {differing[0]}; "
            "choose another folder or remove this one"
        )


def _content(source: Mapping[str, Any] | None) -> set[tuple[str, str]]:
    """Return what identifies a source, whose path is not part of it."""
    if source is None:
        return set()
    fields = {(key, str(value)) for key, value in source["source"].items() if key != "path"}
    return fields | {(file["path"], file["sha256"]) for file in source["files"]}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: can't be read ({error}); remove {path.parent} to clean again") from error
