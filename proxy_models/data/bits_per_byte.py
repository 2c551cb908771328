"""Losses in bits per byte of the held-out text, which compare models of different tokenizers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from proxy_models.data.corpus import Corpus

UNIT = "bits per byte"


def held_out_bytes(corpus: Corpus) -> dict[str, int]:
    """Return the bytes of held-out text of each source; a corpus that was written before they were counted has none.

    Of a source with prompts, they are the bytes of the text that counts.
    """
    texts = {name: files.counted_text or {} for name, files in corpus.sources.items()}
    return {name: text["held_out_bytes"] for name, text in texts.items() if "held_out_bytes" in text}


def bits_per_byte(losses: Mapping[str, float], evaluated: Corpus, study: Corpus, n_bytes: Mapping[str, int]) -> float:
    """Return the loss on the study's held-out text in bits per byte.

    The nats of each source's whole held-out text are its loss times its tokens, closing tokens included. Sources are weighted as in
    the study's loss, whose weights are shares of the study's tokens.

    Args:
        losses: Nats per token of `evaluated`, by source.
        evaluated: The study's corpus, or its text in other tokens.
        n_bytes: Bytes of held-out text by source.
    """
    nats = n_bytes_seen = 0.0
    for name, weight in study.evaluation_weights.items():
        per_study_token = weight / study.sources[name].n_validation_counted
        nats += per_study_token * evaluated.sources[name].n_validation_counted * losses[name]
        n_bytes_seen += per_study_token * n_bytes[name]
    return nats / (math.log(2) * n_bytes_seen)
