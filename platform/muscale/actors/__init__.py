"""Proxy trainings as Ray Tune trials: what a stage or a sweep wants trained, the adapter to Tune, and the workers."""
