"""A plain PyTorch loop that keeps the protocol of own_trainer.md: a residual network that learns the next byte's distribution.

python own_trainer.py --config job.json --state folder [--describe]
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

CONTEXT, VOCAB = 16, 32


class Network(nn.Module):
    """Blocks over the concatenated embeddings of the last bytes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, branch: float) -> torch.Tensor:
        """Logits of the next byte at every position, before their multiplier; `branch` multiplies each block's output."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + branch * gelu(layer(x))
        return self.head(x)


def batch(seed: int, position: int, n_tokens: int) -> torch.Tensor:
    """Text by seed and position alone: put your data here."""
    made = torch.Generator().manual_seed(hash((seed, position)))
    first = torch.randint(VOCAB, (n_tokens // CONTEXT, 1), generator=made)
    steps = torch.randint(1, 4, (n_tokens // CONTEXT, CONTEXT), generator=made)
    return (first + torch.cat([torch.zeros_like(first), steps.cumsum(1)], 1)) % VOCAB


def factor(schedule: list[list[float]], tokens: int) -> float:
    """Factor of the learning rates, linear between the schedule's points."""
    return float(np.interp(tokens, *zip(*schedule, strict=True)))


parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path)
parser.add_argument("--state", type=Path)
parser.add_argument("--describe", action="store_true")
arguments = parser.parse_args()
job = json.loads(arguments.config.read_text())
torch.manual_seed(job["seed"])
model = Network(**job["shape"])
shapes = {name: list(tensor.shape) for name, tensor in model.named_parameters()}
if arguments.describe:
    n_params = sum(map(math.prod, shapes.values()))
    active = n_params - model.embedding.weight.numel()
    classes = {"head.weight": "readout"}
    described = {"n_params": n_params, "n_active_params": active, "flops_per_token": 6 * active}
    print(json.dumps({**described, "tensors": shapes, "classes": classes}))
    sys.exit()
given, saved, tokens = job["hyperparameters"], arguments.state / "saved.pt", job["tokens"]["from"]
values = [given | job["tensors"].get(name, {}) for name in shapes]
rates = [value["learning_rate"] for value in values]
groups = [
    {"params": [p], "lr": value["learning_rate"], "weight_decay": value["weight_decay"], "eps": value.get("eps", 1e-8)}
    for p, value in zip(model.parameters(), values, strict=True)
]
for p, value in zip(model.parameters(), values, strict=True):
    if "init_std" in value:
        nn.init.normal_(p, value["init_mean"], value["init_std"])
readout, branch = values[-1].get("multiplier", 1.0), given.get("branch_multiplier", 1.0)
optimizer = torch.optim.AdamW(groups, betas=(given.get("beta1", 0.9), given.get("beta2", 0.95)))
if saved.exists() or tokens:
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    tokens = state["tokens"]
with (arguments.state / "rows.jsonl").open("a", buffering=1) as rows:
    while tokens < job["tokens"]["to"]:
        text = batch(job["seed"], tokens, given["batch_tokens"])
        loss = cross_entropy(readout * model(text[:, :-1], branch).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(job["schedule"], tokens)
        optimizer.step()
        tokens += given["batch_tokens"]
        rows.write(json.dumps({"tokens": tokens, "loss": loss.item() if loss.isfinite() else None}) + "\n")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tokens": tokens}
        torch.save(state, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)
        if not loss.isfinite():
            break
