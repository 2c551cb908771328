"""A program that promotes the study's registered plan past its gate, with a planted sweep and verdict before it."""

import sys
import tempfile
from pathlib import Path

from muscale import Study
from muscale.findings import Findings
from muscale.plans.plan import Plan
from muscale.store.ledger import Ledger
from scaling import Verdict
from tests.muscale.search.conftest import MicroPlanted, planted_result

if __name__ == "__main__":
    study = Study.open(sys.argv[1], quiet=True)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        sweep = planted_result(ledger, study.config, "planted", losses=MicroPlanted())
        ledger.close()
    unknown = Verdict(transfers=(), n_tokens=1.0, horizons=(), missing={"horizon law": "planted"})
    study._stages.known = Findings(sweep=sweep, transfer=unknown)
    forecast = study.ledger.latest_forecast()
    assert forecast is not None
    study.promote(Plan.of_row(forecast), force=True)
