"""The block types of GGUF: which bytes of a block are codes, scales and minimums, and the `Format` that they make.

A row is whole blocks. What is nested, 6-bit scales under a 16-bit one, stays so: nothing is multiplied out. The layouts are those
of ggml's `ggml-common.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from w4gen.formats import IQ4_NL, named
from w4gen.ir import layout as layouts
from w4gen.ir.layout import Digit, Layout
from w4gen.ir.types import Format
from w4gen.quantize import Parts


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type: its number in a file, the weights and bytes of a block, the format, and `read`.

    `read` takes blocks u8[blocks, bytes] and gives the parts of the format, each with one row for each block.
    """

    id: int
    name: str
    weights: int
    bytes: int
    format: Format
    read: Callable[[torch.Tensor], Parts]


def parts(stored: torch.Tensor, kind: BlockType, factor: float = 1.0) -> Parts:
    """The parts of a weight [N, K], as `Format.parts` names them, from its rows of blocks u8[N, K / weights * bytes].

    What blocks do not hold is one number for the whole weight, `factor`.
    """
    found = {name: part.reshape(len(stored), -1) for name, part in kind.read(stored.reshape(-1, kind.bytes)).items()}
    wanted = kind.format.parts(*found["codes"].shape)
    return {name: torch.full(shape, factor) for name, (_, shape) in wanted.items() if shape == (1, 1)} | found


def _fields(stored: torch.Tensor, bits: int, span: int) -> torch.Tensor:
    """Fields u8[blocks, …] of `bits` bits: the lowest of `span` bytes, then those above them, and so on with the next bytes."""
    blocks, size = stored.shape
    inside = (Digit("k", span, 8), Digit("k", 8 // bits, bits), Digit("k", size // span, 8 * span))
    layout = Layout((Digit("n", blocks, 8 * size), *inside), bits, 8)
    return layouts.unpack(layout, stored.reshape(-1), torch)  # type: ignore[no-any-return]


def _half(stored: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 [blocks, 1] that starts at byte `at` of every block."""
    return stored[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16)


def _signed(stored: torch.Tensor) -> torch.Tensor:
    """Two's complement bytes as codes that count from -128."""
    return stored ^ 0x80


def _six_bits(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minimums u8[blocks, 8], of 6 bits each, in 12 bytes: the last four of each are in pieces."""
    scales, minimums, rest = stored.split(4, 1)
    low, high = rest & 15, rest >> 4
    return torch.cat([scales & 63, low | scales >> 6 << 4], 1), torch.cat([minimums & 63, high | minimums >> 6 << 4], 1)


def _four(stored: torch.Tensor) -> Parts:
    """Q4_0, IQ4_NL: a scale and 32 codes of 4 bits."""
    return {"codes": _fields(stored[:, 2:], 4, 16), "scale": _half(stored, 0)}


def _four_minimum(stored: torch.Tensor) -> Parts:
    """Q4_1: a scale, a minimum, and 32 codes of 4 bits."""
    return {"codes": _fields(stored[:, 4:], 4, 16), "scale": _half(stored, 0), "zero": -_half(stored, 2)}


def _five(stored: torch.Tensor) -> Parts:
    """Q5_0: a scale, the highest bits of 32 codes, their other four."""
    return {"codes": _fields(stored[:, 6:], 4, 16) | _fields(stored[:, 2:6], 1, 1) << 4, "scale": _half(stored, 0)}


def _five_minimum(stored: torch.Tensor) -> Parts:
    """Q5_1: a scale, a minimum, the highest bits of 32 codes, their other four."""
    return {**_five(stored[:, 2:]), "scale": _half(stored, 0), "zero": -_half(stored, 2)}


def _eight(stored: torch.Tensor) -> Parts:
    """Q8_0: a scale and 32 signed bytes."""
    return {"codes": _signed(stored[:, 2:]), "scale": _half(stored, 0)}


def _q2_k(stored: torch.Tensor) -> Parts:
    """16 scales and minimums of 4 bits, 256 codes of 2, a scale for each of the two."""
    scales, d = stored[:, :16], {"scale.scale": _half(stored, 80), "zero.scale": _half(stored, 82)}
    return {"codes": _fields(stored[:, 16:80], 2, 32), "scale": scales & 15, "zero": scales >> 4, **d}


def _q3_k(stored: torch.Tensor) -> Parts:
    """The highest bits of 256 codes, their other two, 16 scales of 6 bits, their scale."""
    codes = _fields(stored[:, 32:96], 2, 32) | _fields(stored[:, :32], 1, 32) << 2
    scales = _fields(stored[:, 96:104], 4, 8) | _fields(stored[:, 104:108], 2, 4) << 4
    return {"codes": codes, "scale": scales, "scale.scale": _half(stored, 108)}


def _q4_k(stored: torch.Tensor) -> Parts:
    """A scale for 8 scales and one for 8 minimums, all of 6 bits, and 256 codes of 4."""
    scales, minimums = _six_bits(stored[:, 4:16])
    d = {"scale.scale": _half(stored, 0), "zero.scale": _half(stored, 2)}
    return {"codes": _fields(stored[:, 16:], 4, 32), "scale": scales, "zero": minimums, **d}


def _q5_k(stored: torch.Tensor) -> Parts:
    """Q4_K with the highest bits of the codes between."""
    head, high, low = stored.split((16, 32, 128), 1)
    return {**_q4_k(torch.cat([head, low], 1)), "codes": _fields(low, 4, 32) | _fields(high, 1, 32) << 4}


def _q6_k(stored: torch.Tensor) -> Parts:
    """The low four bits of 256 codes, their two high ones, 16 scales in signed bytes, their scale."""
    low, high, scales, _ = stored.split((128, 64, 16, 2), 1)
    return {"codes": _fields(low, 4, 64) | _fields(high, 2, 32) << 4, "scale": _signed(scales), "scale.scale": _half(stored, 208)}


def _iq4_xs(stored: torch.Tensor) -> Parts:
    """A scale for 8 scales of 6 bits, whose high bits come first, and 256 codes of 4."""
    scales = _fields(stored[:, 4:8], 4, 1) | _fields(stored[:, 2:4], 2, 1) << 4
    return {"codes": _fields(stored[:, 8:], 4, 16), "scale": scales, "scale.scale": _half(stored, 0)}


def _tq2_0(stored: torch.Tensor) -> Parts:
    """256 codes of 2 bits and a scale."""
    return {"codes": _fields(stored[:, :64], 2, 32), "scale": _half(stored, 64)}


def _mxfp4(stored: torch.Tensor) -> Parts:
    """A power of two and 32 codes of 4 bits."""
    return {"codes": _fields(stored[:, 1:], 4, 16), "scale": stored[:, :1]}


def _nvfp4(stored: torch.Tensor) -> Parts:
    """Four scales in e4m3 without a sign, in which no number is 0, and 64 codes of 4 bits."""
    scales = stored[:, :4] & 0x7F
    return {"codes": _fields(stored[:, 4:], 4, 8), "scale": torch.where(scales == 0x7F, 0, scales)}


IQ4_XS = replace(IQ4_NL, name="iq4_xs", scale=Format("int6", 6, origin=-32.0, group=8))
TERNARY = Format("ternary", 2, origin=-1.0, group=256)

TYPES = {
    kind.id: kind
    for kind in (
        BlockType(2, "Q4_0", 32, 18, named("int4_g32"), _four),
        BlockType(3, "Q4_1", 32, 20, named("uint4_g32_m"), _four_minimum),
        BlockType(6, "Q5_0", 32, 22, named("int5_g32"), _five),
        BlockType(7, "Q5_1", 32, 24, named("uint5_g32_m"), _five_minimum),
        BlockType(8, "Q8_0", 32, 34, named("int8_g32"), _eight),
        BlockType(10, "Q2_K", 256, 84, named("q2_k"), _q2_k),
        BlockType(11, "Q3_K", 256, 110, named("q3_k"), _q3_k),
        BlockType(12, "Q4_K", 256, 144, named("q4_k"), _q4_k),
        BlockType(13, "Q5_K", 256, 176, named("q5_k"), _q5_k),
        BlockType(14, "Q6_K", 256, 210, named("q6_k"), _q6_k),
        BlockType(20, "IQ4_NL", 32, 18, IQ4_NL, _four),
        BlockType(23, "IQ4_XS", 256, 136, IQ4_XS, _iq4_xs),
        BlockType(35, "TQ2_0", 256, 66, TERNARY, _tq2_0),
        BlockType(39, "MXFP4", 32, 17, named("mxfp4"), _mxfp4),
        BlockType(40, "NVFP4", 64, 36, named("nvfp4"), _nvfp4),
    )
}
"""The block types that are read, by their number in a file."""
