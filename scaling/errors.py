"""Errors of `scaling` for valid arguments without a usable answer."""


class ScalingError(Exception):
    """No usable answer exists for valid arguments, e.g. no budget reaches the requested loss.

    Bad arguments raise `ValueError`; answers that are usable but doubtful are returned, with a status that states why.
    """


class TooFewRunsError(ValueError):
    """Too few different runs in a table to fit the form, although each run is valid."""
