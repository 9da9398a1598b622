"""How fast a model can answer at batch 1, worked out from its config.json and the ceilings of a machine.

A token cannot take less time than its bytes take to be read. Two conventions of counting them are in use:

*all*: every weight at the nominal bits of the format (4 of `int4_g128`), the embedding too, and no scales.
*moved*: what a step reads. Linear layers in the format, scales included; the head, tied to the embedding or not, the norms and
the biases as they are, in 16 bits; one row of the embedding. Activations are left out, as is the padding of stored orders.

*moved* gives a bound, as long as no cache holds weights from one token to the next. *all* gives none: its head has fewer bits
than the model's, and where the head is not tied it counts an embedding that no step reads.

To both comes the KV cache, read once, in 16 bits; some published figures of *all* count it at the format's bits as well.
Sliding windows are not counted: every token of the cache is read.

A published table has 1.263 GB for Qwen2.5-1.5B in int4 with its embedding in bf16; *moved* has 1.1426 for int4_g128 (1.1423
without norms and biases). The difference, 0.1203, is one table of 151936 x 1536 at 4.125 bits: 1.263 is what every weight at
4.125 bits, the embedding among them, and the embedding in bf16 once more come to. A file whose head is a quantized copy would
hold as much. This model's head is tied: its one table is in 16 bits here, and is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4gen.formats import named
from w4gen.ir.dtype import ALIASES, BF16, DTYPES, DType
from w4gen.ir.types import Format
from w4gen.layers import Layer, Sizes, layers, sizes

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Model:
    """What a model is made of: its sizes, and its linear layers without the head."""

    sizes: Sizes
    linears: tuple[Layer, ...]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Model:
        """The model of a config.json. Raises `ShapeError` where it is not known."""
        return cls(sizes(facts), tuple(layers({**facts, "tie_word_embeddings": True})))

    @property
    def table(self) -> int:
        """Weights of the embedding, and of the head."""
        return self.sizes.vocabulary * self.sizes.hidden

    @property
    def small(self) -> int:
        """Weights of norms and biases."""
        return self.sizes.norms + sum(each.n * each.count for each in self.linears if each.bias)

    @property
    def parameters(self) -> int:
        """All weights; a head that is tied counts once."""
        tables = self.table * (1 if self.sizes.tied else 2)
        return sum(each.weights for each in self.linears) + tables + self.small

    def all_bytes(self, kind: DType | Format) -> float:
        """Bytes of all weights at the nominal bits of a format."""
        return self.parameters * kind.bits / 8

    def moved_bytes(self, kind: DType | Format) -> float:
        """Bytes of the weights that a step reads."""
        linears = sum(each.weights * stated_bits(kind, each) for each in self.linears)
        return (linears + (self.table + self.small + self.sizes.hidden) * BF16.bits) / 8

    def kv_bytes(self, tokens: int, bits: int = BF16.bits) -> float:
        """Bytes of the k and v of so many tokens."""
        of = self.sizes
        return tokens * of.depth * 2 * of.kv * of.size * bits / 8


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The figures of one format: GB of weights, and tokens per second at batch 1 with them and the KV cache read once."""

    format: str
    all_gb: float
    all_tokens_s: float
    all_kv_too_tokens_s: float
    moved_gb: float
    moved_tokens_s: float
    decoded_tokens_s: float | None = None
    """Where the decode rate is known: tokens per second by decoding the linear layers once, if nothing else took time."""


def stated_bits(kind: DType | Format, layer: Layer) -> float:
    """Bits of a weight of a layer with its share of scales."""
    return kind.stated_bits(layer.n, layer.k) if isinstance(kind, Format) else kind.bits


def kind_of(name: str | Format) -> DType | Format:
    """The format called `name`, or the float that weights have before they are quantized (`bf16`). Raises `FormatError`."""
    plain = {**DTYPES, **ALIASES}.get(str(name))
    return plain if plain is not None and plain.kind == "float" and not plain.small else named(name)


def ceiling(
    model: Model, kind: DType | Format, bandwidth_gbs: float, kv_tokens: int, decode_gweights: float | None = None
) -> Ceiling:
    """The figures of a model in one format, with `kv_tokens` of KV cache, where memory gives `bandwidth_gbs` (1e9 bytes).

    decode_gweights: weights of the format that the machine decodes a second, in 1e9, where that is known.
    """
    whole, moved, kv = model.all_bytes(kind), model.moved_bytes(kind), model.kv_bytes(kv_tokens)
    speed = bandwidth_gbs * GIGA
    return Ceiling(
        format=kind.label if isinstance(kind, Format) else kind.name,
        all_gb=whole / GIGA,
        all_tokens_s=speed / (whole + kv),
        all_kv_too_tokens_s=speed / (whole + model.kv_bytes(kv_tokens, kind.bits)),
        moved_gb=moved / GIGA,
        moved_tokens_s=speed / (moved + kv),
        decoded_tokens_s=decode_gweights and decode_gweights * GIGA / sum(each.weights for each in model.linears),
    )


def measured(facts: Mapping[str, Any], name: str, of: str = "") -> float | None:
    """A ceiling that a file of `w4gen roofline --measure` holds, by its name and its format; None where it has none."""
    found = (each for each in facts["figures"] if each["name"].startswith(name) and each["of"] == of)
    return next((float(each["value"]) for each in found), None)
