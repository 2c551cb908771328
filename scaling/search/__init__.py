"""The loss over hyperparameters and scales at once: what a search knows, and what it tries next."""
