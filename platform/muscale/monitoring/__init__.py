"""Compares full runs with their forecasts: the band, the monitor, runs trained elsewhere, calibration."""
