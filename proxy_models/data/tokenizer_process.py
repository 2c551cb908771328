"""Process that trains byte-level BPE or Unigram. The library ignores signals while it trains, so the caller ends this process instead.

The process runs this file and imports nothing of the project, so that it starts in a tenth of a second. Standard input has the texts,
each after its length in 8 bytes; standard output receives the `tokenizer.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

LONGEST_WORD = 1000  # characters (assumed); words of ordinary text are shorter, so their training is unchanged
# a word of ByteLevel has characters of one class, and perhaps a space before them
_CLASSES = (
    r"\p{L}",
    r"\p{N}",
    r"[^\s\p{L}\p{N}]",
    r"\s",
)


def train(texts: Iterator[str], kind: str, vocab_size: int, end_of_text: str) -> str:
    """Train on the texts with long words cut, since the time of a merge grows with the square of a word's length.

    The trained tokenizer does not cut words, since its encoder handles any length.
    """
    tokenizer = Tokenizer(models.BPE() if kind == "bpe" else models.Unigram())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    longer = Regex("|".join(f"{one}{{{LONGEST_WORD}}}(?={one})" for one in _CLASSES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(longer, "isolated"), words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = (trainers.BpeTrainer if kind == "bpe" else trainers.UnigramTrainer)(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer.to_str() if kind == "bpe" else _repeatable(tokenizer.to_str())


def _repeatable(content: str) -> str:
    """Return the Unigram tokenizer with pieces in a fixed order.

    The library orders pieces of equal score, and adds up probabilities, in the random order of its hash maps. It gives bytes that the
    text lacks the lowest score, plus .0001 for each in that order; here they all have the lowest score. Sums agree to 6 digits.
    """
    values = json.loads(content)
    end, *pieces = values["model"]["vocab"]
    lowest = min(score for _, score in pieces)
    absent = lowest + 1e-4 * len(pre_tokenizers.ByteLevel.alphabet())
    scores = {piece: lowest if len(piece) == 1 and score <= absent else score for piece, score in pieces}
    rounded = [[piece, round(score, 6)] for piece, score in scores.items()]
    values["model"]["vocab"] = [end, *sorted(rounded, key=lambda entry: (-entry[1], entry[0]))]
    return json.dumps(values, ensure_ascii=False)


def _read() -> Iterator[str]:
    while size := sys.stdin.buffer.read(8):
        yield sys.stdin.buffer.read(int.from_bytes(size)).decode()


def _end_with(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    sys.stdout.buffer.write(train(_read(), sys.argv[1], int(sys.argv[2]), sys.argv[3]).encode())
