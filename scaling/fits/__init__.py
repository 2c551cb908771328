"""A law fitted to runs: what goes in, the fit, how sure it is, what it forecasts, and how well it would have."""
