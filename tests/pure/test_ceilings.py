"""Ceilings of whole models, against counts that their authors publish and a published table of speeds."""

from __future__ import annotations

import pytest

from w4gen.bench.ceilings import Ceiling, Model, ceiling, kind_of
from w4gen.errors import FormatError
from w4gen.layers import PRESETS

PUBLISHED = {
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Mistral-7B": 7_248_023_552,
    "SmolLM2-135M": 134_515_008,
}
"""Weights of each model as its page on Hugging Face counts them."""

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def test_presets_have_as_many_weights_as_is_published() -> None:
    assert {name: Model.of(facts).parameters for name, facts in PRESETS.items()} == PUBLISHED


def test_qwen3_has_norms_of_heads_too() -> None:
    assert Model.of(QWEN3).parameters == 596_049_920


def published(name: str, tokens: int = 2048) -> Ceiling:
    """Qwen2.5-1.5B where memory gives 323.9 GB/s, as in the published table."""
    return ceiling(Model.of(PRESETS["Qwen2.5-1.5B"]), kind_of(name), 323.9, tokens)


def test_the_published_kv_cache() -> None:
    assert Model.of(PRESETS["Qwen2.5-1.5B"]).kv_bytes(2048) / 1e9 == pytest.approx(0.0587, abs=5e-5)


def test_the_published_ceiling_of_bf16() -> None:
    found = published("bf16")
    assert found.all_gb == pytest.approx(3.087, abs=5e-4)
    assert found.moved_gb == pytest.approx(3.087, abs=5e-4)
    assert found.all_tokens_s == found.all_kv_too_tokens_s == pytest.approx(102.9, abs=0.1)
    assert found.moved_tokens_s == pytest.approx(102.9, abs=0.1)


def test_the_published_ceiling_of_int4_has_the_kv_cache_in_4_bits() -> None:
    found = published("int4_g128")
    assert found.all_gb == pytest.approx(0.772, abs=5e-4)
    assert found.all_kv_too_tokens_s == pytest.approx(411.8, abs=0.05)
    assert found.all_tokens_s == pytest.approx(323.9 / (0.7719 + 0.0587), abs=0.05)  # 390: the cache stays in 16 bits


def test_what_int4_moves_and_why_a_published_count_is_larger() -> None:
    attention, mlp = 2 * 1536 * 1536 + 2 * 256 * 1536, 3 * 8960 * 1536
    head, small = 151936 * 1536, 28 * (1536 + 256 + 256) + (2 * 28 + 1) * 1536
    linears = 28 * (attention + mlp) * (4 + 16 / 128) / 8
    assert (linears + 2 * head) / 1e9 == pytest.approx(1.142, abs=5e-4)
    found = published("int4_g128", tokens=0)
    assert found.moved_gb * 1e9 == pytest.approx(linears + 2 * (head + small + 1536), rel=1e-12)
    assert found.moved_tokens_s == pytest.approx(323.9 / 1.14261, abs=0.01)
    assert found.moved_gb + head * 4.125 / 8 / 1e9 == pytest.approx(1.263, abs=5e-4)  # the embedding once more, in 4 bits


def test_an_embedding_apart_from_the_head_is_not_read() -> None:
    model = Model.of(PRESETS["Llama-3.1-8B"])
    table = 128256 * 4096
    assert model.all_bytes(kind_of("bf16")) - model.moved_bytes(kind_of("bf16")) == 2 * (table - 4096)
    tied = Model.of({**PRESETS["Llama-3.1-8B"], "tie_word_embeddings": True})
    assert tied.moved_bytes(kind_of("nf4_g64")) == model.moved_bytes(kind_of("nf4_g64"))
    assert tied.parameters == model.parameters - table


def test_partial_groups_have_whole_scales() -> None:
    model = Model.of(PRESETS["SmolLM2-135M"])
    by_g128, by_row = (model.moved_bytes(kind_of(name)) for name in ("int4_g128", "int4_row"))
    rows = {576: 576 + 2 * 192 + 576 + 2 * 1536, 1536: 576}  # outputs of one block, by inputs
    scales = 30 * (rows[576] * (5 - 1) + rows[1536] * (12 - 1))
    assert by_g128 - by_row == 2 * scales


@pytest.mark.parametrize(("name", "label"), [("bfloat16", "bf16"), ("f16", "f16"), ("mxfp4", "mxfp4_g32_e8m0")])
def test_names_of_formats_and_of_floats(name: str, label: str) -> None:
    assert published(name).format == label


@pytest.mark.parametrize("name", ["u8", "i32", "e8m0", "e4m3"])
def test_types_that_hold_no_weights_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="unknown format"):
        kind_of(name)
