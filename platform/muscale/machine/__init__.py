"""Whether this machine can run a study."""
