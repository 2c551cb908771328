"""Continuations: training from a checkpoint of a full run, on other data or another schedule."""
