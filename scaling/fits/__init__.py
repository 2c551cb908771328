"""A law fitted to runs: tables, the fit, its intervals, forecasts and backtests."""
