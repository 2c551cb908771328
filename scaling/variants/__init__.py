"""Variants of a recipe held against a baseline at a compute beyond their runs."""
