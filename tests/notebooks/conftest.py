"""The studies that the application's tests write."""

from tests.muscale.conftest import make_study

__all__ = ["make_study"]
