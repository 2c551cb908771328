"""The tables as they stand in the first ledgers that migrate; there is nothing to do."""

revision = "3"
down_revision = None


def upgrade() -> None:
    """Nothing: older ledgers are refused."""
