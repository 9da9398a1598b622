"""Whole decoders on a GPU: greedy tokens are those of the same model without kernels. Real weights: examples/03_real_model.py."""

from __future__ import annotations

import pytest
import torch
from truth import KINDS

import w4gen
from w4gen.bench import decoder, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SMALL = {
    "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True, "initializer_range": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("gated", [None, False, True], ids=["apart", "merged", "gated"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_tokens_are_those_of_the_model_without_kernels(
    form: str, kind: torch.dtype, gated: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 65 tokens, then 64 one by one."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("W4GEN_STRICT", "1")
    with torch.no_grad():
        model = decoder.built(SMALL, kind, torch.device("cuda"), 160)
        w4gen.convert(model, form, progress=False)
        if gated is not None:
            assert len(w4gen.merge(model, gated).merged) == 8
        found = tokens.followed(model, torch.arange(65)[None], 64)
    assert found.same, found
    assert len(set(found.tokens)) > 8
