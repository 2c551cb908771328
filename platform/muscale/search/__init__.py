"""The search: what a sweep suggests, which trials go on at a rung, and what Ray Tune runs of it.

A sweep is a record in the ledger: suggestions, results at rungs, decisions. A `Sampler` turns the record into the next
configuration, a `Scheduler` into the next move, and both are functions of the record (and of prior runs), so a
sweep that was interrupted goes on from its rows. Ray Tune runs the moves, a job at a time, on warm workers.
"""
