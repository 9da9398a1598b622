"""The linear layers of a model, read off its Hugging Face `config.json`; nothing of the model itself is needed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w4gen.api import layer_of
from w4gen.errors import ShapeError

BIASED = {"llama": "", "mistral": "", "qwen2": "qkv", "qwen3": ""}
"""Families of models with these layers, and which of them always have a bias; `attention_bias` and `mlp_bias` add others."""

HEAD_NORMS = ("qwen3",)
"""Families that normalize each head of q and k too."""

KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
PRESETS = {
    name: dict(zip(KEYS, values))
    for name, *values in (
        ("Qwen2.5-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 151936, True),
        ("Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 152064, False),
        ("Qwen2.5-32B", "qwen2", 5120, 27648, 64, 40, 8, 152064, False),
        ("Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128256, False),
        ("Llama-3.3-70B", "llama", 8192, 28672, 80, 64, 8, 128256, False),
        ("Mistral-7B", "mistral", 4096, 14336, 32, 32, 8, 32768, False),
        ("SmolLM2-135M", "llama", 576, 1536, 30, 9, 3, 49152, True),
    )
}
"""What sizes are read from, of models that are asked for by name (Mistral-7B in its version 0.3)."""

LAYERS = (
    (8192, 28672), (28672, 8192), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096), (4096, 1024),
    (1536, 8960), (8960, 1536), (1536, 1536), (1536, 256),
)  # fmt: skip
"""(K, N) of the layers that are measured, and that the rules were fitted to: of Llama 3.1 70B and 8B, and of Qwen2.5 1.5B."""


def random_layers(count: int) -> tuple[str, ...]:
    """Layers whose sizes are spread evenly over the powers of two, always the same. Raises `ShapeError` on less than none."""
    if count < 0:
        raise ShapeError(f"{count} random layers cannot be drawn: give a number from 1 on, as in --random 12")
    draw = random.Random(0)
    return tuple("x".join(str(8 * round(2 ** draw.uniform(3, 12))) for _ in range(2)) for _ in range(count))


def shapes(chosen: Sequence[str], count: int, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """(m, k, n) of layers `KxN`; with none of `count` random ones, or those of `LAYERS`. Raises `ShapeError` on other texts."""
    sizes = [layer_of(each) for each in chosen or random_layers(count)] or LAYERS
    return [(m, k, n) for k, n in sizes for m in tokens]


@dataclass(frozen=True, slots=True)
class Layer:
    """Linear layers that are alike: their names, the weight's [n, k], whether they have a bias, how many there are."""

    names: tuple[str, ...]
    n: int
    k: int
    bias: bool
    count: int

    @property
    def weights(self) -> int:
        """Weights of all of them, biases left out."""
        return self.n * self.k * self.count

    def __str__(self) -> str:
        return f"{', '.join(self.names)}: {self.k} -> {self.n}{' with bias' if self.bias else ''}, {self.count} of them"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model: `kv` heads of k and v, each head of `size`; `tied`: the embedding is the head."""

    family: str
    hidden: int
    inner: int
    depth: int
    heads: int
    kv: int
    size: int
    vocabulary: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool

    @property
    def norms(self) -> int:
        """Weights of all norms: two of every block, those of its heads, and the last."""
        heads = 2 * self.size if self.family in HEAD_NORMS else 0
        return self.depth * (2 * self.hidden + heads) + self.hidden


def read(path: Path) -> dict[str, Any]:
    """The facts of a `config.json`, of the folder that holds one, or of a preset. Raises `ShapeError` where it is none."""
    if str(path) in PRESETS and not path.exists():
        return PRESETS[str(path)]
    file = path / "config.json" if path.is_dir() else path
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ShapeError(
            f"{file} is no config.json ({error}): give --model the file or the folder of a Hugging Face model, "
            f"or one of {', '.join(PRESETS)}"
        ) from error
    if not isinstance(facts, dict):
        raise ShapeError(f"{file} is no config.json (it holds no object): give --model that of a Hugging Face model")
    return facts


def sizes(facts: Mapping[str, Any]) -> Sizes:
    """The sizes that a config.json states. Raises `ShapeError` for unknown models and where one is missing."""
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
    flags = (bool(facts.get(name)) for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"))
    return Sizes(family, hidden, inner, depth, heads, kv, size, vocabulary, *flags)


def layers(facts: Mapping[str, Any], tp: int = 1) -> list[Layer]:
    """The distinct linear layers of a model (of one of `tp` shards of it), `lm_head` too where it is not tied to the embedding.

    Shards are those of tensor parallelism: q, k, v, gate, up and lm_head have 1/tp of their outputs, o and down 1/tp of their
    inputs; fewer heads of k and v than shards are repeated. Raises `ShapeError` for unknown models and shares that do not divide.
    """
    of = sizes(facts)
    hidden, depth, mlp = of.hidden, of.depth, of.mlp_bias
    q = _share(of.heads, tp, "attention heads") * of.size
    kv = _share(of.kv if tp <= of.kv else tp, tp, "heads of k and v") * of.size  # shards beyond the heads of k and v hold copies
    inner = _share(of.inner, tp, "inner sizes")
    qkv = of.attention_bias or "qkv" in BIASED[of.family]
    found = [
        ("q_proj", q, hidden, qkv, depth),
        ("k_proj", kv, hidden, qkv, depth),
        ("v_proj", kv, hidden, qkv, depth),
        ("o_proj", hidden, q, of.attention_bias, depth),
        ("gate_proj", inner, hidden, mlp, depth),
        ("up_proj", inner, hidden, mlp, depth),
        ("down_proj", hidden, inner, mlp, depth),
        *([] if of.tied else [("lm_head", _share(of.vocabulary, tp, "words"), hidden, False, 1)]),
    ]
    alike: dict[tuple[int, int, bool], list[tuple[str, int]]] = {}
    for name, n, k, bias, count in found:
        alike.setdefault((n, k, bias), []).append((name, count))
    return [Layer(tuple(name for name, _ in same), *key, sum(count for _, count in same)) for key, same in alike.items()]


GATE_UP = ("gate_proj", "up_proj")
TOGETHER = (("q_proj", "k_proj", "v_proj"), GATE_UP)
"""What layers of one x are called in the models of Transformers; whether they are, their module's code says."""


def merged(facts: Mapping[str, Any], tp: int = 1) -> list[Layer]:
    """What `w4gen.merge` makes of the layers of a model, or of one of `tp` shards: the outputs of several, one after another."""
    of = {name: layer for layer in layers(facts, tp) for name in layer.names}
    return [
        Layer(("+".join(names),), sum(of[name].n for name in names), of[names[0]].k, of[names[0]].bias, sizes(facts).depth)
        for names in TOGETHER
    ]


def _share(whole: int, tp: int, what: str) -> int:
    """What one of `tp` shards has of a whole."""
    if tp < 1 or whole % tp:
        raise ShapeError(f"{whole} {what} cannot be shared by tp={tp}: take a divisor")
    return whole // tp
