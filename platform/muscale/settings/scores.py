"""[scores] of the study file: measures of checkpoints in addition to their loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from muscale.settings.strict import AllDiffer, StrictTable


class ScoresSettings(StrictTable):
    """[scores]: measures of the ladder's runs and of the full run at their checkpoints."""

    checkpoints: PositiveInt = 5  # of each run of the ladder, its end included; lengths fall by the root of two
    tasks: Annotated[tuple[str, ...], AllDiffer] = ()  # names of lm-eval tasks in `folder`
    folder: str = "tasks"  # YAML files of tasks and their data, relative to the study file
    items: PositiveInt | None = None  # most items of a task; none: all
    prompts: tuple[str, ...] = ()  # texts that every evaluated checkpoint continues
    sample_tokens: PositiveInt = 64  # longest sample
    # of each run's end: share of training sequences that the model continues verbatim, by repetitions; reads the whole corpus
    memorisation: bool = False
    # the loss of each run's end after rounding its weights
    quantised_bits: Annotated[tuple[Literal[8, 4], ...], AllDiffer] = ()
    ablation: Literal["layers", "heads"] | None = None  # the loss of each run's end without each part
    # workers that share the weights of a full run's checkpoint, if the model is too large for one; each has the resources of a worker
    # of the full run or, with promote.evaluation = "async", the evaluator's
    workers: PositiveInt = 1
    # signal over noise below which a task is reported, not forecast
    least_signal_to_noise: Annotated[float, Field(ge=0)] = 5.0
