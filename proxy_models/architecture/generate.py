"""Text from a model of any family, greedy or sampled with a seed, as a sanity check of its weights.

The built-in decoder keeps keys and values until the context is full. Then every token takes a pass over the whole context, because its
positions have moved; in other families each token takes such a pass.
For speed beyond this, export the model and use an inference server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from proxy_models.architecture.decoder import Cache, Decoder
from proxy_models.architecture.member import Member
from proxy_models.architecture.model_ranks import Ranks
from proxy_models.data.tokenizer import Tokenizer, Tokens


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: ArrayLike,
    n_tokens: int,
    *,
    member: Member | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
    until: Callable[[Tokens], bool] | None = None,
    n_ids: int | None = None,
) -> Tokens:
    """Continue a prompt; if the text becomes longer than the context, the model sees the last tokens.

    The ranks of a sharded model call this together; their prompts may differ.

    Args:
        model: A model on any device; dropout is off during generation.
        prompt: Ids, at least one.
        n_tokens: Largest number of tokens to add.
        member: The member that the model is, for its vocabulary and context; not needed for the decoder.
        temperature: 0 takes the most likely token; otherwise the logits are divided by the temperature and the token is drawn.
        top_p: Draw among the most likely tokens whose summed probabilities reach `top_p` (Holtzman et al., arXiv 1904.09751,
            section 3.1).
        seed: Seed of the draws; they are the same on every device if the logits are.
        stop: Id that ends the text, as the last token.
        until: Called with the new ids after each of them; True ends the text.
        n_ids: Only ids below this are chosen, since a model's vocabulary may be larger than its tokenizer's.

    Returns:
        The new ids.

    Raises:
        ValueError: If an argument is out of its range.
    """
    sizes: Member = member or cast(Decoder, model).config
    vocab_size = sizes.vocab_size
    seen = np.asarray(prompt, dtype=np.int64)
    if seen.ndim != 1 or not len(seen):
        raise ValueError(f"the prompt must be a row of at least one id, got shape {seen.shape}")
    if seen.min() < 0 or seen.max() >= vocab_size:
        raise ValueError(f"ids must lie below {vocab_size}, got {seen.min()} to {seen.max()}")
    if n_tokens < 1:
        raise ValueError(f"n_tokens must be at least 1, got {n_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if not 1 <= (n_ids := vocab_size if n_ids is None else n_ids) <= vocab_size:
        raise ValueError(f"n_ids must lie in 1 to {vocab_size}, got {n_ids}")
    generator = torch.Generator().manual_seed(seed)
    device, was_training, ranks = next(model.parameters()).device, model.training, Ranks.of(model)
    tokens = torch.from_numpy(seen)
    model.eval()
    try:
        cache = Cache()
        for _ in range(n_tokens):
            if len(tokens) > sizes.context_length:
                cache = Cache()
            ranks.gather(True)  # another pass follows
            context = tokens[None, -sizes.context_length :].to(device)
            next_logits = model.next_logits(context, cache) if isinstance(model, Decoder) else model(context)[:, -1]
            logits = next_logits[0, :n_ids].double().cpu()
            chosen = _choose(logits, temperature, top_p, generator)
            tokens = torch.cat((tokens, chosen))
            if stop is not None and int(chosen) == stop:
                break
            if until is not None and until(tokens[len(seen) :].numpy()):
                break
        while any(ranks.gather(False)):  # another rank still writes
            model(tokens[None, :1].to(device))
    finally:
        model.train(was_training)
    return tokens[len(seen) :].numpy().astype(np.uint32)


def _choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Return one id, shape (1,), from the logits (n_ids,)."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    descending, ids = torch.softmax(logits / temperature, dim=0).sort(descending=True, stable=True)
    before = descending.cumsum(0) - descending  # excludes the token itself, so that the likeliest is always kept
    kept = descending.where(before < top_p, 0.0)
    return ids[torch.multinomial(kept, 1, generator=generator)]


def continue_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | Sequence[str],
    n_tokens: int,
    *,
    member: Member | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    before: str | None = None,
) -> str:
    """Return the text after a prompt that begins a document, up to its end or `n_tokens`; raise ValueError like `generate`.

    Args:
        prompt: A text, or parts that are tokenized one by one, as those of a chat are (`proxy_models.data.prompts.asked`).
        before: Text that ends the answer and is left out of it; None: only the document's end does.
    """
    end, parts = tokenizer.end_of_document, [prompt] if isinstance(prompt, str) else prompt
    ids = np.concatenate(tokenizer.encode([part.encode() for part in parts]))
    start = len(tokenizer.decode(ids))

    def text(new: Tokens) -> str:
        return tokenizer.decode(np.append(ids, new[new != end]))[start:]  # alone it would lose its first space

    new = generate(
        model,
        [end, *ids.tolist()],  # in training, a document begins with the token that closes the previous document
        n_tokens,
        member=member,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=end,
        until=None if before is None else lambda new: before in text(new),
        n_ids=tokenizer.vocab_size,
    )
    found = text(new)
    return found if before is None else found.partition(before)[0]
