"""Check for held-out text in the training text, which would flatter every loss."""
