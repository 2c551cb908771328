"""What a study knows, and where that is kept: the ledger, its keys, its tables, who may write, what may go."""
