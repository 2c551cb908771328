"""The models that are searched, and how they train: shape, decoder, parametrization, optimizer, schedule, data, loop, check.

Import from the modules: `config`, `hyperparameters`, `schedule`, `batch_ramp`, `guard`, `parametrization`, `numerics` and `corpus`
need no torch; the others do.
"""
