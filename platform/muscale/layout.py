"""Names of files and folders in a study's directory."""

from __future__ import annotations

STUDY_FILE = "study.toml"
LEDGER = "ledger.sqlite"
LEDGER_PLACE = "ledger.json"  # where the ledger lies, if elsewhere
MEMBERS = "members.json"  # of a model family of one's own: those that were counted
CORPUS = "corpus"  # token files and manifest
CORPORA = "corpora"  # a folder for each corpus of a continuation or a variant
STATES = "states"  # training states that others start from
CURVES = "curves"  # what was measured at every step of a segment
PROGRAM_RUNS = "program_runs"  # a folder for each segment that a [trainer] program has at work: job, state, output
STALLS = "stalls"  # what trainings were doing that were ended as they took no step
PLANS = "plans"  # a file for each plan
FULL_RUNS = "full_runs"  # a folder for each plan and each continuation: checkpoints and metrics
EXTERNAL_RUNS = "external_runs"  # a folder for each plan whose run is trained elsewhere: its losses
BUNDLES = "bundles"  # a folder for each plan that was promoted and preserved
REPORT = "report.html"
TRACKING = "tracking"  # what trackers keep here, and what each of them was given
SMOKE_TEST = "smoke_test"  # of a full run, in its folder
PROFILE = "profile"  # of a full run, in its folder: traces of the steps of --profile
METRICS = "metrics.jsonl"  # of a full run, in its folder
EVALUATIONS = "evaluations.jsonl"  # of a full run's checkpoints beside its training, in its folder
COLLECTIVES = "collectives"  # of a full run, in its folder: what NCCL recorded of each rank before a timeout
RUN = "run.json"  # of a full run, in its folder: what its checkpoints are of
FAILURE = "failure.txt"  # why a full run ended that another attempt would end in again
RESULT = "result.json"  # of a full run, in its folder
