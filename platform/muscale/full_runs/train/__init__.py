"""One rank of a full run: the Lightning module, sharding, spike interventions."""
