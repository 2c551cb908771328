"""Commands that keep what was trained: bundle, verify, export, generate."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from muscale.cli.application import app
from muscale.cli.options import AsJson, Flag, Options
from muscale.cli.running import run_stage, show


@app.command
def bundle(study: Path, *, average: int = 1, stage: str | None = None, options: Options = Options()) -> int:
    """Put everything of the promoted run into one directory that needs the study no more, with a hash of each file.

    Args:
        study: The study file.
        average: Write the average of so many last checkpoints beside the last weights, and print both losses.
        stage: Key or name of a finished stage of `muscale continue`, in place of the promoted run.
    """
    return run_stage(study, options, lambda opened: opened.bundle(average=average, stage=stage), "bundle")


@app.command
def verify(bundle: Path, *, json: AsJson = False) -> int:
    """Check every hash of a bundle; exit code 1 if a file is missing, different or extra.

    Args:
        bundle: Its directory.
        json: Print the result as JSON.
    """
    from muscale.bundle_files import verify

    found = verify(bundle)
    show(found, as_json=json)
    return 0 if found.passed else 1


@app.command
def export(
    bundle: Path,
    folder: Path,
    *,
    to: Literal["llama"],
    averaged: Flag = False,
) -> int:
    """Write a bundle's model in another layout: muscale export BUNDLE folder --to llama.

    Args:
        bundle: Its directory.
        folder: Must be empty, or not be there yet.
        to: "llama" is Hugging Face's, which transformers and lm-eval load, for models that are Llamas.
        averaged: The average of checkpoints, which the bundle must have, in place of the last weights.
    """
    from muscale.bundle import Bundle

    print(f"wrote {Bundle.open(bundle).export(folder, averaged=averaged)}")
    return 0


@app.command
def generate(
    bundle: Path,
    *,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    averaged: Flag = False,
) -> int:
    """Let a bundle's model continue a text, as a check that it learned something.

    Args:
        bundle: Its directory.
        prompt: Begins a document.
        tokens: To add, at most.
        temperature: 0 takes the likeliest token at each step; more draws.
        top_p: Draws among the likeliest tokens that have this probability together.
        seed: Of the draws.
        averaged: The average of checkpoints, which the bundle must have, in place of the last weights.
    """
    from muscale.bundle import Bundle

    opened = Bundle.open(bundle)
    text = opened.generate(prompt, tokens, temperature=temperature, top_p=top_p, seed=seed, averaged=averaged)
    print(f"{prompt}{text}")
    return 0
