"""Recipes of runs: hyperparameters, schedules, and the segments that a run is trained in."""
