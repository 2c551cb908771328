"""A trainer whose metric is no language model's loss: the squared error of a linear regression, in numpy alone.

python own_metric.py --config job.json --state folder [--describe]

The target is a sum of three parts: noise of variance E; what 2048 features explain, which SGD learns; and a part of which a model of N
parameters lacks A/N^alpha. Feature i has variance i^-1.2 and explains i^-1.5, a token is a sample, and the mean squared error under
one-pass SGD obeys a recursion (Bordelon and Pehlevan, arXiv 2106.02713), which is computed in place of sampling. So the law is
L = E + A/N^alpha + B/D^beta with alpha = .5 and, up to the annealed noise of the gradients, beta = .5/1.2.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

SPECTRUM, TARGET, E, A, ALPHA = 1.2, 1.5, 0.2, 6.0, 0.5

parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path)
parser.add_argument("--state", type=Path)
parser.add_argument("--describe", action="store_true")
arguments = parser.parse_args()
job = json.loads(arguments.config.read_text())
n_params = 32 * job["shape"]["width"] * job["shape"]["depth"]
if arguments.describe:
    print(json.dumps({"n_params": n_params, "flops_per_token": 6 * n_params}))
    sys.exit()

rate, batch = job["hyperparameters"]["learning_rate"], job["hyperparameters"]["batch_tokens"]
feature = np.arange(1, 2049)
variance = feature**-SPECTRUM
missing = A / n_params**ALPHA
saved, tokens = arguments.state / "saved.npz", job["tokens"]["from"]
if saved.exists() or tokens:
    with np.load(saved) as state:
        tokens, error = int(state["tokens"]), state["error"]
else:
    error = feature**-TARGET * np.random.default_rng(job["seed"]).uniform(0.8, 1.2, len(feature))
end = job["tokens"]["to"]
every = max(1, (end - tokens) // batch // 16) * batch  # tokens between rows
schedule = np.array(job["schedule"])
with (arguments.state / "rows.jsonl").open("a", buffering=1) as rows, np.errstate(over="ignore", invalid="ignore"):
    while tokens < end:
        step = rate * np.interp(tokens, schedule[:, 0], schedule[:, 1]) * variance
        noise = step**2 * (error.sum() + missing + E) / batch
        error = error * ((1 - step) ** 2 + step**2 / batch) + noise
        tokens += batch
        loss = float(error.sum() + missing + E)
        if tokens % every == 0 or tokens == end or not loss < 1e6:
            rows.write(json.dumps({"tokens": tokens, "loss": loss if loss < 1e6 else None}) + "\n")
            unfinished = saved.with_suffix(".new.npz")
            np.savez(unfinished, tokens=tokens, error=error)
            unfinished.replace(saved)
        if not math.isfinite(loss) or loss >= 1e6:
            break
