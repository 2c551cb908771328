"""The estimate of a pass without gradients bounds what it really allocates, traced tensor by tensor on a fake device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from proxy_models.architecture.config import ModelConfig
from proxy_models.architecture.decoder import Decoder, next_token_loss
from proxy_models.architecture.decoder_memory import evaluation_bytes
from proxy_models.architecture.memory import Precision
from proxy_models.training.precision import DTYPES
from tests.gpu_free.memory_trace import MemoryTrace


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("model", "sequences"),
    [
        (ModelConfig(d_model=512, n_layers=3, head_dim=64, vocab_size=8000, context_length=512), 4),
        (ModelConfig(d_model=2048, n_layers=3, head_dim=128, vocab_size=50_304, context_length=2048), 8),
        (
            ModelConfig(
                d_model=4096,
                n_layers=3,
                head_dim=128,
                queries_per_kv=4,
                mlp_ratio=3.5,
                vocab_size=128_256,
                context_length=8192,
            ),
            2,
        ),
    ],
    ids=["small", "1B", "8B"],
)
def test_a_pass_without_gradients_allocates_at_most_the_estimate(
    model: ModelConfig, sequences: int, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query))  # fused
    with FakeTensorMode(), torch.no_grad():
        decoder = Decoder(model).eval()
        decoder.compute_dtype = DTYPES[precision]
        with (peak := MemoryTrace()).tracing():
            next_token_loss(decoder, torch.zeros(sequences, model.context_length + 1, dtype=torch.int64))
    assert peak.most <= evaluation_bytes(model, sequences, precision) <= 2.5 * peak.most
