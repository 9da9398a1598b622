"""The linear layers of a model from its config.json, against what the models' weights are known to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from w4gen.errors import ShapeError
from w4gen.layers import PRESETS, layers, merged, read

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def shapes(facts: dict[str, Any], tp: int = 1) -> dict[str, tuple[int, int, bool, int]]:
    """(k, n, bias, count) by names."""
    return {" ".join(layer.names): (layer.k, layer.n, layer.bias, layer.count) for layer in layers(facts, tp)}


def test_llama_3_1_8b() -> None:
    assert shapes(LLAMA_8B) == {
        "q_proj o_proj": (4096, 4096, False, 64),
        "k_proj v_proj": (4096, 1024, False, 64),
        "gate_proj up_proj": (4096, 14336, False, 64),
        "down_proj": (14336, 4096, False, 32),
        "lm_head": (4096, 128256, False, 1),
    }


def test_qwen_2_5_7b_has_biases_on_q_k_and_v() -> None:
    assert shapes(QWEN_7B) == {
        "q_proj": (3584, 3584, True, 28),
        "k_proj v_proj": (3584, 512, True, 56),
        "o_proj": (3584, 3584, False, 28),
        "gate_proj up_proj": (3584, 18944, False, 56),
        "down_proj": (18944, 3584, False, 28),
        "lm_head": (3584, 152064, False, 1),
    }


def test_mistral_nemo_has_heads_of_another_size() -> None:
    found = shapes(MISTRAL)
    assert found["q_proj"] == (5120, 4096, False, 40)
    assert found["o_proj"] == (4096, 5120, False, 40)


def test_a_tied_head_is_no_layer_and_heads_of_k_are_those_of_q_by_default() -> None:
    found = shapes({**LLAMA_8B, "tie_word_embeddings": True, "num_key_value_heads": None, "attention_bias": True})
    assert found["q_proj k_proj v_proj o_proj"] == (4096, 4096, True, 128)
    assert not any("lm_head" in names for names in found)


@pytest.mark.parametrize(
    ("facts", "tp", "qkv", "gate_up"),
    [
        (QWEN_7B, 1, (3584, 3584 + 2 * 512, True, 28), (3584, 2 * 18944, False, 28)),
        (LLAMA_8B, 2, (4096, 2048 + 2 * 512, False, 32), (4096, 14336, False, 32)),
    ],
)
def test_layers_that_are_merged_have_the_outputs_of_all(
    facts: dict[str, Any], tp: int, qkv: tuple[int, int, bool, int], gate_up: tuple[int, int, bool, int]
) -> None:
    found = {"".join(layer.names): (layer.k, layer.n, layer.bias, layer.count) for layer in merged(facts, tp)}
    assert found == {"q_proj+k_proj+v_proj": qkv, "gate_proj+up_proj": gate_up}


@pytest.mark.parametrize(("tp", "k_proj"), [(2, 512), (8, 128), (16, 128), (32, 128)])
def test_shards(tp: int, k_proj: int) -> None:
    found = {name: layer for layer in layers(LLAMA_8B, tp) for name in layer.names}
    assert (found["q_proj"].n, found["q_proj"].k) == (4096 // tp, 4096)
    assert (found["o_proj"].n, found["o_proj"].k) == (4096, 4096 // tp)
    assert (found["down_proj"].n, found["down_proj"].k) == (4096, 14336 // tp)
    assert found["k_proj"].n == k_proj


@pytest.mark.parametrize(
    ("facts", "tp", "message"),
    [
        ({**LLAMA_8B, "model_type": "gpt2"}, 1, "model_type 'gpt2' is not known: known are llama, mistral, qwen2, qwen3"),
        ({"model_type": "llama"}, 1, "has no 'hidden_size'"),
        (LLAMA_8B, 3, "32 attention heads cannot be shared by tp=3: take a divisor"),
        (LLAMA_8B, 0, "take a divisor"),
    ],
)
def test_what_is_refused(facts: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        layers(facts, tp)


def test_presets_are_read_by_name_unless_there_is_such_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert layers(read(Path("Llama-3.1-8B"))) == layers(LLAMA_8B)
    assert layers(read(Path("Qwen2.5-7B"))) == layers(QWEN_7B)
    (tmp_path / "Qwen2.5-7B").mkdir()
    with pytest.raises(ShapeError, match=f"is no config.json .*or one of {', '.join(PRESETS)}"):
        read(Path("Qwen2.5-7B"))


def test_a_config_is_read_from_its_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read(tmp_path) == read(tmp_path / "config.json") == LLAMA_8B
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ShapeError, match=r"config\.json is no config\.json"):
            read(tmp_path)
    with pytest.raises(ShapeError, match=r"is no config\.json"):
        read(tmp_path / "nowhere")
