"""The full-size run: how it is laid out, trained, saved, recovered, continued, and what befell it."""
