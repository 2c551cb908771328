"""A finished run as one directory that is readable without the study or its ledger."""
