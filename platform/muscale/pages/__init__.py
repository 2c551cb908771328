"""The report and the live page: sections of what the ledger knows, as one page."""
