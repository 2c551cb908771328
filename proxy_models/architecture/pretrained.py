"""Export of a trained model of a transformers configuration class in transformers' format, without muP's multipliers.

The embedding's multiplier goes into its table and the readout's into its matrix. A tied table can't absorb two different multipliers,
so it is written as two tables. A block's multiplier scales what the whole block adds (`causal_lm`), which no weight inside the block
can express, so it has to be 1, as at the depth of the base. The folded model is compared with the trained model before any file is
written.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch

from proxy_models.architecture.causal_lm import CausalLM
from proxy_models.architecture.config_family import allows_none
from proxy_models.data.hugging_face import write_tokenizer
from proxy_models.data.tokenizer import Tokenizer
from proxy_models.files import atomic_directory

_TOLERANCE = 1e-4
"""Tolerance relative to the largest logit; premultiplied matrices change fp32 rounding by about 1e-6."""


class NotFoldableError(ValueError):
    """Error for a model whose multipliers can't go into its weights."""


def folded(model: CausalLM) -> Any:
    """Return a model of transformers' class that has the multipliers in its weights and gives the same logits.

    Args:
        model: Trained model on the CPU, in fp32.

    Raises:
        NotFoldableError: If blocks have a multiplier other than 1, or the logits differ.
    """
    from transformers import AutoModelForCausalLM

    if (branch := model.branch_multiplier.item()) != 1:
        raise NotFoldableError(
            f"blocks of {_name(model)} must have the multiplier 1, as at the depth of the study's base; got {branch:g}, which "
            "no weight inside a block can express"
        )
    network = cast(Any, model.network)
    embedding, readout = model.embedding_multiplier.item(), model.readout_multiplier.item()
    config = deepcopy(network.config)
    if network.get_output_embeddings().weight is network.get_input_embeddings().weight:
        config.tie_word_embeddings = embedding == readout
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(network.state_dict())
    table, matrix = plain.get_input_embeddings().weight, plain.get_output_embeddings().weight
    with torch.no_grad():
        table.mul_(embedding)
        if matrix is not table:
            matrix.mul_(readout)
        _require_same_logits(model.eval(), plain.eval(), config.vocab_size)
    return plain


def write_pretrained(
    model: CausalLM, folder: Path, tokenizer: Tokenizer | None, *, context_length: int, card: str | None = None
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load by `from_pretrained`.

    Args:
        folder: Must not exist or be empty; it appears with all files or not at all.
        tokenizer: None if the corpus was given as tokens; then no tokenizer is written.
        context_length: Tokens in one training sequence.
        card: Text of a README.md in the folder.

    Raises:
        NotFoldableError: As `folded`; nothing is written then.
        FileExistsError: If there is something in the folder.
    """
    plain = folded(model)
    end = tokenizer.end_of_document if tokenizer else None
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(plain.generation_config, name, end)
        if name != "pad_token_id" and (end is not None or allows_none(type(plain.config), name)):
            setattr(plain.config, name, end)
    with atomic_directory(folder) as unfinished:
        plain.save_pretrained(unfinished)
        if tokenizer is not None:
            write_tokenizer(tokenizer, unfinished, context_length=context_length)
        if card is not None:
            (unfinished / "README.md").write_text(card, encoding="utf-8")


def _require_same_logits(model: CausalLM, plain: Any, vocab_size: int) -> None:
    tokens = torch.randint(vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = model(tokens)
    off = ((plain(input_ids=tokens, use_cache=False).logits - expected).abs().max() / expected.abs().max()).item()
    if not off <= _TOLERANCE:
        raise NotFoldableError(
            f"{_name(model)} with its multipliers in its weights must give the same logits, but differs by {off:.2g} of the largest"
        )


def _name(model: CausalLM) -> str:
    return type(model.network).__name__
