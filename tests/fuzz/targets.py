"""What is fuzzed, by name."""

from tests.fuzz.database_targets import ForeignLedger, ForeignRows, OptunaRows, OptunaStorage
from tests.fuzz.record_targets import (
    BundleManifest,
    CheckpointManifest,
    CheckpointRecord,
    CheckpointTable,
    LedgerPlace,
    RunRecord,
    TokenManifest,
)
from tests.fuzz.settings_targets import PlanFile, PreparedRun, SpaceTable, StageOfAStudy, StudyFile, WandbSweep
from tests.fuzz.table_targets import CsvLadder, ExternalLosses, JsonLadder, ParquetLadder
from tests.fuzz.target import Target

TARGETS: dict[str, type[Target]] = {
    "study": StudyFile,
    "stage": StageOfAStudy,
    "prepared": PreparedRun,
    "plan": PlanFile,
    "space": SpaceTable,
    "csv": CsvLadder,
    "jsonl": JsonLadder,
    "parquet": ParquetLadder,
    "tokens": TokenManifest,
    "record": CheckpointRecord,
    "checkpoint": CheckpointManifest,
    "table": CheckpointTable,
    "run": RunRecord,
    "place": LedgerPlace,
    "bundle": BundleManifest,
    "wandb": WandbSweep,
    "losses": ExternalLosses,
    "optuna": OptunaStorage,
    "optuna_rows": OptunaRows,
    "ledger": ForeignLedger,
    "ledger_rows": ForeignRows,
}
