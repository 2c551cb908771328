"""Full runs against their forecasts: the band, the monitor, runs trained elsewhere, calibration."""
