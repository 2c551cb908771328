"""Quality of documents, predicted by a ridge regression that is fitted to texts which the user scored.

Features are hashed words and pairs of words (Weinberger et al., arXiv 0902.2206), the logarithms of their counts, at unit length.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from proxy_models.data.cleaning.cleaning_step import Over, TextVerdict, gathered, part_of, save
from proxy_models.data.cleaning.shingles import runs_of, word_hashes
from proxy_models.data.cleaning.text_shards import Document, Shard
from proxy_models.data.documents import in_validation
from proxy_models.data.records import LONGEST_FIELD
from proxy_models.data.sources import CorpusError
from proxy_models.hashing import file_sha256

FEATURES = 1 << 18
HELD_OUT = 0.2  # share of the scored texts that measure the classifier; it is fitted to the others
MIN_SCORED = 50  # fewer scored texts are refused (assumed)
_DAMPING = 1.0  # square root of the ridge penalty


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Remove documents with a low predicted score.

    Attributes:
        scores: A .jsonl or .csv file of scored texts.
        text, score: Names of its fields or columns.
        min_score: Smallest predicted score of a document that is kept; or give `keep`.
        keep: Share of documents to keep, those with the highest predicted scores.
    """

    scores: Path
    text: str = "text"
    score: str = "score"
    min_score: float | None = None
    keep: float | None = None
    name: ClassVar[str] = "quality"
    passes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if (self.min_score is None) == (self.keep is None):
            raise ValueError(f"one of min_score and keep must be given, got {self.min_score} and {self.keep}")
        if self.keep is not None and not 0 < self.keep < 1:
            raise ValueError(f"keep must lie between 0 and 1, got {self.keep}")

    def identity(self) -> dict[str, Any]:
        """Return the settings, with the hash of the scores instead of their path."""
        try:
            return asdict(self) | {"scores": file_sha256(self.scores)}
        except OSError as error:
            raise CorpusError(f"{self.scores}: can't be read ({error.strerror})") from error

    def learn(self, shards: Sequence[Shard], over: Over) -> tuple[JudgeByScore, dict[str, Any]]:
        """Fit the classifier, and predict the score of every document."""
        scored = list(self._scored())
        if len(scored) < MIN_SCORED:
            raise CorpusError(f"{self.scores}: at least {MIN_SCORED} scored texts are needed, got {len(scored)}")
        truth = np.array([score for _, score in scored])
        good = truth.mean() if self.min_score is None else self.min_score
        held_out = np.array([in_validation(text, HELD_OUT) for text, _ in scored])
        if held_out.all() or not held_out.any():
            raise CorpusError(f"{self.scores}: the scored texts must differ, got {len(scored)} with one hash")
        features = _matrix([text for text, _ in scored])
        weights, mean = _ridge(features[~held_out], truth[~held_out])
        predicted = features[held_out] @ weights + mean
        files = over(_Scorer(weights, mean))
        found = gathered(files, "scores")
        place = files[0].with_name("scores.npy")
        np.save(place, found)
        threshold = float(np.quantile(found, 1 - self.keep)) if self.keep is not None else float(good)
        facts = {
            "scored_texts": len(scored),
            "held_out_auc": _auc(predicted, truth[held_out] >= good),
            "held_out_correlation": _correlation(predicted, truth[held_out]),
            "threshold": threshold,
        }
        return JudgeByScore(place, threshold), facts

    def _scored(self) -> Iterator[tuple[str, float]]:
        read = _csv_rows if self.scores.suffix == ".csv" else _json_rows
        for place, row in read(self.scores):
            try:
                text, score = str(row[self.text]), float(row[self.score])
            except (KeyError, TypeError, ValueError) as error:
                raise CorpusError(
                    f"{self.scores}: {place}: must have the text {self.text!r} and the number {self.score!r}, got "
                    f"{repr(row)[:100]}"
                ) from error
            if not math.isfinite(score):
                raise CorpusError(f"{self.scores}: {place}: {self.score!r} must be finite, got {score}")
            yield text, score


@dataclass(frozen=True)
class JudgeByScore:
    """Judge of documents by their predicted scores."""

    scores: Path
    threshold: float

    def __call__(self, shard: Shard) -> Iterator[tuple[Document, TextVerdict]]:
        """Yield every document with its verdict."""
        for document, score in zip(shard.documents(), part_of(self.scores, shard).tolist(), strict=True):
            low = score < self.threshold
            yield document, TextVerdict("", f"predicted score {score:.3g}") if low else TextVerdict(document.text)


@dataclass(frozen=True)
class _Scorer:
    weights: NDArray[np.float64]
    mean: float

    def __call__(self, shard: Shard, target: Path) -> None:
        """Save the predicted score of each document."""
        scores = []
        for document in shard.documents():
            columns, values = _features(document.text)
            scores.append(float(self.weights[columns] @ values) + self.mean)
        save({"scores": np.array(scores)}, target)


def _features(text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the features of a text that are not 0, and their values."""
    words, _ = word_hashes(text)
    hashes = np.concatenate([words, runs_of(words, 2)]) % np.uint64(FEATURES)
    columns, counts = np.unique(hashes.astype(np.int64), return_counts=True)
    values = np.log1p(counts)
    return columns, values / max(1e-12, float(np.linalg.norm(values)))


def _matrix(texts: Sequence[str]) -> Any:
    from scipy import sparse

    rows = [_features(text) for text in texts]
    ends = np.cumsum([0, *(len(columns) for columns, _ in rows)])
    columns, values = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return sparse.csr_array((values, columns, ends), shape=(len(texts), FEATURES))


def _ridge(features: Any, truth: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the weights and the mean of the truth."""
    from scipy.sparse.linalg import lsqr

    mean = float(truth.mean())
    return lsqr(features, truth - mean, damp=_DAMPING)[0], mean


def _auc(predicted: NDArray[np.float64], is_good: NDArray[np.bool_]) -> float | None:
    """Return the probability that a good text has a higher prediction than another; None if all or none are good."""
    from scipy.stats import rankdata

    n_good, n_other = int(is_good.sum()), int((~is_good).sum())
    if not n_good or not n_other:
        return None
    return float((rankdata(predicted)[is_good].sum() - n_good * (n_good + 1) / 2) / (n_good * n_other))


def _correlation(predicted: NDArray[np.float64], truth: NDArray[np.float64]) -> float | None:
    if len(truth) < 2 or not predicted.std() or not truth.std():
        return None
    return float(np.corrcoef(predicted, truth)[0, 1])


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise CorpusError(f"{path}: line {number}: not JSON ({error})") from error


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(LONGEST_FIELD)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            for number, row in enumerate(csv.DictReader(stream)):
                yield f"row {number}", row
    except (UnicodeDecodeError, csv.Error) as error:
        raise CorpusError(f"{path}: not CSV in UTF-8 ({error})") from error
