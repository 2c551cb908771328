"""Variants of a recipe compared with a baseline at a compute beyond their runs."""
