"""Every block type that is read, against the gguf library's dequantization of the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from w4gen import Weight
from w4gen.checkpoints.gguf_blocks import TYPES, parts

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (),
}  # fmt: skip
"""Where the float16 numbers of a block start: they must be finite."""

EXTREME = [0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0, -1.0, 65504.0, -65504.0, 0.1]


def blocks(name: str, rows: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Blocks of random bytes u8[rows, count * bytes], some of one byte throughout; every half is finite, many extreme."""
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    stored = generator.integers(0, 256, (rows, count, kind.bytes), np.uint8)
    for row, byte in enumerate((0, 255, 0x55, 0xAA, 0x7F, 0x80)):
        stored[row % rows, row // rows] = byte
    for start in HALVES[name]:
        drawn = generator.integers(0, 0x7C00, (rows, count)).astype(np.uint16) | (generator.integers(0, 2, (rows, count)) << 15)
        halves = drawn.astype(np.uint16).view(np.float16)
        halves[:, ::3] = generator.choice(np.array(EXTREME, np.float16), halves[:, ::3].shape)
        stored[:, :, start : start + 2] = halves.astype("<f2")[..., None].view(np.uint8)
    if name == "MXFP4":  # 255 is no number: NaN of E8M0, which the library does not know
        stored[:, :, 0] = np.resize(np.arange(255), (rows, count))
    if name == "NVFP4":  # 255 is neither: a sign that is not there, and no number
        stored[:, :, :4] = np.resize(np.arange(255), (rows, count, 4))
    return stored.reshape(rows, -1)


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_a_block_is_what_the_library_makes_of_it(kind):
    stored = blocks(kind.name, 6, 8 if kind.weights == 256 else 48, np.random.default_rng(kind.id))
    with np.errstate(over="ignore"):
        truth = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind.name])
    weight = Weight.from_parts(parts(torch.from_numpy(stored), kind), kind.format)
    assert np.array_equal(weight.dequantize().numpy(), truth)
    assert np.isfinite(truth).mean() > 0.9
    assert len(np.unique(truth)) > 100


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_the_table_states_the_library_s_sizes(kind):
    number = gguf.GGMLQuantizationType[kind.name]
    assert (kind.id, (kind.weights, kind.bytes)) == (number.value, gguf.GGML_QUANT_SIZES[number])
    assert kind.format.stated_bits(4096, kind.weights) == pytest.approx(8 * kind.bytes / kind.weights, abs=0.01)  # 0.01: a table
