"""Proxy trainings as Ray Tune trials: the work of a stage or a sweep, the adapter to Tune, and the workers."""
