"""A training program of plain Python, with a fault where one is named: the loss of width * depth numbers pulled to noisy targets.

`python training_program.py FAULT CONFIG STATE [--describe]`
"""

import itertools
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path

fault, config, state = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
width, depth, seed = config["shape"]["width"], config["shape"]["depth"], config["seed"]
batch = config["hyperparameters"]["batch_tokens"]
schedule: list[tuple[int, float]] = config["schedule"]
start, end = config["tokens"]["from"], config["tokens"]["to"]
if fault == "one depth":
    depth = 2
shapes = {f"layer.{n}": [width] for n in range(depth)}
if "--describe" in sys.argv:
    n_params = width * depth + (fault == "miscounts")
    if fault == "chatter":
        sys.exit("no describe here")
    described = {"n_params": n_params, "flops_per_token": 6 * n_params, "tensors": shapes}
    if fault == "counts anew":
        described["flops_per_token"] = time.time()
    classes = {} if fault == "names no readout" else {"layer.0": "readout"}
    sys.stdout.write(json.dumps({**described, "classes": classes}))
    if fault == "speaks after":
        sys.stdout.write("\n{}\nbye\n")
    if fault == "warns":
        sys.stdout.flush()
        sys.stderr.write("a warning at exit")
    sys.exit()


def factor(tokens: int) -> float:
    """Factor of the learning rates: linear between the points."""
    if fault == "own schedule":
        return float(1 - tokens / end)
    for (left, low), (right, high) in itertools.pairwise(schedule):
        if tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    return schedule[-1][1]


def save() -> None:
    """Replace the saved state."""
    if fault != "saves nothing":
        (state / "new").write_text(json.dumps([tokens, weights]))
        (state / "new").replace(state / "saved.json")


if fault == "ignores seed":
    seed = 0
if fault == "random":
    seed = time.time_ns()
tokens, weights = 0, {name: [random.Random(f"{seed}{name}").gauss(0, 1)] * width for name in shapes}
if (state / "saved.json").exists():
    tokens, weights = json.loads((state / "saved.json").read_text())
elif start and fault != "saves nothing":
    sys.exit("no state to begin from")
if fault == "hangs":
    children = [subprocess.Popen(["sleep", "60"], start_new_session=elsewhere) for elsewhere in (False, True)]
    (state / "children").write_text(json.dumps([child.pid for child in children]))
    time.sleep(60)
with (state / "rows.jsonl").open("a") as rows:
    while tokens < end and fault != "silent":
        noise = random.Random(f"{seed} {tokens}")
        loss = 0.0
        for name, values in weights.items():
            rate = config["tensors"].get(name, config["hyperparameters"])["learning_rate"]
            rate = config["hyperparameters"]["learning_rate"] if fault == "ignores tensors" else rate
            for n, value in enumerate(values):
                target = 1 + noise.gauss(0, 0.1)
                loss += (value - target) ** 2
                values[n] -= rate * factor(tokens) * 2 * (value - target)
        tokens += batch
        if fault == "exits on divergence" and loss > 1e6:
            sys.exit("loss is too large")
        loss = loss / (width * depth) if loss < 1e100 else math.nan
        loss = -loss if fault == "negative" else loss
        line = json.dumps({"tokens": tokens, "loss": loss})
        rows.write("loss: 3\n" if fault == "prose" else f"{line}\n")
        rows.flush()
        save()
        if math.isnan(loss):
            break
        if fault == "crashes" and tokens >= end // 2:
            raise MemoryError("out of memory")
