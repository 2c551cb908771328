"""What is trained small beside the sweep: grids of the transfer check, the ladder, variants."""
