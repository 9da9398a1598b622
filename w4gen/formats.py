"""The built-in formats. A format of your own is one such line in your own file; nothing is registered."""

from __future__ import annotations

import difflib
from dataclasses import replace

from w4gen.errors import FormatError
from w4gen.ir.types import E4M3, E8M0, F32, PER_TENSOR, Format, minifloat

INTEGERS = (
    Format("int1", bits=1, step=2.0, origin=-1.0),
    *(Format(f"int{bits}", bits=bits, origin=-(2.0 ** (bits - 1))) for bits in range(2, 9)),
    *(Format(f"uint{bits}", bits=bits) for bits in range(1, 9)),
)
"""Signed ones are symmetric: int4 is -8…7, int1 is -1 and 1. Unsigned ones, 0…15, are for zeros."""

NF4 = Format(
    "nf4",
    bits=4,
    codebook=(
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    group=64,
)  # fmt: skip
"""The quantiles of a normal distribution (Dettmers et al., QLoRA, 2023, appendix E)."""

ABSMAX = Format("absmax8", 8, codebook=PER_TENSOR, group=256, flat=True, scale=F32, zero=F32, zero_mode="minimum")
"""The scales of bitsandbytes' double quantization: a table of 256, a scale for 256 of them in a row, and minus the offset."""

FP4 = Format("fp4", bits=4, codebook=tuple(s * v / 12 for s in (1, -1) for v in (0, 0.0625, 8, 12, 4, 6, 2, 3)), group=64)
"""bitsandbytes' 4-bit float, in its own order: not e2m1."""

IQ4_NL = Format(
    "iq4_nl", 4, codebook=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), group=32
)  # fmt: skip

E2M1 = Format("e2m1", bits=4, minifloat=minifloat("e2m1"), group=32)
E4M3_ROWS = Format("fp8_e4m3", bits=8, minifloat=E4M3, group=-1, scale=F32)
E5M2_ROWS = replace(E4M3_ROWS, name="fp8_e5m2", minifloat=minifloat("e5m2"))
MX = tuple(
    Format(name, bits=bits, minifloat=minifloat(kind), group=32, scale=E8M0)
    for name, bits, kind in (("mxfp4", 4, "e2m1"), ("mxfp6_e2m3", 6, "e2m3"), ("mxfp6_e3m2", 6, "e3m2"), ("mxfp8", 8, "e4m3"))
)
"""OCP Microscaling Formats (2023), table 1: a power of two for 32 weights."""

NVFP4 = replace(E2M1, name="nvfp4", group=16, scale=Format("e4m3", 8, minifloat=E4M3, group=-1, flat=True, scale=F32))


def _k_quant(name: str, bits: int, origin: float, group: int, scale: Format, minimum: bool) -> Format:
    """A format of GGUF's K-quants: super-blocks of 256 weights, whose groups have scales (and minimums) of few bits."""
    zero = {"zero": scale, "zero_mode": "minimum"} if minimum else {}
    return Format(name, bits, origin=origin, group=group, scale=scale, **zero)  # type: ignore[arg-type]


K_QUANTS = (
    _k_quant("q2_k", 2, 0.0, 16, Format("uint4", 4, group=16), True),
    _k_quant("q3_k", 3, -4.0, 16, Format("int6", 6, origin=-32.0, group=16), False),
    _k_quant("q4_k", 4, 0.0, 32, Format("uint6", 6, group=8), True),
    _k_quant("q5_k", 5, 0.0, 32, Format("uint6", 6, group=8), True),
    _k_quant("q6_k", 6, -32.0, 16, Format("int8", 8, origin=-128.0, group=16), False),
)

FAMILIES = {
    family.name: family
    for family in (
        *(*INTEGERS, NF4, replace(NF4, name="nf4_dq", scale=ABSMAX), FP4, IQ4_NL, E2M1),
        *(E4M3_ROWS, E5M2_ROWS, *MX, NVFP4, *K_QUANTS),
    )
}

USERS = {
    "int1": "-1 and 1: binary networks; HQQ's 1 bit with a zero",
    "int4": "symmetric GPTQ (which stores q + 8), Marlin, compressed-tensors, GGUF's Q4_0 with _g32",
    "int5": "GGUF's Q5_0 with _g32",
    "int8": "symmetric 8-bit checkpoints, GGUF's Q8_0 with _g32",
    "uint2": "GPTQ and AutoRound with _z, HQQ with _zf",
    "uint3": "GPTQ with _z, HQQ with _zf",
    "uint4": "GPTQ and AWQ with _z, HQQ with _zf, GGUF's Q4_1 with _g32_m",
    "uint5": "GGUF's Q5_1 with _g32_m",
    "uint8": "GPTQ's 8 bits with _z",
    "nf4": "bitsandbytes, QLoRA",
    "nf4_dq": "bitsandbytes with double quantization: scales in 8 bits, by a table, with an offset",
    "fp4": "bitsandbytes' fp4",
    "iq4_nl": "GGUF's IQ4_NL",
    "e2m1": "the 4-bit float of OCP Microscaling, with an f16 scale",
    "fp8_e4m3": "FP8 checkpoints: one scale a row, or _tensor",
    "fp8_e5m2": "FP8 with more range: one scale a row, or _tensor",
    "mxfp4": "OCP Microscaling: gpt-oss, compressed-tensors",
    "mxfp6_e2m3": "OCP Microscaling",
    "mxfp6_e3m2": "OCP Microscaling",
    "mxfp8": "OCP Microscaling, of e4m3",
    "nvfp4": "NVIDIA ModelOpt, compressed-tensors: e4m3 scales under one f32",
    **{f"q{bits}_k": f"GGUF's Q{bits}_K" for bits in range(2, 7)},
}
"""Who uses a family."""


def named(name: str | Format) -> Format:
    """The format called `name`: a family and its suffixes (`int4_g128`, `nf4_row`, `uint4_g64_z_bf16`), or what `str` wrote."""
    if isinstance(name, Format):
        return name
    if not isinstance(name, str) or "(" in name:
        return Format.parse(name)
    words = name.split("_")
    for length in range(len(words), 0, -1):
        if (family := "_".join(words[:length])) in FAMILIES:
            return FAMILIES[family].with_suffixes(words[length:])
    nearest = max(FAMILIES, key=lambda each: difflib.SequenceMatcher(None, words[0], each).ratio())
    raise FormatError(
        f"unknown format {name!r}: the nearest is {FAMILIES[nearest].label}; known are {', '.join(FAMILIES)}, "
        "and these with other groups (_g64, _row), and zeros (_z, _zf, _m)"
    )


def is_named(form: Format) -> bool:
    """Whether a format's label is a name of it: not so of your own."""
    try:
        return named(form.label) == form
    except FormatError:
        return False
