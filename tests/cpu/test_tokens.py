"""A whole decoder of one layer whose kernels run under Triton's interpreter, against the same without."""

from __future__ import annotations

import pytest
import torch

import w4gen
from w4gen.bench import decoder, tokens
from w4gen.runtime import ops

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "tie_word_embeddings": True, "initializer_range": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("gated", [None, False, True], ids=["apart", "merged", "gated"])
def test_tokens_are_those_of_the_model_without_kernels(gated: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("W4GEN_STRICT", "1")
    monkeypatch.setenv("W4GEN_ARCH", "sm_80")
    monkeypatch.setattr(ops, "LAUNCHES", {})
    with torch.no_grad():
        model = decoder.built(TINY, torch.float16, torch.device("cpu"), 16)
        w4gen.convert(model, "int4_g64", progress=False)
        if gated is not None:
            assert len(w4gen.merge(model, gated).merged) == 2
        found = tokens.followed(model, torch.arange(3)[None], 5)
    assert found.same, found
    assert len(set(found.tokens)) > 2
    assert {key[2] for key in ops.LAUNCHES} == {(1, 1), (2, 8)}
    assert {key[-2] for key in ops.LAUNCHES} == ({"", "silu_mul"} if gated else {""})
    assert None not in ops.LAUNCHES.values()
