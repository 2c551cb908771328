"""Metrics of tasks, by way of a loss."""
