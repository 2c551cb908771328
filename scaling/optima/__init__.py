"""Best values of the learning rate and other hyperparameters, and their drift with size and tokens."""
