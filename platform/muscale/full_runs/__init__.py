"""The full-size run: promotion, training, checkpoints, records, continuation."""
