"""Indexes, so that a live page and a pruning ask for what is new, and for the states there are, without reading all segments."""

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Make the indexes."""
    has_state = sa.column("state").is_not(None)
    op.create_index("ix_segments_created_at", "segments", ["created_at"])
    op.create_index("ix_segments_state", "segments", ["state"], sqlite_where=has_state, postgresql_where=has_state)
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
