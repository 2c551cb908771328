"""The Ray that the application's tests share."""

from tests.muscale.conftest import ray_cluster

__all__ = ["ray_cluster"]
