"""Runs held against each other beside the noise of their seeds."""
