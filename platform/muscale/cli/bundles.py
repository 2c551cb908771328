"""Commands on bundles: bundle, verify, export, generate."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Any, Literal

from muscale.cli.application import ARTIFACTS, command
from muscale.cli.ending import Ending, line, print_ending
from muscale.cli.options import AsJson, Flag, Options, StudyFile, Whole
from muscale.cli.running import result_alone, run_stage, show
from muscale.errors import BundleError
from muscale.formatting import format_read_error


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
    messages: Path | None = None,
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
        messages: Instead of a prompt, a JSON file with the messages of a chat, a list of objects with role and content; the
            assistant's answer is generated.
        tokens: Maximum number of tokens to generate.
        temperature: 0 always takes the most likely token, so a small model soon repeats itself; higher values sample.
        top_p: Sample only from the most likely tokens, up to this total probability.
        seed: Seed for sampling.
        averaged: Use the averaged weights, if the bundle has them, instead of the last ones.
    """
    from muscale.bundles.bundle import Bundle

    if prompt and messages:
        raise BundleError(f"generate: --prompt and --messages cannot be combined, got {prompt!r} and {messages}")
    with result_alone(json):
        opened = Bundle.open(bundle)
        asked = prompt if messages is None else _messages(messages)
        text = opened.generate(asked, tokens, temperature=temperature, top_p=top_p, seed=seed, averaged=averaged)
    show({"prompt": asked, "text": text} if json else f"{prompt}{text}", as_json=json)
    return 0


def _messages(path: Path) -> list[Any]:
    """Return the list in a file of messages; raise BundleError if there is none."""
    try:
        found = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"generate: --messages {path}: {format_read_error(error)}") from error
    if not isinstance(found, list):
        raise BundleError(f"generate: --messages {path}: must be a list of messages, got {found!r:.60}")
    return found
