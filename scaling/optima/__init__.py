"""Best values of the learning rate and other hyperparameters, and how they move with size and tokens."""
