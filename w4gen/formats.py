"""The built-in formats. A format of your own is one such line in your own file; nothing is registered."""

from __future__ import annotations

import difflib

from w4gen.errors import FormatError
from w4gen.ir.types import Format

INT4 = Format("int4", bits=4, origin=-8.0, group=128)
"""Symmetric integers: code 0…15 means -8…7. Symmetric GPTQ checkpoints hold these, and Marlin reads them."""

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

FAMILIES = {family.name: family for family in (INT4, NF4)}


def named(name: str | Format) -> Format:
    """The format called `name`: a family and its suffixes (`int4_g128`, `nf4_row`, `int4_g64_bf16`), or what `str` wrote."""
    if isinstance(name, Format):
        return name
    if "(" in name:
        return Format.parse(name)
    family, *suffixes = name.split("_")
    if family in FAMILIES:
        return FAMILIES[family].with_suffixes(suffixes)
    known = [each.label for each in FAMILIES.values()]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3) or difflib.get_close_matches(
        family, FAMILIES, n=1, cutoff=0
    )
    nearest = [FAMILIES[each].label if each in FAMILIES else each for each in nearest]
    raise FormatError(f"unknown format {name!r}: the nearest is {nearest[0]}; known are {', '.join(known)}")
