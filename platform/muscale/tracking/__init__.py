"""The study shown in Weights & Biases, TensorBoard and MLflow while it runs: the same metrics under the same names in each.

`tracked` says what a tracked run is, `sources` reads them off the study's ledger and files, `mirror` brings trackers up to
date with them, and each tracker is a module of its own. Nothing of it is in the processes that train.
"""
