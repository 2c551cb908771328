"""A promotion: dry run, smoke test, workers under Ray Train or prepared for other launchers, result beside the forecast."""
