"""`initial_weights` of the study file: a folder that is read once, checked against [model], and stored for every training.

The folder is a bundle, or has safetensors with the config.json of a class of transformers
(`proxy_models.architecture.given_weights`). A tokenizer in it must be the corpus's, since a token's id has a row in the table.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from muscale.bundles.bundle import MODEL, Bundle
from muscale.errors import BundleError, StageError, refusing
from muscale.layout import INITIAL_WEIGHTS
from muscale.settings.config import StudyConfig
from muscale.settings.plan import REGULARIZERS
from proxy_models.architecture.families import family_of, is_imported, weight_shapes
from proxy_models.architecture.given_weights import GivenWeights, GivenWeightsError, read_weights
from proxy_models.architecture.member import Member
from proxy_models.data.corpus import Corpus
from proxy_models.data.hugging_face import same_tokenizer
from proxy_models.data.sources import CorpusError, at_home
from proxy_models.files import folder_lock
from proxy_models.hashing import content_key
from proxy_models.training.initial_weights import write_initial_weights
from proxy_models.training.numerics import WEIGHTS_MANIFEST

_TOKENIZER = "tokenizer.json"
_LISTED = 5  # settings that an error lists
_OF_TRAINING = (
    *("context_length", "document_separator", *REGULARIZERS),
    *("balance_rate", "balance_loss", "router_z_loss"),
)
"""Settings of [model] that may differ from a bundle's: they change how a model is trained or read, not what its weights are."""


def check(config: StudyConfig, directory: Path) -> None:
    """Check the folder of `initial_weights` if its weights are not stored yet; write nothing.

    Raises:
        StageError: If the folder can't be used.
    """
    if (
        config.initial_weights
        and is_imported(config.model)
        and not (directory / INITIAL_WEIGHTS / WEIGHTS_MANIFEST).exists()
    ):
        _read(config, directory)


def store(config: StudyConfig, directory: Path, corpus: Corpus, *, is_begun: bool) -> None:
    """Store the weights in the study's directory, unless they are there.

    Args:
        is_begun: Whether anything was trained: then the stored weights stay, whatever the folder holds by now.

    Raises:
        StageError: If the folder or its tokenizer can't be used.
    """
    if config.initial_weights is None:
        return
    with folder_lock(corpus.folder):  # so that one process writes
        _store(config, directory, corpus, is_begun=is_begun)


def _store(config: StudyConfig, directory: Path, corpus: Corpus, *, is_begun: bool) -> None:
    folder = directory / INITIAL_WEIGHTS
    manifest = folder / WEIGHTS_MANIFEST
    if is_begun and manifest.exists():
        return
    facts = {"source": str(config.initial_weights), "model": content_key(config.model.to_dict())}
    facts["files"] = content_key(_stamps(_folder(config, directory)))
    if manifest.exists() and facts.items() <= json.loads(manifest.read_text()).items():
        return
    given = _read(config, directory)
    _require_tokenizer(config, directory, corpus)
    shutil.rmtree(folder, ignore_errors=True)
    with refusing(f"initial_weights: {_folder(config, directory)}"):
        write_initial_weights(folder, given.shapes, given, layout=given.layout, **facts)


def _folder(config: StudyConfig, directory: Path) -> Path:
    """Return the folder of `initial_weights`; raise StageError if it is not there."""
    folder = directory / at_home(str(config.initial_weights))
    if not folder.is_dir():
        raise StageError(f"initial_weights: must be a folder with weights, relative to the study file; got {folder}")
    return folder


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each file, by which a changed folder is noticed without reading it."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _read(config: StudyConfig, directory: Path) -> GivenWeights:
    """Read names, shapes and settings of the weights, and check them against [model]."""
    folder, model = _folder(config, directory), config.model
    with refusing("initial_weights", GivenWeightsError, BundleError):
        if (folder / MODEL).exists():
            return _of_bundle(Bundle.open(folder), config)
        return read_weights(folder, model)


def _of_bundle(bundle: Bundle, config: StudyConfig) -> GivenWeights:
    """Return the weights of a bundle with its multipliers absorbed."""
    theirs, model = bundle.numerics.model, config.model
    if odd := [*islice(_differences(theirs.to_dict(), model), _LISTED)]:
        raise GivenWeightsError(f"{bundle.path / MODEL}: {'; '.join(odd)}")
    weights, shapes = bundle.weights(), weight_shapes(theirs)
    # Only tables of learned positions differ, since the settings that the models share determine all other shapes.
    tables = {name: len(shape) for name, shape in weight_shapes(model).items() if shape.shape != shapes[name].shape}
    for name, n_rows in tables.items():
        if (rows := len(shapes[name])) < n_rows:
            raise GivenWeightsError(
                f"{bundle.path}: has {rows} learned positions, fewer than model.context_length = {n_rows}"
            )
        shapes[name] = shapes[name][:n_rows]
    with refusing(bundle.path, raising=GivenWeightsError):
        factors = family_of(model).absorbed(model, bundle.multipliers)

    def read(name: str) -> Tensor:
        tensor = weights[name][: tables[name]] if name in tables else weights[name]
        return tensor * factors.get(name, 1.0)

    return GivenWeights(shapes=shapes, read=read, layout="bundle")


def _differences(theirs: Mapping[str, Any], model: Member) -> Iterator[str]:
    """Yield the settings of the model that a bundle and the study must share and do not; a setting left out has its default."""
    ours = model.to_dict()
    defaults = {} if model.is_custom else {field.name: field.default for field in fields(model)}
    for name in {**theirs, **ours}:
        there, here = theirs.get(name, defaults.get(name)), ours.get(name, defaults.get(name))
        if name not in _OF_TRAINING and there != here:
            yield f"{name} is {there!r}, but model.{name} is {here!r}"


def _require_tokenizer(config: StudyConfig, directory: Path, corpus: Corpus) -> None:
    """Require that a tokenizer in the folder gives the ids of the corpus's."""
    folder = _folder(config, directory)
    advice = f'set corpus.tokenizer = "{config.initial_weights}/{_TOKENIZER}"'
    try:
        ours = corpus.tokenizer()
    except CorpusError:
        return  # the corpus was given as tokens
    if (folder / MODEL).exists():
        bundle = Bundle.open(folder)
        theirs = bundle.tokenizer()
        if theirs is not None and theirs.key != ours.key:
            advice = advice.replace(_TOKENIZER, f"tokenizer/{_TOKENIZER}")
            raise StageError(
                f"initial_weights: the tokenizer of {folder} is {theirs.key}, the corpus's is {ours.key}; {advice}"
            )
        return
    path = folder / _TOKENIZER
    with refusing("initial_weights", CorpusError):
        is_same = not path.exists() or same_tokenizer(path, ours)
    if not is_same:
        raise StageError(
            f"initial_weights: {folder / _TOKENIZER} must be the corpus's tokenizer ({ours.key}), and differs; {advice}"
        )
