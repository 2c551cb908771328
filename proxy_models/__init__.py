"""The models that are searched, and how they train: shape, decoder, parametrization, optimizer, schedule, data, loop, check.

Import from the modules: `config`, `hyperparameters`, `schedule`, `parametrization`, `numerics` and all of the data but
`batches` (`corpus`, `sources`, `tokenizer`, `mixture`) need no torch; `decoder`,
`optimizer`, `batches`, `training`, `base_shapes` and `coordinate_check` do.
"""
