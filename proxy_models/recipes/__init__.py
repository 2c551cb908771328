"""How a run is trained: hyperparameters, schedules, and the segments that they come to."""
