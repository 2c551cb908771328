"""The report and the live page, each with all sections on one page."""
