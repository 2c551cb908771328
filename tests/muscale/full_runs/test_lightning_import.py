"""Lightning can be imported with a CPU torch, whatever torchvision does."""

import subprocess
import sys

import pytest
import ray

CODE = "from muscale.full_runs.lightning_import import import_lightning; assert import_lightning() is import_lightning(); print('ok')"


def test_lightning_is_importable_in_a_fresh_process() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_lightning_is_importable_in_a_ray_worker() -> None:
    @ray.remote
    def version() -> str:
        from muscale.full_runs.lightning_import import import_lightning

        return str(import_lightning().__version__)

    assert ray.get(version.remote()).startswith("2.")
