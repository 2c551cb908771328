"""Checks whether this machine can run a study."""
