"""Cleaning of text before it is tokenized: duplicates, boilerplate, heuristics, languages, quality; each step is counted."""
