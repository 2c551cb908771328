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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte at every position."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + gelu(layer(x))
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
    flops = 6 * (n_params - model.embedding.weight.numel())
    print(json.dumps({"n_params": n_params, "flops_per_token": flops, "tensors": shapes}))
    sys.exit()
given, saved, tokens = job["hyperparameters"], arguments.state / "saved.pt", job["tokens"]["from"]
rates = [(given | job["tensors"].get(name, {}))["learning_rate"] for name in shapes]
groups = [{"params": [p], "lr": rate} for p, rate in zip(model.parameters(), rates, strict=True)]
optimizer = torch.optim.AdamW(groups, weight_decay=given["weight_decay"])
if saved.exists() or tokens:
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    tokens = state["tokens"]
with (arguments.state / "rows.jsonl").open("a", buffering=1) as rows:
    while tokens < job["tokens"]["to"]:
        text = batch(job["seed"], tokens, given["batch_tokens"])
        loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
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
