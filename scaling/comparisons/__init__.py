"""Comparisons of runs in view of the noise of their seeds."""
