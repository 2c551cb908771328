"""The studies and servers of the application's tests."""

from tests.muscale.conftest import make_study, postgres, postgres_server

__all__ = ["make_study", "postgres", "postgres_server"]
