"""Commands on bundles: bundle, verify, export, generate."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from muscale.cli.application import ARTIFACTS, command
from muscale.cli.ending import Ending, line, print_ending
from muscale.cli.options import AsJson, Flag, Options, StudyFile, Whole
from muscale.cli.running import result_alone, run_stage, show


@command(ARTIFACTS, example="muscale bundle study.toml --average 3")
def bundle(
    study: StudyFile, *, average: Whole = 1, continuation: str | None = None, options: Options = Options()
) -> int:
    """Write the promoted run to a self-contained directory, with a hash of each file.

    Args:
        average: Also write the average weights of the last checkpoints, this many, and print both losses.
        continuation: Key or name of a finished continuation (`muscale continue`) to write instead of the promoted run.
    """
    return run_stage(
        study,
        options,
        lambda opened: opened.bundle(average=average, continuation=continuation),
        None,
        ending=lambda opened, result: Ending(
            wrote={"bundle": result.path},
            next=tuple(line(use, result.path) for use in ("verify", "generate")[: 1 + opened.config.can_generate]),
        ),
        trains=True,  # the family's code evaluates the weights again
    )


@command(ARTIFACTS, example="muscale verify runs/quickstart/bundles/KEY")
def verify(bundle: Path, *, json: AsJson = False) -> int:
    """Check every hash of a bundle; exit code 1 if a file is missing, different or extra.

    Args:
        bundle: Directory of the bundle.
    """
    from muscale.bundles.bundle_files import verify

    found = verify(bundle)
    show(found, as_json=json)
    return 0 if found.passed else 1


@command(ARTIFACTS, example="muscale export runs/quickstart/bundles/KEY llama --to llama")
def export(
    bundle: Path,
    folder: Path,
    *,
    to: Literal["llama", "transformers"],
    averaged: Flag = False,
    json: AsJson = False,
) -> int:
    """Convert a bundle's model to another layout.

    Args:
        bundle: Directory of the bundle.
        folder: An empty or new folder.
        to: "llama" is Hugging Face's layout for Llama models, which transformers and lm-eval load; "transformers" is the layout of
            the model's own class, for a model with `family = "transformers:…"`.
        averaged: Use the averaged weights, if the bundle has them, instead of the last ones.
    """
    from muscale.bundles.bundle import Bundle

    with result_alone(json):
        written = Bundle.open(bundle).export(folder, to=to, averaged=averaged)
    show({"model": str(written)} if json else f"wrote {written}", as_json=json)
    if not json:
        print_ending(Ending(wrote={"model": Path(written)}))
    return 0


@command(ARTIFACTS, example="muscale generate runs/quickstart/bundles/KEY --prompt 'def '")
def generate(
    bundle: Path,
    *,
    prompt: str = "",
    tokens: Whole = 200,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: Whole = 0,
    averaged: Flag = False,
    json: AsJson = False,
) -> int:
    """Generate text with a bundle's model, as a quick check that it learned something.

    Args:
        bundle: Directory of the bundle.
        prompt: Start of the text.
        tokens: Maximum number of tokens to generate.
        temperature: 0 always takes the most likely token, so a small model soon repeats itself; higher values sample.
        top_p: Sample only from the most likely tokens, up to this total probability.
        seed: Seed for sampling.
        averaged: Use the averaged weights, if the bundle has them, instead of the last ones.
    """
    from muscale.bundles.bundle import Bundle

    with result_alone(json):
        opened = Bundle.open(bundle)
        text = opened.generate(prompt, tokens, temperature=temperature, top_p=top_p, seed=seed, averaged=averaged)
    show({"prompt": prompt, "text": text} if json else f"{prompt}{text}", as_json=json)
    return 0
