"""Promotion: dry run, smoke test, launch under Ray Train or other launchers, result against the forecast."""
