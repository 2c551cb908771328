"""A program that promotes the study's registered plan past its gate, with a planted verdict in place of trained grids."""

import sys

from muscale import Study
from muscale.findings import Findings
from muscale.plans.planning import Plan
from scaling import Verdict

if __name__ == "__main__":
    study = Study.open(sys.argv[1], quiet=True)
    study._known = Findings(transfer=Verdict(transfers=(), n_tokens=1.0, horizons=(), missing={"rate": "planted"}))
    forecast = study.ledger.latest_forecast()
    assert forecast is not None
    study.promote(Plan.of_row(forecast), force=True)
