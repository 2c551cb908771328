"""A corpus's tokenizer as the files that `transformers.AutoTokenizer` reads, with the ids that the model was trained on.

transformers also adds no token to a text: a template that would add tokens is left out, and special tokens that
are spelled out in a text are encoded as plain characters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proxy_models.data.tokenizer import BYTE_ALPHABET, END_OF_TEXT, BytesTokenizer, FileTokenizer, Tokenizer, load_json


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, context_length: int) -> list[Path]:
    """Write `tokenizer.json` and `tokenizer_config.json` into a folder, and return their paths.

    Raises:
        ValueError: If the class of the tokenizer is unknown.
    """
    content = _content(tokenizer)
    end = tokenizer.end_name if isinstance(tokenizer, FileTokenizer) else END_OF_TEXT
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,  # added to a text only if `add_bos_token` asks for it, as in lm-eval
        "eos_token": end,
        "model_max_length": context_length,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    before = content["pre_tokenizer"] or {}
    if "add_prefix_space" in before:  # the default of transformers 4 overrides the value in the file
        settings["add_prefix_space"] = before["add_prefix_space"]
    paths = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    for path, values in zip(paths, (content, settings), strict=True):
        path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return paths


def same_tokenizer(path: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a `tokenizer.json` gives the same ids as a tokenizer; a template that adds tokens does not count.

    Raises:
        CorpusError: If the file can't be read.
    """
    theirs, ours = json.loads(load_json(path.read_bytes(), path).to_str()), _content(tokenizer)
    return all(theirs.get(part) == ours.get(part) for part in ("normalizer", "pre_tokenizer", "model", "added_tokens"))


def _content(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of a tokenizer's `tokenizer.json`."""
    if isinstance(tokenizer, FileTokenizer):
        return {**json.loads(tokenizer.to_json()), "post_processor": None}
    if isinstance(tokenizer, BytesTokenizer):
        return _bytes_as_bpe()
    raise ValueError(f"no tokenizer.json is known for a tokenizer of class {type(tokenizer).__name__}")


def _bytes_as_bpe() -> dict[str, Any]:
    """Return byte-level BPE without merges: the id of a byte is its value, and 0 closes documents.

    Byte 0 is missing in the vocabulary and so encodes as the unknown token, id 0, as in `BytesTokenizer`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in _characters().items() if byte}
    model = models.BPE(vocab={END_OF_TEXT: 0, **vocabulary}, merges=[], unk_token=END_OF_TEXT, fuse_unk=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return dict(json.loads(tokenizer.to_str()))


def _characters() -> dict[int, str]:
    """Return the printable character for each byte in byte-level BPE (Radford et al., 2019, their released encoder).

    A byte that is printable in Latin-1 keeps its character; the other bytes have the characters from U+0100 on, in their order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTE_ALPHABET) if byte not in printable]
    stand_ins = {byte: chr(BYTE_ALPHABET + number) for number, byte in enumerate(others)}
    return {byte: chr(byte) for byte in printable} | stand_ins
