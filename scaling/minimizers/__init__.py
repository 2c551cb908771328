"""The minima of a form's objective: many robust fits at once, from many starts, under many resamplings."""
