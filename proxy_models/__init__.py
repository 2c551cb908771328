"""The models that are searched, and how they train: shape, decoder, parametrization, optimizer, schedule, data, loop, check.

Import from the modules: `config`, `hyperparameters`, `schedule`, `batch_ramp`, `guard`, `memory`, `parametrization`, `numerics` and
all of the data but `batches` (`corpus`, `sources`, `tokenizer`, `mixture`) need no torch; the others do.
"""
