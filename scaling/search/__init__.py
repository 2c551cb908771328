"""The loss over hyperparameters and scales at once: the knowledge of a search, and its next point."""
