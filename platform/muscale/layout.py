"""Names of files and folders in a study's directory."""

from __future__ import annotations

STUDY_FILE = "study.toml"
LEDGER = "ledger.sqlite"
LEDGER_PLACE = "ledger.json"  # location of the ledger, if elsewhere
MEMBERS = "members.json"  # counted members of a custom model family
CORPUS = "corpus"  # token files and manifest
CLEANED = "cleaned"  # a folder of cleaned text for each setting of [corpus.clean]
CORPORA = "corpora"  # a folder for each corpus of a continuation or a variant
INITIAL_WEIGHTS = "initial_weights"  # the weights at which trainings start
STATES = "states"  # training states from which other runs start
EVALUATED = "evaluated"  # a folder for the weights of each evaluated point: answers of the model to each item of a task
CURVES = "curves"  # measurements of every step of a segment
PROGRAM_RUNS = "program_runs"  # a folder for each segment that a [trainer] program is training: job, state, output
STALLS = "stalls"  # stack traces of runs that were ended because they took no step
PLANS = "plans"  # a file for each plan
FULL_RUNS = "full_runs"  # a folder for each plan and each continuation: checkpoints and metrics
EXTERNAL_RUNS = "external_runs"  # a folder for each plan whose run is trained elsewhere: its losses
BUNDLES = "bundles"  # a folder for each bundle of a promoted plan
REPORT = "report.html"
GALLERY = "gallery.html"
TRACKING = "tracking"  # local files of trackers, and records of what each tracker received
SMOKE_TEST = "smoke_test"  # in a full run's folder
REPLAY = "replay"  # in a full run's folder, while its last steps are trained again
CONTROL = "control"  # in an amended run's folder: the parent's recipe, trained for comparison
PROFILE = "profile"  # in a full run's folder: traces of the steps of --profile
METRICS = "metrics.jsonl"  # in a full run's folder
EVALUATIONS = "evaluations.jsonl"  # in a full run's folder: evaluations of checkpoints next to the training
COLLECTIVES = "collectives"  # in a full run's folder: NCCL's records of each rank before a timeout
RUN = "run.json"  # in a full run's folder: description of the run behind its checkpoints
FAILURE = "failure.txt"  # reason why a full run ended, if another attempt would end the same way
RESULT = "result.json"  # in a full run's folder
