"""What stays of a finished run: one directory that needs neither the study nor its ledger."""
