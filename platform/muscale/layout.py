"""Where things lie in a study's directory."""

from __future__ import annotations

STUDY_FILE = "study.toml"
LEDGER = "ledger.sqlite"
CORPUS = "corpus"  # token files and manifest
STATES = "states"  # training states that others start from
CURVES = "curves"  # training loss of every segment
FULL_RUNS = "full_runs"  # a folder for each plan: checkpoints and metrics
REPORT = "report.html"
METRICS = "metrics.jsonl"  # of a full run, in its folder
RESULT = "result.json"  # of a full run, in its folder
