"""The linear layers of a model, read off its Hugging Face `config.json`; nothing of the model itself is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4gen.errors import ShapeError

BIASED = {"llama": "", "mistral": "", "qwen2": "qkv", "qwen3": ""}
"""Families of models with these layers, and which of them always have a bias; `attention_bias` and `mlp_bias` add others."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Linear layers that are alike: their names, the weight's [n, k], whether they have a bias, how many there are."""

    names: tuple[str, ...]
    n: int
    k: int
    bias: bool
    count: int

    def __str__(self) -> str:
        return f"{', '.join(self.names)}: {self.k} -> {self.n}{' with bias' if self.bias else ''}, {self.count} of them"


def read(path: Path) -> dict[str, Any]:
    """The facts of a `config.json`, or of the folder that holds one. Raises `ShapeError` where it is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ShapeError(
            f"{file} is no config.json ({error}): give --model the file or the folder of a Hugging Face model"
        ) from error
    if not isinstance(facts, dict):
        raise ShapeError(f"{file} is no config.json (it holds no object): give --model that of a Hugging Face model")
    return facts


def layers(facts: Mapping[str, Any], tp: int = 1) -> list[Layer]:
    """The distinct linear layers of a model (of one of `tp` shards of it), `lm_head` too where it is not tied to the embedding.

    Shards are those of tensor parallelism: q, k, v, gate, up and lm_head have 1/tp of their outputs, o and down 1/tp of their
    inputs; fewer heads of k and v than shards are repeated. Raises `ShapeError` for unknown models and shares that do not divide.
    """
    family = facts.get("model_type")
    if family not in BIASED:
        raise ShapeError(f"model_type {family!r} is not known: known are {', '.join(BIASED)}; name its layers by --shape")
    try:
        hidden, inner, depth = (int(facts[name]) for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        heads, vocabulary = int(facts["num_attention_heads"]), int(facts["vocab_size"])
        kv = int(facts.get("num_key_value_heads") or heads)
        size = int(facts.get("head_dim") or hidden // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ShapeError(f"this config.json of {family} has no {error}, which its layers are read from: complete it") from error
    kv_shared = kv if tp <= kv else tp  # shards beyond the heads of k and v hold copies
    attention, mlp = bool(facts.get("attention_bias")), bool(facts.get("mlp_bias"))
    qkv = attention or "qkv" in BIASED[family]
    found = [
        ("q_proj", _share(heads, tp, "attention heads") * size, hidden, qkv, depth),
        ("k_proj", _share(kv_shared, tp, "heads of k and v") * size, hidden, qkv, depth),
        ("v_proj", _share(kv_shared, tp, "heads of k and v") * size, hidden, qkv, depth),
        ("o_proj", hidden, _share(heads, tp, "attention heads") * size, attention, depth),
        ("gate_proj", _share(inner, tp, "inner sizes"), hidden, mlp, depth),
        ("up_proj", _share(inner, tp, "inner sizes"), hidden, mlp, depth),
        ("down_proj", hidden, _share(inner, tp, "inner sizes"), mlp, depth),
        *([] if facts.get("tie_word_embeddings") else [("lm_head", _share(vocabulary, tp, "words"), hidden, False, 1)]),
    ]
    alike: dict[tuple[int, int, bool], list[tuple[str, int]]] = {}
    for name, n, k, bias, count in found:
        alike.setdefault((n, k, bias), []).append((name, count))
    return [Layer(tuple(name for name, _ in same), *key, sum(count for _, count in same)) for key, same in alike.items()]


def _share(whole: int, tp: int, what: str) -> int:
    """What one of `tp` shards has of a whole."""
    if tp < 1 or whole % tp:
        raise ShapeError(f"{whole} {what} cannot be shared by tp={tp}: take a divisor")
    return whole // tp
