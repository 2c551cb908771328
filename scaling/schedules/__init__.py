"""The loss along a training, from its learning-rate schedule."""
