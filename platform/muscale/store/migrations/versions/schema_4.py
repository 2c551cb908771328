"""Indexes, so that no result, table or resumed search reads through rows that it does not want."""

from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """Make the indexes."""
    op.create_index("ix_rungs_sequence", "rungs", ["sweep", "sequence"])
    op.create_index("ix_decisions_sequence", "decisions", ["sweep", "sequence"])
    op.create_index("ix_runs_key", "runs", ["key"])
    op.create_index("ix_results_created_at", "results", ["stage", "created_at"])
