"""Checkpoints of a full run: saved, found, loaded on any number of ranks, evaluated."""
