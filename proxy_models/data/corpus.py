"""Corpus of a study: one tokenized source, or a mixture of several, in one folder with one manifest.

    folder/manifest.json, train.bin, validation.bin        one source
    folder/manifest.json, sources/<name>/…                 a mixture
    folder/tokenizer.json, tokenizer.manifest.json         if the tokenizer is not bytes
    folder/manifest.json                                   without token files: data that a training program reads itself

`corpus_writing` writes corpora.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import pandas as pd

from proxy_models.data.kept_tokenizer import kept_tokenizer
from proxy_models.data.mixture import MAX_EPOCHS, Mixture
from proxy_models.data.record_packing import Packing
from proxy_models.data.sources import CorpusError, Split
from proxy_models.data.token_files import MANIFEST, STATED, TokenFiles, read_manifest
from proxy_models.data.tokenizer import Tokenizer, Tokens
from proxy_models.hashing import content_key

ONE_SOURCE = "corpus"  # name of the source of a corpus without a mixture
SOURCES = "sources"
OWN_DATA = "own_data"
NAME = re.compile(r"[A-Za-z0-9_-]+")
NAMED = "a source's name must be of letters, digits, - and _"  # the name is also the folder's name


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A finished corpus in `folder`.

    Attributes:
        sources: The token files of each source, by name; a single source is named "corpus". None: a program reads its own data.
        mixture: The proportions of the sources, or None with a single source.
        held_out: Corpus with the same tokenizer, whose held-out splits are evaluated instead of this corpus's; None: this corpus's.
    """

    folder: Path
    manifest: dict[str, Any]
    sources: dict[str, TokenFiles]
    mixture: Mixture | None = None
    held_out: Corpus | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a corpus that `corpus_writing` wrote.

        Raises:
            CorpusError: If a manifest is missing or broken, or the size of a token file differs from the manifest.
        """
        manifest = read_manifest(folder)
        if OWN_DATA in manifest:
            if not (isinstance(manifest[OWN_DATA], str) and isinstance(manifest.get("key"), str)):
                raise CorpusError(f"{folder / MANIFEST}: {OWN_DATA} and key must be text, got {manifest}")
            return cls(folder=folder, manifest=manifest, sources={})
        if "mixture" not in manifest:
            files = TokenFiles.open(folder)
            return cls(folder=folder, manifest=files.manifest, sources={ONE_SOURCE: files})
        try:
            mixture = Mixture.from_dict(manifest["mixture"])
            keys = {name: str(manifest[SOURCES][name]) for name in mixture.names}
            _ = str(manifest["key"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{folder / MANIFEST}: not a mixture's manifest ({error})") from error
        if odd := [name for name in keys if not NAME.fullmatch(name)]:
            raise CorpusError(f"{folder / MANIFEST}: {NAMED}, got {odd[0]!r}")
        sources = {name: TokenFiles.open(folder / SOURCES / name) for name in keys}
        for name, files in sources.items():
            if files.key != keys[name]:
                raise CorpusError(f"{files.folder}: the mixture's manifest states key {keys[name]}, found {files.key}")
        return cls(folder=folder, manifest=manifest, sources=sources, mixture=mixture)

    @property
    def key(self) -> str:
        """Hash of the content: of all token files, how they were made, and the proportions; independent of their location."""
        own = str(self.manifest["key"])
        return content_key([own, {"held_out": self.held_out.key}]) if self.held_out else own

    def evaluated_on(self, held_out: Corpus) -> Self:
        """Return the same training data, evaluated on the held-out splits of another corpus with the same tokenizer."""
        return replace(self, held_out=held_out)

    @property
    def vocab_size(self) -> int:
        """Upper limit of token ids, exclusive; 0 without token files."""
        return max((files.vocab_size for files in self.sources.values()), default=0)

    @property
    def is_own_data(self) -> bool:
        """True if a training program reads its own data, of which only a name is known."""
        return OWN_DATA in self.manifest

    @property
    def all_count(self) -> bool:
        """True if every token of every source counts in the loss; False if a source has prompts."""
        return all(files.all_count for files in self.sources.values())

    def packing(self, source: str, split: Split, context_length: int) -> Packing | None:
        """Return the sequences of a source with prompts, which begin with a record; None for other sources."""
        files = self.sources[source]
        if files.all_count:
            return None
        if (split, context_length) not in files.packings:
            tokens = files.train if split == "train" else files.validation
            end = self.tokenizer().end_of_document
            files.packings[split, context_length] = Packing.of(tokens, context_length, end)
        return files.packings[split, context_length]

    @property
    def n_tokens(self) -> int:
        """Tokens in the training splits of all sources."""
        return sum(files.n_tokens for files in self.sources.values())

    @property
    def n_validation_tokens(self) -> int:
        """Tokens in the validation splits of all sources."""
        return sum(files.n_validation_tokens for files in self.sources.values())

    @property
    def train(self) -> Tokens:
        """Training tokens of the single source, memory-mapped.

        Raises:
            CorpusError: If the corpus is a mixture; `batches.training_stream` reads both.
        """
        return self._only("training_stream").train

    @property
    def validation(self) -> Tokens:
        """Validation tokens of the single source, memory-mapped.

        Raises:
            CorpusError: If the corpus is a mixture; `batches.evaluation_sets` reads both.
        """
        return self._only("evaluation_sets").validation

    def _only(self, instead: str) -> TokenFiles:
        if self.mixture is not None:
            raise CorpusError(f"{self.folder}: a mixture of {', '.join(self.sources)}; read it with batches.{instead}")
        return self.sources[ONE_SOURCE]

    @property
    def stages_by_fraction(self) -> bool:
        """True if a stage of the mixture ends at a fraction of the run, so that a run's data depend on its length."""
        return self.mixture is not None and not self.mixture.is_resolved

    def mixture_of(self, run_tokens: int | None) -> Mixture | None:
        """Return the mixture that a run reads, with its ends in tokens; None for one source.

        Args:
            run_tokens: Length of the run; needed if a stage ends at a fraction of it.

        Raises:
            ValueError: If the length is needed and not given.
        """
        if self.stages_by_fraction and run_tokens is None:
            raise ValueError("the corpus's stages end at fractions of the run: run_tokens must be given")
        return self.mixture.resolve(run_tokens) if self.mixture and run_tokens is not None else self.mixture

    @property
    def evaluation_weights(self) -> dict[str, float]:
        """Weight of each source's loss in the corpus's loss: its share in the last stage."""
        return self.mixture.stages[-1].shares if self.mixture else {ONE_SOURCE: 1.0}

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token that counts in the training loss, including closing tokens; None of tokens and of a program's data.

        The weights of sources are those of the corpus's loss, times the share of their tokens that count.
        """
        each = {name: files.bytes_per_token for name, files in self.sources.items()}
        known = {name: value for name, value in each.items() if value is not None}
        if not each or len(known) < len(each):
            return None
        weights = {name: self.evaluation_weights[name] * files.counted_share for name, files in self.sources.items()}
        return sum(weights[name] * known[name] for name in each) / sum(weights.values())

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the text.

        Raises:
            CorpusError: If the corpus was given as tokens.
        """
        if not self._has_tokenizer:
            raise CorpusError(f"{self.folder}: the corpus was given as tokens, their tokenizer is not known")
        return kept_tokenizer(self.folder)

    @property
    def end_of_document(self) -> int | None:
        """Id that closes documents; None if the corpus was given as tokens."""
        return self.tokenizer().end_of_document if self._has_tokenizer else None

    @property
    def _has_tokenizer(self) -> bool:
        return any(files.manifest["tokenizer"] != STATED for files in self.sources.values())

    def epochs(
        self, n_tokens: int, context_length: int | None = None, *, run_tokens: int | None = None
    ) -> dict[str, float]:
        """Return how many times a run of `n_tokens` sees each source.

        A pass over a source with prompts takes the tokens of all its sequences (`packing`), which leave out the ends of long records
        and repeat the beginnings of others.

        Args:
            context_length: That of the run; needed if a source has prompts.
            run_tokens: Length of the run at whose fractions stages end, if these tokens are a part of it, or go on behind its end.

        Raises:
            ValueError: If it is needed and not given.
        """
        mixture = self.mixture_of(run_tokens or n_tokens)
        planned = mixture.tokens(n_tokens) if mixture else {ONE_SOURCE: float(n_tokens)}
        return {name: planned[name] / self._epoch_tokens(name, context_length) for name in self.sources}

    def _epoch_tokens(self, source: str, context_length: int | None) -> int:
        files = self.sources[source]
        if files.all_count:
            return files.n_tokens
        if context_length is None:
            raise ValueError(f"source {source} has prompts, so context_length must be given to count epochs")
        packing = cast(Packing, self.packing(source, "train", context_length))
        return len(packing.starts) * context_length

    def warnings(self, n_tokens: int, context_length: int | None = None, *, run_tokens: int | None = None) -> list[str]:
        """Return a line for each source that a run of `n_tokens` sees more than four times; the arguments are those of `epochs`."""
        return [
            f"{name}: {epochs:.1f} epochs of its {self._epoch_tokens(name, context_length):,} tokens in a run of {n_tokens:,}; beyond "
            f"{MAX_EPOCHS:g} repeated data is worth much less than new (Muennighoff et al., arXiv 2305.16264)"
            for name, epochs in self.epochs(n_tokens, context_length, run_tokens=run_tokens).items()
            if epochs > MAX_EPOCHS
        ]

    def table(self) -> pd.DataFrame:
        """Return one row per source: tokens, fertility (tokens per word), bytes per token, share at the end of a run, unread files.

        If a source has prompts, a column has the share of the tokens that count in the loss.
        Sources that state their language have it in a column, so that fertilities of languages stand next to each other.
        """
        rows = [
            (
                name,
                n.n_tokens,
                n.n_validation_tokens,
                n.fertility,
                n.bytes_per_token,
                f"{self.evaluation_weights[name]:.1%}",
                n.n_left_out,
            )
            for name, n in self.sources.items()
        ]
        columns = ["source", "training", "validation", "tokens/word", "bytes/token", "share", "files left out"]
        table = pd.DataFrame(rows, columns=columns).astype({"tokens/word": float, "bytes/token": float})
        if not self.all_count:
            table.insert(3, "counts", [f"{files.counted_share:.1%}" for files in self.sources.values()])
        languages = [files.manifest["source"].get("language") for files in self.sources.values()]
        if any(languages):
            table.insert(1, "language", languages)
        return table

    def __str__(self) -> str:
        if self.is_own_data:
            return f"the trainer reads its own data, {self.manifest[OWN_DATA] or 'without a name'}"
        shown = self.table().to_string(
            index=False,
            na_rep="–",
            float_format="{:.2f}".format,
            formatters=dict.fromkeys(("training", "validation"), "{:,}".format),
        )
        return str(shown)
