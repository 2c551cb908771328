"""Steps from a law to a decision: size, tokens, hyperparameters, forecast, cost, and the gate before the full run."""
