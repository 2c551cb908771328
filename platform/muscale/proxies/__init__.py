"""Small training runs next to the sweep: grids of the transfer check, the ladder, variants."""
