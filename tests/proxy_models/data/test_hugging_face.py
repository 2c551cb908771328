"""Exported tokenizers give the ids that the model was trained on, on any text."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers import Tokenizer as Loaded
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from proxy_models.data.hugging_face import write_tokenizer
from proxy_models.data.tokenizer import BytesTokenizer, FileTokenizer, Tokenizer, train_bpe, train_unigram

TEXTS = [
    "the rate of the batch is the rate of the step",
    "  spaces  and\ttabs\r\n\n and an end \n",
    "Ünïcödé Ā Ŀ 🙂 – 數據 \u2028 \U0010ffff",
    "what <|endoftext|> means when it is spelled out, and </s>, [CLS]",
    "a byte 0 \0 within",
    "don't 1234567 __init__(self)",
    "",
]


def bpe(tmp_path: Path) -> FileTokenizer:
    path = tmp_path / "bpe.json"
    path.write_text(train_bpe([text.encode() for text in TEXTS * 3], 300))
    return FileTokenizer(path)


def unigram(tmp_path: Path) -> FileTokenizer:
    path = tmp_path / "unigram.json"
    path.write_text(train_unigram([Path(__file__).read_bytes()], 300))
    return FileTokenizer(path)


def sentencepiece(tmp_path: Path, kind: str) -> FileTokenizer:
    library: Any = pytest.importorskip("sentencepiece")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(__file__).read_text().splitlines()),
        model_prefix=str(tmp_path / "given"),
        model_type=kind,
        vocab_size=400,
        byte_fallback=True,
        minloglevel=3,
    )
    return FileTokenizer(tmp_path / "given.model")


def with_template(tmp_path: Path) -> FileTokenizer:
    """A tokenizer that puts tokens around a text, cuts and pads it; a corpus uses none of this."""
    loaded = Loaded(BPE())
    loaded.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = BpeTrainer(
        vocab_size=320, special_tokens=["[CLS]", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    loaded.train_from_iterator(TEXTS, trainer)
    loaded.add_special_tokens([AddedToken("[CLS]", special=True)])
    loaded.post_processor = processors.TemplateProcessing(
        single="[CLS] $A </s>", special_tokens=[("[CLS]", 0), ("</s>", 1)]
    )
    loaded.enable_truncation(8)
    loaded.enable_padding(length=8)
    path = tmp_path / "given.json"
    loaded.save(str(path))
    return FileTokenizer(path)


def in_transformers(transformers: ModuleType, tokenizer: Tokenizer, folder: Path) -> Any:
    """The tokenizer that AutoTokenizer loads, with the config of a Llama."""
    from proxy_models.architecture.config import ModelConfig
    from proxy_models.architecture.decoder import Decoder
    from proxy_models.architecture.llama import write_llama
    from proxy_models.architecture.parametrization import ForwardMultipliers

    config = ModelConfig(d_model=16, n_layers=1, context_length=32, vocab_size=512)
    multipliers = ForwardMultipliers(embedding=1.0, branch=1.0, readout=1.0, attention=0.25)
    write_llama(config, multipliers, dict(Decoder(config).named_parameters()), folder, tokenizer)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram", "file", "sentencepiece-bpe", "sentencepiece-unigram"])
def test_transformers_gives_the_ids_that_the_corpus_has(kind: str, transformers: ModuleType, tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], Tokenizer]] = {
        "bytes": lambda _: BytesTokenizer(),
        "bpe": bpe,
        "unigram": unigram,
        "sentencepiece-bpe": lambda folder: sentencepiece(folder, "bpe"),
        "sentencepiece-unigram": lambda folder: sentencepiece(folder, "unigram"),
        "file": with_template,
    }
    ours = makers[kind](tmp_path)
    theirs = in_transformers(transformers, ours, tmp_path / "llama")
    for text in TEXTS:
        (expected,) = ours.encode([text.encode()])
        for add_special_tokens in (True, False):
            found = theirs(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert found == expected.tolist(), text
        if "\0" not in text:
            decoded = theirs.decode(expected.tolist(), skip_special_tokens=True)
            assert decoded == ours.decode(expected)
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_document
    assert len(theirs) == ours.vocab_size
    assert theirs.model_max_length == 32


def test_the_end_of_a_document_survives_and_can_be_left_out(transformers: ModuleType, tmp_path: Path) -> None:
    theirs = in_transformers(transformers, BytesTokenizer(), tmp_path / "llama")
    assert theirs.decode([104, 105, 0]) == "hi<|endoftext|>"
    assert theirs.decode([104, 105, 0], skip_special_tokens=True) == "hi"


def test_bytes_that_are_no_text_are_decoded_all_the_same(transformers: ModuleType, tmp_path: Path) -> None:
    theirs = in_transformers(transformers, BytesTokenizer(), tmp_path / "llama")
    assert theirs.decode([0xC3, 0x41, 0xFF]) == "\ufffdA\ufffd"
    assert theirs.decode(list(range(1, 128))) == bytes(range(1, 128)).decode()


def test_a_tokenizer_of_another_make_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of class Foreign"):
        write_tokenizer(Foreign(), tmp_path, context_length=8)


class Foreign:
    key = "foreign"
    vocab_size = 2
    end_of_document = 0

    def encode(self, texts: Any) -> Any:
        return []

    def decode(self, tokens: Any) -> str:
        return ""

    def lost(self, text: str) -> int:
        return 0
