"""What `scaling` raises when the arguments are right and there is still no usable answer."""


class ScalingError(Exception):
    """No usable answer exists for valid arguments, e.g. no budget reaches the loss asked for.

    Bad arguments raise `ValueError`; answers that are usable but doubtful are returned, with a status that says why.
    """


class TooFewRunsError(ValueError):
    """The runs of a table are right, each by itself, and too few of them differ for the form to be fitted."""
