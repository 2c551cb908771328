"""Where the best learning rate lies, or another hyperparameter's best value, and how it moves with size and tokens."""
