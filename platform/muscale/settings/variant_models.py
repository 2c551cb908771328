"""Models of variants with a custom family or a training program; only stages that train import or run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muscale.settings.compare import VariantSettings
from muscale.settings.own_model import OwnModel
from muscale.settings.strict import build_strictly, collecting
from muscale.settings.tables import StudyTables
from muscale.settings.trainer import TrainerSettings, described_member, program_model
from proxy_models.architecture.member import Member


def own_models(
    config: StudyTables, own: OwnModel | None, where: str, directory: Path, problems: list[str]
) -> dict[str, Member]:
    """Base shapes of such variants by name; imports their families and runs their programs.

    Args:
        own: The study's [model], if it names a family or stands for a [trainer].
        problems: Collects errors; a variant with errors has no model.
    """
    found: dict[str, Member] = {}
    for name, variant in config.variants.items():
        if not variant.is_own(config.model) or bool(variant.trainer) != bool(config.trainer):
            continue
        place = f"{where}: variants.{name}.{'trainer' if config.trainer else 'model'}"
        with collecting(problems):
            if config.trainer:
                settings = build_strictly(TrainerSettings, {**config.trainer.model_dump(), **variant.trainer}, place)
                program = program_model(settings, config.model, directory, place)
                found[name] = described_member(program, directory, place)
            else:
                found[name] = _of_family(own, config.model, variant, place)
    return found


def _of_family(own: OwnModel | None, base: Member, variant: VariantSettings, where: str) -> Member:
    """The study's [model] with the variant's keys; another family starts from its default arguments."""
    sizes = {key: getattr(base, key) for key in ("d_model", "n_layers", "vocab_size", "context_length")}
    kept: dict[str, Any] = {}
    if own and variant.model.get("family", own.family) == own.family:
        args = variant.model.get("args", {})
        kept = {"family": own.family, "args": own.args | args if isinstance(args, dict) else args}
    return build_strictly(OwnModel, {**sizes, **variant.model, **kept}, where).imported(where)
