"""Process that trains byte-level BPE. The library ignores signals while it trains, so the caller ends this process instead.

The process runs this file and imports nothing of the project, so that it starts in a tenth of a second. Standard input has the texts,
each after its length in 8 bytes; standard output receives the `tokenizer.json`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

LONGEST_WORD = 1000  # characters (assumed); words of ordinary text are shorter, so their training is unchanged
_CLASSES = (
    r"\p{L}",
    r"\p{N}",
    r"[^\s\p{L}\p{N}]",
    r"\s",
)  # a word of ByteLevel has characters of one class, and perhaps a space before them


def train(texts: Iterator[str], vocab_size: int, end_of_text: str) -> str:
    """Train on the texts with long words cut, since the time of a merge grows with the square of a word's length.

    The trained tokenizer does not cut words, since its encoder handles any length.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    longer = Regex("|".join(f"{one}{{{LONGEST_WORD}}}(?={one})" for one in _CLASSES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(longer, "isolated"), words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer.to_str()


def _read() -> Iterator[str]:
    while size := sys.stdin.buffer.read(8):
        yield sys.stdin.buffer.read(int.from_bytes(size)).decode()


def _end_with(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    sys.stdout.buffer.write(train(_read(), int(sys.argv[1]), sys.argv[2]).encode())
