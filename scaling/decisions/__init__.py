"""What to train: size and tokens for a budget, the next runs of a ladder, a ladder tried before it is paid for."""
