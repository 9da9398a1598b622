"""The built-in formats. A format of your own is one such line in your own file; nothing is registered."""

from __future__ import annotations

import difflib

from w4gen.errors import FormatError
from w4gen.ir.types import Format

INT4 = Format("int4", bits=4, origin=-8.0, group=128)
"""Symmetric integers: code 0…15 means -8…7. Symmetric GPTQ checkpoints hold these, and Marlin reads them."""

UINT4 = Format("uint4", bits=4, group=128)
"""Unsigned integers 0…15, for zeros: `uint4_g128_z` (integer zero, as GPTQ and AWQ), `uint4_g32_m` (minimum, as GGUF's Q4_1)."""

INT8 = Format("int8", bits=8, origin=-128.0, group=128)
"""Symmetric integers: code 0…255 means -128…127."""

E2M1 = Format("e2m1", bits=4, codebook=(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), group=32)
"""FP4 with 2 exponent bits and 1 mantissa bit (OCP Microscaling Formats, 2023, section 5.3.3)."""

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
"""NormalFloat, the quantiles of a normal distribution (Dettmers et al., QLoRA, 2023, appendix E). Used by bitsandbytes."""

FAMILIES = {family.name: family for family in (INT4, UINT4, INT8, NF4, E2M1)}


def named(name: str | Format) -> Format:
    """The format called `name`: a family and its suffixes (`int4_g128`, `nf4_row`, `uint4_g64_z_bf16`), or what `str` wrote."""
    if isinstance(name, Format):
        return name
    if "(" in name:
        return Format.parse(name)
    family, *suffixes = name.split("_")
    if family in FAMILIES:
        return FAMILIES[family].with_suffixes(suffixes)
    known = [each.label for each in FAMILIES.values()]
    nearest = max(FAMILIES, key=lambda each: difflib.SequenceMatcher(None, family, each).ratio())
    raise FormatError(
        f"unknown format {name!r}: the nearest is {FAMILIES[nearest].label}; known are {', '.join(known)}, "
        "and these with other groups, and zeros (_z, _zf, _m)"
    )
