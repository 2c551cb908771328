"""Training on from a checkpoint, on other data or another schedule."""
