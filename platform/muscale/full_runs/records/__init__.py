"""Records of a run: metrics, attempts, incidents, alarms, goodput."""
