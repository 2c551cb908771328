"""Commands that keep what was trained: bundle, verify, export, generate."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from muscale.cli.application import KEEP, command
from muscale.cli.ending import Ending, line, tell
from muscale.cli.options import AsJson, Flag, Options
from muscale.cli.running import refuse_dry_run, result_alone, run_stage, show


@command(KEEP, example="muscale bundle study.toml --average 3")
def bundle(study: Path, *, average: int = 1, continuation: str | None = None, options: Options = Options()) -> int:
    """Put everything of the promoted run into one directory that needs the study no more, with a hash of each file.

    Args:
        study: The study file.
        average: Write the average of so many last checkpoints beside the last weights, and print both losses.
        continuation: Key or name of a finished continuation of `muscale continue`, instead of the promoted run.
    """
    refuse_dry_run("a bundle", options)
    return run_stage(
        study,
        options,
        lambda opened: opened.bundle(average=average, continuation=continuation),
        None,
        ending=lambda _, result: Ending(
            wrote={"bundle": result.path}, next=(line("verify", result.path), line("generate", result.path))
        ),
    )


@command(KEEP, example="muscale verify runs/quickstart/bundles/KEY")
def verify(bundle: Path, *, json: AsJson = False) -> int:
    """Check every hash of a bundle; exit code 1 if a file is missing, different or extra.

    Args:
        bundle: Its directory.
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.bundles.bundle_files import verify

    found = verify(bundle)
    show(found, as_json=json)
    return 0 if found.passed else 1


@command(KEEP, example="muscale export runs/quickstart/bundles/KEY llama --to llama")
def export(
    bundle: Path,
    folder: Path,
    *,
    to: Literal["llama"],
    averaged: Flag = False,
    json: AsJson = False,
) -> int:
    """Write a bundle's model in another layout.

    Args:
        bundle: Its directory.
        folder: Must be empty, or not be there yet.
        to: "llama" is Hugging Face's, which transformers and lm-eval load, for models that are Llamas.
        averaged: The average of checkpoints, which the bundle must have, in place of the last weights.
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.bundles.bundle import Bundle

    with result_alone(json):
        written = Bundle.open(bundle).export(folder, averaged=averaged)
    show({"model": str(written)} if json else f"wrote {written}", as_json=json)
    if not json:
        tell(Ending(wrote={"model": Path(written)}))
    return 0


@command(KEEP, example="muscale generate runs/quickstart/bundles/KEY --prompt 'def ' --temperature 0.8")
def generate(
    bundle: Path,
    *,
    prompt: str = "",
    tokens: int = 200,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    averaged: Flag = False,
    json: AsJson = False,
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
        json: Print the result as JSON, and nothing else on standard output.
    """
    from muscale.bundles.bundle import Bundle

    with result_alone(json):
        opened = Bundle.open(bundle)
        text = opened.generate(prompt, tokens, temperature=temperature, top_p=top_p, seed=seed, averaged=averaged)
    show({"prompt": prompt, "text": text} if json else f"{prompt}{text}", as_json=json)
    return 0
