"""Data from text to batches: sources, tokenizers, token files, mixtures, and the batch of each step."""
