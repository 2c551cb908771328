"""Records a line each: what a kill tore is none, and of a long file only the end is read for the last one."""

from __future__ import annotations

from pathlib import Path

from muscale import json_lines


def test_the_last_record_is_found_from_the_end_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert json_lines.last(file) is None
    file.write_text("")
    assert json_lines.last(file) is None
    json_lines.append(file, *({"step": step, "metrics": {"loss": 2.5}} for step in range(5000)))
    assert json_lines.last(file) == {"step": 4999, "metrics": {"loss": 2.5}}
    with file.open("a") as torn:
        torn.write('{"step": 5000, "to')
    assert json_lines.last(file) == {"step": 4999, "metrics": {"loss": 2.5}}
