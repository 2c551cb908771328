"""Decisions about training: size and tokens for a budget, the next runs of a ladder, a simulated ladder."""
