"""The decoder: its shape, its layers, the rules that carry tuned values to any size, its memory, text generation."""
