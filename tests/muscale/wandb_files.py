"""What wandb keeps of an offline run: records of its protocol in LevelDB's log format, after seven bytes of its own."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7


@dataclass
class OfflineRun:
    """Everything that one file holds."""

    key: str = ""
    name: str = ""
    group: str = ""
    kind: str = ""
    project: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    exit_code: int | None = None


def read_runs(folder: Path) -> list[OfflineRun]:
    """Every run below a study's directory, in order of time; one that was gone on with is there several times.

    wandb's own process writes them, and is waited for.
    """
    deadline = time.monotonic() + 30
    while True:
        files = sorted(folder.glob("tracking/wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.name)
        runs = [_read(file) for file in files]
        if all(run.exit_code is not None for run in runs):
            return runs
        assert time.monotonic() < deadline, "a run was not ended"
        time.sleep(0.1)


def _read(file: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made where it is imported

    run = OfflineRun()
    for content in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        match record.WhichOneof("record_type"):
            case "run":
                started = record.run
                run.key, run.name, run.group = started.run_id, started.display_name, started.run_group
                run.kind, run.project = started.job_type, started.project
                run.config |= {item.key: json.loads(item.value_json) for item in started.config.update}
            case "history":
                items = record.history.item
                row = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in items}
                run.rows.append({name: value for name, value in row.items() if not name.startswith("_")})
            case "summary":
                for item in record.summary.update:
                    run.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            case "artifact":
                run.artifacts += [entry.path for entry in record.artifact.manifest.contents]
            case "exit":
                run.exit_code = record.exit.exit_code
    return run


def _records(data: bytes) -> list[bytes]:
    assert data[:4] in (b"", b":W&B")
    found, part, at = [], b"", _HEADER
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if at + _HEADER + length > len(data):  # it is being written
            break
        part += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or its last part
            found.append(part)
            part = b""
    return found
