"""A training program for torchrun: ranks descend on one vector together, rank 0 alone writes rows and the state.

`torchrun … ranks_program.py KILLED CONFIG STATE [--describe]`; of KILLED, "torchrun", "rank" (the last one), both ("torchrun,rank") or
"none", one is killed in each start of a segment, as long as there is one left. What was started and killed is noted beside this file.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

killed, config, state = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
size, rank = 32 * config["shape"]["width"] * config["shape"]["depth"], int(os.environ["RANK"])
if "--describe" in sys.argv:
    if rank == 0:
        sys.stdout.write(json.dumps({"n_params": size, "flops_per_token": 6 * size}))
    sys.exit()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

batch, rate = config["hyperparameters"]["batch_tokens"], config["hyperparameters"]["learning_rate"]
schedule: list[tuple[int, float]] = config["schedule"]
start, end = config["tokens"]["from"], config["tokens"]["to"]
notes = Path(__file__).with_name(f"ranks-{state.resolve().parent.name}")
notes.mkdir(exist_ok=True)
kills, victims = len([*notes.glob("killed*")]), killed.split(",") if killed != "none" else []


def factor(tokens: int) -> float:
    """Factor of the learning rates: linear between the points."""
    for (left, low), (right, high) in itertools.pairwise(schedule):
        if tokens <= right:
            return low + (high - low) * (tokens - left) / (right - left)
    return schedule[-1][1]


def kill_when_due() -> None:
    """Kill the next victim at its part of the segment."""
    if victims[kills:] and tokens - start >= (kills + 1) * (end - start) / (len(victims) + 1):
        last = next(notes.glob(f"started{kills}.{dist.get_world_size() - 1}.*"))
        (notes / f"killed{kills}").touch()
        os.kill(os.getppid() if victims[kills] == "torchrun" else int(last.suffix[1:]), signal.SIGKILL)
        time.sleep(60)


dist.init_process_group("gloo")
tokens, weights = 0, torch.full((size,), 0.0, dtype=torch.float64)
if (state / "saved.pt").exists():
    tokens, weights = torch.load(state / "saved.pt", weights_only=True)
elif start:
    sys.exit("no state to begin from")
(notes / f"started{kills}.{rank}.{os.getpid()}").write_text(str(tokens))
dist.barrier()
while tokens < end:
    drawn = torch.Generator().manual_seed(random.Random(f"{config['seed']} {tokens} {rank}").getrandbits(32))
    error = weights - 1 - 0.1 * torch.randn(size, generator=drawn, dtype=torch.float64)
    gradient = torch.cat((2 * error, error.square().mean()[None])) / dist.get_world_size()
    dist.all_reduce(gradient)
    weights, loss = weights - rate * factor(tokens) * gradient[:-1], float(gradient[-1])
    tokens += batch
    if rank == 0:
        with (state / "rows.jsonl").open("a") as rows:
            rows.write(json.dumps({"tokens": tokens, "loss": loss}) + "\n")
        torch.save((tokens, weights), state / "new.pt")
        (state / "new.pt").replace(state / "saved.pt")
        kill_when_due()
    time.sleep(0.02)
dist.destroy_process_group()
