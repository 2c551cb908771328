"""Small trainings beside the sweep: grids of the transfer check, the ladder, variants."""
