"""Promotion: dry run, smoke test, launch under Ray Train or other launchers, and the result compared with the forecast."""
