"""Who trains: the runs that a stage wants, and the warm actors that reach their ends."""
