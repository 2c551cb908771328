"""Shows a running study in Weights & Biases, TensorBoard and MLflow: the same metrics under the same names in each.

`tracked` defines a tracked run, `sources` reads tracked runs from the study's ledger and files, `mirror` sends trackers what is
new, and each tracker has its own module. Processes that train run none of this.
"""
