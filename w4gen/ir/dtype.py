"""Machine types, and floats of at most 8 bits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from w4gen.errors import FormatError


@dataclass(frozen=True, slots=True)
class DType:
    """A machine type, or a float of at most 8 bits. `mantissa` counts the stored fraction bits of a float, 0 for an integer.

    `special` says which codes of a float are no numbers: `ieee` those of the largest exponent (inf, NaN), `nan` all ones (NaN),
    `none` no code. A float that is not `signed` is a power of two, without zero.
    """

    name: str
    bits: int
    kind: str
    mantissa: int = 0
    special: str = "ieee"
    signed: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def exponent(self) -> int:
        """Exponent bits of a float."""
        return self.bits - self.mantissa - self.signed

    @property
    def bias(self) -> int:
        """What is subtracted from the stored exponent of a float."""
        return int(2 ** (self.exponent - 1)) - 1

    @property
    def max(self) -> float:
        """The largest finite value of a float type."""
        if self.small:
            return max(value for value in self.values if math.isfinite(value))
        return float((2 - 2.0**-self.mantissa) * 2.0**self.bias)

    @property
    def small(self) -> bool:
        """Whether it is a float that kernels decode, as they do the codes of a format."""
        return self.kind == "float" and self.bits <= 8

    @property
    def values(self) -> tuple[float, ...]:
        """The value of every code of a small float."""
        return tuple(self._value(code) for code in range(2**self.bits))

    def fits(self, other: DType) -> bool:
        """Whether every value of a small float is one of another float with at least its bits of each sort.

        Of as many exponent bits, the largest exponent must not be taken by numbers, as it is by inf and NaN in the other.
        """
        spare = other.exponent - self.exponent
        room = spare > 0 if self.signed and self.special == "none" else spare >= 0 if self.signed else spare == 0
        return room and self.mantissa <= other.mantissa

    def _value(self, code: int) -> float:
        ones = 2**self.exponent - 1
        sign = -1.0 if self.signed and code >> (self.bits - 1) else 1.0
        exponent, fraction = (code >> self.mantissa) & ones, code % 2**self.mantissa / 2**self.mantissa
        if self.special == "ieee" and exponent == ones:
            return sign * math.inf if fraction == 0 else math.nan
        if self.special == "nan" and exponent == ones and fraction + 2.0**-self.mantissa == 1:
            return math.nan
        normal = exponent > 0 or not self.signed
        return sign * math.ldexp(normal + fraction, (exponent if normal else 1) - self.bias)


F16 = DType("f16", 16, "float", 10)
BF16 = DType("bf16", 16, "float", 7)
F32 = DType("f32", 32, "float", 23)
I32 = DType("i32", 32, "int")
U8 = DType("u8", 8, "int")
E4M3 = DType("e4m3", 8, "float", 3, "nan")
E5M2 = DType("e5m2", 8, "float", 2)
E8M0 = DType("e8m0", 8, "float", 0, "nan", signed=False)
"""Floats of 8 bits (OCP 8-bit Floating Point, 2023; Microscaling Formats, 2023, section 5.4.1 for e8m0)."""

DTYPES = {dtype.name: dtype for dtype in (F16, BF16, F32, I32, U8, E4M3, E5M2, E8M0)}
ALIASES = {"float16": F16, "fp16": F16, "half": F16, "bfloat16": BF16, "float32": F32, "fp32": F32}


def dtype(name: object) -> DType:
    """The machine type called `name` (`f16`, `float16`, `bf16`, …), or that is torch's or NumPy's type of that name."""
    said = str(name).removeprefix("torch.")
    found = DTYPES.get(said) or ALIASES.get(said)
    if found is None:
        raise FormatError(f"unknown dtype {said!r}: use one of {', '.join([*DTYPES, *ALIASES])}")
    return found


def minifloat(name: str) -> DType:
    """The small float called `e2m1`, `e4m3`, …: a sign, exponent bits, fraction bits. Raises `FormatError` on anything else.

    e4m3 and e5m2 have codes that are no numbers, as OCP defines them; every code of any other is a finite value.
    """
    match = re.fullmatch(r"e(\d)m(\d)", name)
    exponent, mantissa = map(int, match.groups()) if match else (0, 0)
    if exponent < 1 or exponent + mantissa > 7:
        raise FormatError(
            f"no small float {name!r}: use eXmY with 1 to 7 exponent bits and at most 8 bits with the sign, as in e2m1"
        )
    return DTYPES.get(name) or DType(name, 1 + exponent + mantissa, "float", mantissa, "none")
