"""Checkpoints of a full run: save, find, load at any world size, evaluate."""
