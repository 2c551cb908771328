"""The ledger: databases, tables, keys, leases, retention, and read-only access to other ledgers."""
