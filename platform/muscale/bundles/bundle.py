"""The bundle: everything of a finished full run in one directory that is readable without the study or its ledger.

    README.md                model card
    weights.safetensors      by name, with the state of routers; averaged.safetensors next to it, if an average was requested
                             above 5 GB in several files, with weights.safetensors.index.json; likewise the others
    optimizer.safetensors    moments as <kind>/<parameter>; the memory of loss scaling and of the guard as memory/<name>
    model.json               the run's numerics (shape, base, seed, precision …) and the forward multipliers
    parametrization.json     the table by parameter name
    schedule.json            the segments: recipe, phase, first and last tokens
    study.json               the resolved study file
    data.json                the corpus's manifest, and how often the run saw each source
    tokenizer/               unless the tokens are bytes
    family/                  for a custom model, the files that define its family; nothing here imports them
    environment.json, .lock  versions behind the run and the bundle; every package installed where the bundle was written
    seeds.json, metrics.jsonl, forecast.json; evaluations.jsonl of a run that was evaluated during training
    continued.json           for a continuation, instead of forecast.json: its losses before and after
    lineage.json, runs.csv   sweep, check, transfer verdict, fit, plan, promotion; every run in the ledger
    manifest.json            the hash of each file

The bundle holds no pickles, and reading it unpickles nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from torch import nn

from muscale.bundles.bundle_files import Verification, verify
from muscale.errors import BundleError, refusing
from muscale.settings.own_model import announce_family
from proxy_models.architecture.causal_lm import CausalLM
from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.decoder import Decoder
from proxy_models.architecture.families import import_family, weight_shapes, with_weights
from proxy_models.architecture.llama import NotLlamaError, export_errors, write_llama
from proxy_models.architecture.member import Member
from proxy_models.architecture.parametrization import ForwardMultipliers, Parametrization
from proxy_models.architecture.pretrained import NotFoldableError, write_pretrained
from proxy_models.data.kept_tokenizer import kept_tokenizer
from proxy_models.data.sources import CorpusError
from proxy_models.data.tokenizer import Tokenizer
from proxy_models.tensor_files import TensorFiles
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import set_multipliers
from proxy_models.training.state import BUFFER, WEIGHT, TrainState
from scaling.presentation import Result

T = TypeVar("T")
Layout = Literal["llama", "transformers"]
"""Layouts in which a model can be exported."""

CARD = "README.md"
WEIGHTS = "weights.safetensors"
AVERAGED = "averaged.safetensors"
OPTIMIZER = "optimizer.safetensors"
MODEL = "model.json"
PARAMETRIZATION = "parametrization.json"
SCHEDULE = "schedule.json"
STUDY = "study.json"  # not config.json, by which transformers would take the folder for a model that it can load
DATA = "data.json"
TOKENIZER_FOLDER = "tokenizer"
FAMILY_FOLDER = "family"
ENVIRONMENT = "environment.json"
LOCK = "environment.lock"
SEEDS = "seeds.json"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
FORECAST = "forecast.json"
CONTINUED = "continued.json"
LINEAGE = "lineage.json"
RUNS = "runs.csv"
AVERAGING = "averaging.json"
MEMORY = "memory/"  # prefix of the names of values that the training steps remember


@dataclass(frozen=True, kw_only=True)
class Bundle(Result):
    """A bundle whose files matched their hashes when it was opened."""

    path: Path
    verification: Verification

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a bundle after checking every file against the manifest.

        Raises:
            BundleError: If the path holds no bundle or a damaged one; the error names missing, different and extra files.
        """
        found = verify(path)
        if not found.passed:
            raise BundleError(f"{found}\nthe bundle has changed since it was written; copy it again from its source")
        return cls(path=Path(path), verification=found)

    def read(self, name: str) -> Any:
        """The content of one of the bundle's JSON files.

        Raises:
            BundleError: If the bundle has no such file, or the file is not JSON.
        """
        path = self.path / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path}: can't be read ({error})") from error

    def _read_as(self, name: str, take: Callable[[Any], T]) -> T:
        """Return a value read from a JSON file of the bundle; the file may hold anything even if its hash matches."""
        try:
            return take(self.read(name))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BundleError(
                f"{self.path / name}: not a file that this version writes ({type(error).__name__}: {error})"
            ) from error

    @property
    def numerics(self) -> Numerics:
        """Numerics of the run."""
        return self._read_as(MODEL, lambda values: Numerics.from_dict(values["numerics"]))

    def decoder(self, *, averaged: bool = False) -> Decoder:
        """The trained model on the CPU, in fp32, ready to evaluate; the weights are mapped from the bundle's files.

        Args:
            averaged: Use the average of the last checkpoints instead of the last weights.

        Raises:
            BundleError: If the bundle has no such weights, they belong to another model, or the model is a custom one.
        """
        model, weights = self._decoder_weights(averaged)
        decoder = self._read_as(MODEL, lambda _: Decoder.with_weights(model, weights))
        set_multipliers(decoder, self.multipliers)
        return decoder.eval()

    def module(self, *, averaged: bool = False) -> nn.Module:
        """The trained model of any family, as `decoder`; imports the family that the bundle names, and so runs the family's code.

        The family is found as in training, installed or on PYTHONPATH, and must have the same source as the copy in the bundle.
        Copy that source to PYTHONPATH if the family is not installed.

        Args:
            averaged: As for `decoder`.

        Raises:
            BundleError: As `decoder`; if the family can't be imported, or its source differs.
        """
        member = self.numerics.model
        announce_family(member)
        try:
            import_family(member)
        except ValueError as error:
            raise BundleError(f"{self.path}: {error}; its source is in {self.path / FAMILY_FOLDER}") from error
        model = with_weights(member, self.weights(averaged=averaged))
        set_multipliers(model, self.multipliers)
        return model.eval()

    def train_state(self) -> TrainState:
        """The state from which training continues exactly at the end of the run; see `proxy_models.training.trainer.Trainer`.

        The state leaves out the guard's last snapshot; the guard takes a new one when training continues.
        """
        table = self._read_as(PARAMETRIZATION, Parametrization.from_dict)
        weights = {
            f"{WEIGHT if name in table.rules else BUFFER}{name}": tensor
            for name, tensor in self._tensors(WEIGHTS).items()
        }
        rest = {name.removeprefix(MEMORY): tensor for name, tensor in self._tensors(OPTIMIZER).items()}
        return TrainState(
            tokens=self._read_as(SCHEDULE, lambda segments: int(segments[-1]["end"])),
            parametrization=table,
            tensors=weights | rest,
        )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the text; None if the corpus was given as tokens.

        Raises:
            BundleError: If the tokenizer can't be read.
        """
        if not self._read_as(DATA, lambda data: data["tokenizer_known"]):
            return None
        try:
            return kept_tokenizer(self.path / TOKENIZER_FOLDER)
        except (CorpusError, OSError, ValueError, KeyError) as error:
            raise BundleError(f"{self.path / TOKENIZER_FOLDER}: the tokenizer can't be read ({error})") from error

    def export(self, folder: str | Path, *, to: Layout = "llama", averaged: bool = False) -> Path:
        """Write the model and its model card in a Hugging Face layout, completely or not at all.

        Args:
            folder: An empty or new folder.
            to: "llama" for the built-in decoder: one tensor at a time is in memory, and more than 5 GB are split into several files
                with an index. "transformers" for a model of a configuration class of transformers: written as that class saves the
                model; imports transformers.
            averaged: As for `decoder`.

        Raises:
            BundleError: If the layout can't hold the model, or the folder is not empty.
        """
        with refusing("export", NotLlamaError, NotFoldableError, FileExistsError, raising=BundleError):
            card = (self.path / CARD).read_text(encoding="utf-8")
            if to == "transformers":
                self._write_pretrained(Path(folder), card, averaged)
            else:
                model, weights = self._decoder_weights(averaged)
                write_llama(model, self.multipliers, weights, Path(folder), self.tokenizer(), card=card)
        return Path(folder)

    def _write_pretrained(self, folder: Path, card: str, averaged: bool) -> None:
        member = self.numerics.model
        if not member.is_custom:
            raise BundleError(f"{self.path}: the built-in decoder has no class in transformers; export it to llama")
        model = self.module(averaged=averaged)
        if not isinstance(model, CausalLM):
            raise BundleError(
                f"{self.path}: {member} has no class in transformers; `Bundle.module()` is the model itself"
            )
        write_pretrained(model, folder, self.tokenizer(), context_length=member.context_length, card=card)

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        n_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        averaged: bool = False,
    ) -> str:
        """A continuation of a prompt, or the answer to a chat, as a sanity check; see `proxy_models.architecture.generate`.

        Args:
            prompt: A text, or messages with "role" and "content", written as training on chats wrote them.

        Raises:
            BundleError: If the bundle has no tokenizer, or an argument is out of range.
        """
        from proxy_models.architecture.generate import continue_text
        from proxy_models.data.prompts import END, asked

        if (tokenizer := self.tokenizer()) is None:
            raise BundleError(
                f"{self.path}: the corpus was given as tokens, so there is no tokenizer to write text with"
            )
        decoder = self.decoder(averaged=averaged)
        drawn: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
        with refusing("generate", raising=BundleError):
            if isinstance(prompt, str):
                return continue_text(decoder, tokenizer, prompt, n_tokens, **drawn)
            parts = asked([*prompt], "prompt", "messages")
            return continue_text(decoder, tokenizer, parts, n_tokens, before=END, **drawn)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        averaging = {"averaging": self.read(AVERAGING)} if (self.path / AVERAGING).exists() else {}
        outcome = {"continuation": self.read(CONTINUED)} if self._is_continuation else {"forecast": self.read(FORECAST)}
        return {**self.verification.to_dict(), **outcome, **averaging}

    @property
    def _is_continuation(self) -> bool:
        return (self.path / CONTINUED).exists()

    def __str__(self) -> str:
        """Path, hash, forecast and measured loss; with an average, both measured losses."""
        name, tell = (CONTINUED, _format_continuation) if self._is_continuation else (FORECAST, _format_forecast)
        lines = [str(self.verification), f"  loss {self._read_as(name, tell)}"]
        if (self.path / AVERAGING).exists():
            lines.append(self._read_as(AVERAGING, _format_average))
        return "\n".join(lines)

    @property
    def multipliers(self) -> ForwardMultipliers:
        """Multipliers of the forward pass, including tuned ones."""
        return self._read_as(MODEL, lambda values: ForwardMultipliers(**values["multipliers"]))

    def _decoder_weights(self, averaged: bool) -> tuple[ModelConfig, TensorFiles]:
        """The configuration of the built-in decoder, and the weights."""
        if (model := self.numerics.model).is_custom:
            raise BundleError(
                f"{self.path}: the model must be the built-in decoder, got {model}; `Bundle.module()` imports that family, and so "
                "runs its code, as does `export --to transformers` of a class of transformers"
            )
        return as_decoder(model), self.weights(averaged=averaged)

    def weights(self, *, averaged: bool = False) -> TensorFiles:
        """The weights by name, after checking that they fit the model.

        Raises:
            BundleError: As for `decoder`.
        """
        weights, model = self._tensors(AVERAGED if averaged else WEIGHTS), self.numerics.model
        found = sum(map(math.prod, weights.shapes.values()))
        if model.n_params_total > 4 * found:  # a model far too large would take long to describe
            raise BundleError(
                f"{weights.path}: weights of another model: {found:,} of them, the model has {model.n_params_total:,}"
            )
        shapes = self._read_as(MODEL, lambda _: {name: tuple(one.shape) for name, one in weight_shapes(model).items()})
        if odd := sorted(n for n in shapes | weights.shapes if shapes.get(n) != weights.shapes.get(n)):
            stored, wanted = (of.get(odd[0], "not there") for of in (weights.shapes, shapes))
            raise BundleError(
                f"{weights.path}: weights of another model: {odd[0]} is {stored}, the model's is {wanted}"
            )
        return weights

    def _tensors(self, name: str) -> TensorFiles:
        path = self.path / name
        try:
            return TensorFiles(path)
        except FileNotFoundError as error:
            missing = "the bundle has no such file; `muscale bundle --average` writes averages"
            raise BundleError(f"{path}: {missing}") from error
        except ValueError as error:
            raise BundleError(str(error)) from error


def llama_errors(member: Member) -> list[str]:
    """Return the settings that the layout "llama" can't hold; none of a custom member, which has no export to that layout."""
    return [] if member.is_custom else export_errors(as_decoder(member))


def load_bundle(path: str | Path, *, averaged: bool = False) -> Decoder:
    """The trained model of a bundle, on the CPU, after checking every file against the manifest.

    Raises:
        BundleError: If the bundle is incomplete, damaged, or of another version.
    """
    return Bundle.open(path).decoder(averaged=averaged)


def _format_continuation(done: Mapping[str, Any]) -> str:
    own, forecast = done["after"]["own"], done.get("forecast")
    if not forecast:
        return f"{own:.4f} nats per token, of {done['name']}; no forecast"
    return _format_forecast({**forecast, "forecast": forecast["loss"], "loss": own, "inside": done["inside"]})


def _format_forecast(found: Mapping[str, Any]) -> str:
    return (
        f"{found['loss']:.4f} nats per token; forecast {found['forecast']:.4f}, {found['level']:.0%} interval "
        f"[{found['low']:.4f}, {found['high']:.4f}]: {'inside' if found['inside'] else 'OUTSIDE'}"
    )


def _format_average(averaging: Mapping[str, Any]) -> str:
    return (
        f"  average of {len(averaging['checkpoints'])} checkpoints {averaging['averaged_loss']:.4f}, last weights "
        f"{averaging['loss']:.4f}"
    )
