"""A full run beside its forecast: the band, alarms, outside runs, and how often forecasts held."""
