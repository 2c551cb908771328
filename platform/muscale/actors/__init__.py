"""Training by actors: the runs that a stage wants, and the pool of warm workers that train them."""
