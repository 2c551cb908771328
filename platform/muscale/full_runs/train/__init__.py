"""One rank of a full run: its attempt, the Lightning module, sharding, evaluation, records of steps, spike interventions."""
