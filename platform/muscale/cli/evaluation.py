"""The command `evaluate`, on a study, a full run, a checkpoint or a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from muscale.cli.application import INSPECT, command
from muscale.cli.ending import Ending
from muscale.cli.options import Flag, Numbers, Options, Whole, Words
from muscale.cli.running import result_alone, run_stage, show
from muscale.errors import StudyFileError, refusing

if TYPE_CHECKING:
    from proxy_models.evaluation.measure import Measure


@command(INSPECT, example="muscale evaluate runs/quickstart/full_runs/KEY --quantised-bits 4 --ablation layers")
def evaluate(
    where: Path,
    *,
    tasks: Path | None = None,
    task: Words = (),
    items: Whole | None = None,
    prompt: Words = (),
    tokens: Whole | None = None,
    memorisation: Flag = False,
    quantised_bits: Numbers = (),
    ablation: Literal["layers", "heads"] | None = None,
    corpus: Path | None = None,
    device: str | None = None,
    workers: Whole | None = None,
    options: Options = Options(),
) -> int:
    """Measure the loss of weights and more: task scores, samples, memorisation, the loss of rounded weights or without each layer.

    For a study file, take the measures of its [scores] on the ladder's runs and on the finished full run, and print the forecast of
    each score and the measured score. An interrupted command continues where it stopped.

    Args:
        where: A study file; or the directory of a full run, of which the newest checkpoint is used, the folder of a checkpoint, or a
            bundle.
        tasks: Folder of task files of lm-evaluation-harness (YAML), with their data.
        task: Names of tasks in that folder; by default all.
        items: Most items of a task.
        prompt: Texts to continue.
        tokens: Most tokens of a continuation; 64 by default.
        memorisation: Measure the share of training sequences that the model continues verbatim, by their repetitions.
        quantised_bits: Measure the loss with weights rounded to so many bits, 8 and 4.
        ablation: Measure the loss without each layer, or without each head of the built-in decoder.
        corpus: Folder of the corpus, if it was moved since the run began.
        device: "cpu", which is the default, "cuda" or "cuda:NUMBER", such as "cuda:1".
        workers: Ray workers that share the weights of a checkpoint, if the model is too large for one; each takes a CPU, or a GPU.
    """
    given = {
        "--tasks": tasks,
        "--task": task,
        "--items": items is not None,
        "--prompt": prompt,
        "--memorisation": memorisation,
        "--quantised-bits": quantised_bits,
        "--ablation": ablation,
        "--corpus": corpus,
        "--device": device,
        "--tokens": tokens is not None,
        "--workers": workers is not None,
    }
    named = [name for name, value in given.items() if value]
    if where.suffix == ".toml":
        if named:
            raise StudyFileError(f"evaluate: {named[0]} is for weights; set the measures of a study in its [scores]")
        return run_stage(
            where,
            options,
            lambda opened: opened.evaluate(),
            None,
            ending=lambda *_: Ending(next=(options.line("report", where),)),
            trains=True,
        )
    if options.set:
        raise StudyFileError(f"evaluate: --set is for a study file, a .toml; got {where}")
    if (task or items is not None) and not tasks:
        raise StudyFileError(f"evaluate: {'--task' if task else '--items'} needs --tasks, the folder of the tasks")
    if tokens is not None and not prompt:
        raise StudyFileError(f"evaluate: --tokens {tokens} needs --prompt, the start of a text")
    from muscale.bundles.evaluate_weights import evaluate as evaluate_weights
    from proxy_models.evaluation.ablation import Ablation
    from proxy_models.evaluation.memorisation import Memorisation
    from proxy_models.evaluation.quantised_loss import QuantisedLoss
    from proxy_models.evaluation.samples import Samples
    from proxy_models.evaluation.tasks import Tasks

    measures: list[Measure] = []
    with result_alone(options.json), refusing("evaluate", raising=StudyFileError):
        if tasks:
            measures.append(Tasks(folder=tasks.resolve(), names=task or None, limit=items))
        if prompt:
            measures.append(Samples(prompts=prompt, n_tokens=64 if tokens is None else tokens))
        if memorisation:
            measures.append(Memorisation())
        if quantised_bits:
            measures.append(QuantisedLoss(bits=quantised_bits))
        if ablation:
            measures.append(Ablation(parts=ablation))
        found = evaluate_weights(
            where,
            measures,
            corpus=corpus,
            device=device or "cpu",
            keep_progress=True,
            workers=1 if workers is None else workers,
        )
    show(found, as_json=options.json)
    return 0
