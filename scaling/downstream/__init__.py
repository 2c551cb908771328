"""Metrics of tasks, predicted from a loss."""
