"""Evaluation of a model's weights by a list of measures: held-out loss, tasks, samples, memorisation, quantisation, ablation."""
