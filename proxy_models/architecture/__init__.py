"""The decoder: its shape, its layers, the rules that carry tuned values to any size, what it takes in memory, what it writes."""
