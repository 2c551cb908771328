"""Generation: a trained model continues as its data does, seeds decide samples, and arguments out of range are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proxy_models.architecture.config import ModelConfig, as_decoder
from proxy_models.architecture.decoder import Cache, Decoder
from proxy_models.architecture.generate import continue_text, generate
from proxy_models.data.corpus import Corpus
from proxy_models.data.tokenizer import BytesTokenizer, FileTokenizer
from proxy_models.recipes.hyperparameters import Hyperparameters
from proxy_models.recipes.segments import chain
from proxy_models.training.numerics import Numerics
from proxy_models.training.optimizer import initialize
from proxy_models.training.state import restore
from proxy_models.training.trainer import Trainer


@pytest.fixture
def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(d_model=32, n_layers=2, context_length=16, vocab_size=40, mlp_dropout=0.5)).train()


def test_a_trained_model_continues_its_text_with_words_of_its_data(
    trainer: Trainer, numerics: Numerics, corpus: Corpus, hyperparameters: Hyperparameters
) -> None:
    state, segments = None, chain(hyperparameters, 4 * 32 * 400)
    for segment in segments:
        state = trainer.train(numerics, segment, state).state
    assert state is not None
    model = Decoder(as_decoder(numerics.model))
    recipe = segments[-1].recipe
    initialize(model, numerics.parametrization(recipe.optimizer), recipe, seed=0)
    weights = {name: tensor for name, tensor in state.tensors.items() if name.startswith("weight/")}
    restore(model, torch.optim.SGD(model.parameters()), weights)
    text = continue_text(model, corpus.tokenizer(), "loss width ", 60)
    known = set(corpus.tokenizer().decode(np.asarray(corpus.train)).split())
    assert len(text) == 60
    assert len(text.split()) > 5
    assert set(text.split()[1:-1]) <= known


def test_greedy_takes_the_likeliest_token_and_sees_no_more_than_the_context(decoder: Decoder) -> None:
    new = generate(decoder, [3, 4], 30)
    whole = [3, 4, *new.tolist()]
    decoder.eval()
    for position in range(2, len(whole)):
        context = torch.tensor([whole[max(0, position - 16) : position]])
        assert whole[position] == int(decoder(context)[0, -1].argmax())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"positions": "learned"},
        {"positions": "alibi"},
        {"queries_per_kv": 2},
        {"rotary_fraction": 0.5},
        {"document_separator": 7},
        {"document_separator": 7, "positions": "alibi"},
        {"qk_norm": True, "parallel": True},
        {"attention_window": 5},
        {"attention_window": 3, "global_attention_every": 2, "positions": "learned"},
        {"attention_window": 6, "document_separator": 7, "positions": "alibi", "queries_per_kv": 2},
    ],
)
def test_a_cache_gives_the_logits_of_a_pass_over_all_tokens(change: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = ModelConfig(d_model=32, n_layers=3, context_length=16, vocab_size=40, **({"head_dim": 8} | change))
    model, cache = Decoder(config).eval(), Cache()
    tokens = torch.randint(40, (2, 16))
    tokens[0, [2, 9]], tokens[1, 5] = 7, 7
    with torch.no_grad():
        for time in range(4, 17):
            expected = model(tokens[:, :time])[:, -1]
            torch.testing.assert_close(model.next_logits(tokens[:, :time], cache), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="16"):
        model.next_logits(tokens[:, :8], cache)


def test_the_dropout_of_training_is_off_and_comes_back(decoder: Decoder) -> None:
    assert np.array_equal(generate(decoder, [1], 20), generate(decoder, [1], 20))
    assert decoder.training


def test_a_seed_decides_the_sample(decoder: Decoder) -> None:
    one, same, other = (generate(decoder, [1], 40, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_samples_follow_the_model_s_probabilities_at_the_temperature(decoder: Decoder) -> None:
    decoder.eval()
    with torch.no_grad():
        expected = torch.softmax(decoder(torch.tensor([[5]]))[0, -1].double() / 0.5, 0).numpy()
    drawn = [int(generate(decoder, [5], 1, temperature=0.5, seed=seed)[0]) for seed in range(800)]
    found = np.bincount(drawn, minlength=40) / len(drawn)
    np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(expected.max() / len(drawn)))


def test_top_p_leaves_the_fewest_tokens_that_reach_it_and_always_one(decoder: Decoder) -> None:
    decoder.eval()
    with torch.no_grad():
        likely = torch.softmax(decoder(torch.tensor([[5]]))[0, -1].double(), 0).sort(descending=True)
    kept = 1 + int((likely.values.cumsum(0) < 0.3).sum())
    drawn = {int(generate(decoder, [5], 1, temperature=1.0, top_p=0.3, seed=seed)[0]) for seed in range(300)}
    assert drawn == set(likely.indices[:kept].tolist())
    greedy = generate(decoder, [5], 20)
    assert np.array_equal(generate(decoder, [5], 20, temperature=1.0, top_p=1e-9), greedy)


def test_it_stops_at_the_end_of_a_document_and_stays_within_the_tokenizer(decoder: Decoder) -> None:
    free = generate(decoder, [1], 30, temperature=3.0)
    assert free.max() >= 20
    within = generate(decoder, [1], 30, temperature=3.0, n_ids=20)
    assert within.max() < 20
    stop = int(free[10])
    stopped = generate(decoder, [1], 30, temperature=3.0, stop=stop)
    assert stopped.tolist() == free.tolist()[: free.tolist().index(stop) + 1]
    until = generate(decoder, [1], 30, temperature=3.0, until=lambda new: len(new) == 7)
    assert until.tolist() == free.tolist()[:7]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": []}, r"at least one id, got shape \(0,\)"),
        ({"prompt": [40]}, "below 40, got 40 to 40"),
        ({"n_tokens": 0}, "n_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be finite and not negative, got -1.0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"n_ids": 41}, "n_ids must lie in 1 to 40, got 41"),
    ],
)
def test_arguments_out_of_range_are_refused(decoder: Decoder, changed: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"prompt": [1], "n_tokens": 1, **changed}
    with pytest.raises(ValueError, match=message):
        generate(decoder, values.pop("prompt"), values.pop("n_tokens"), **values)


def test_a_prompt_begins_a_document() -> None:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(d_model=32, n_layers=1, context_length=16))
    ids = generate(model, [0, *b"abc"], 8, stop=0)
    assert continue_text(model, BytesTokenizer(), "abc", 8) == BytesTokenizer().decode(ids[ids != 0])
    assert len(continue_text(model, BytesTokenizer(), "", 8)) > 0, "an empty prompt is the beginning of a document"


def test_an_answer_ends_before_its_mark_and_parts_are_tokenized_alone() -> None:
    torch.manual_seed(0)
    model, tokenizer = Decoder(ModelConfig(d_model=32, n_layers=1, context_length=16)), BytesTokenizer()
    whole = continue_text(model, tokenizer, "abc", 12)
    assert continue_text(model, tokenizer, ["a", "bc"], 12) == whole
    mark = whole[5]
    assert continue_text(model, tokenizer, "abc", 12, before=mark) == whole.partition(mark)[0] != whole


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_text_continues_after_the_prompt_with_its_first_space(kind: str, tmp_path: Path) -> None:
    library: Any = pytest.importorskip("sentencepiece")
    lines = iter(Path(__file__).read_text().splitlines())
    library.SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(tmp_path / "given"), model_type=kind, vocab_size=400, minloglevel=3
    )
    tokenizer = FileTokenizer(tmp_path / "given.model")  # it strips the space before a text
    torch.manual_seed(0)
    model = Decoder(ModelConfig(d_model=32, n_layers=1, context_length=16, vocab_size=512))
    (ids,) = tokenizer.encode([b"the model"])
    spaced = []
    for seed in range(20):
        new = generate(
            model,
            [tokenizer.end_of_document, *ids],
            4,
            temperature=1.0,
            seed=seed,
            n_ids=tokenizer.vocab_size,
            stop=tokenizer.end_of_document,
        )
        text = continue_text(model, tokenizer, "the model", 4, temperature=1.0, seed=seed)
        whole = np.append(ids, new[new != tokenizer.end_of_document])
        assert "the model" + text == tokenizer.decode(whole)
        spaced.append(text.startswith(" "))
    assert any(spaced)
