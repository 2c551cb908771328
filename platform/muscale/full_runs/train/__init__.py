"""A rank of a full run: its attempt, the Lightning module, sharding, evaluation, records of steps, spike interventions."""

from proxy_models.importable import mend_torchvision

mend_torchvision()  # before any module here imports Lightning
