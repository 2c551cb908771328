"""From text to batches: sources, tokenizers, token files, mixtures, and what a step sees."""
