"""A training program as trainer: its input, its output, and its process."""
