"""Decode as data: the word operations that turn a stored code into its value, derived from what the format's values are.

Affine codes use the exponent-bias trick: a code of b bits, or-ed into the low mantissa bits of 2**mantissa, *is* the float
2**mantissa + code; one multiply-add removes the bias exactly. Codebooks are looked up. `codegen` prints the operations,
`run` executes them in NumPy, so that every code of every format is checked for the operations a kernel issues.

`code` is the position of an element in its word; up to `every` neighbours are decoded where they stand, without a shift,
and `p = code % every` is their place among these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from w4gen.errors import FormatError
from w4gen.ir.types import F32, DType, Format


@dataclass(frozen=True, slots=True)
class At:
    """The constant `base + factor * 2**(log2 * p)`: exact, one per place."""

    base: float
    factor: float
    log2: int

    def value(self, p: int) -> float:
        return self.base + self.factor * 2.0 ** (self.log2 * p)


@dataclass(frozen=True, slots=True)
class Shift:
    """Bring `every` codes of `bits` bits down to bit 0: `word >> code // every * every * bits`."""

    every: int
    bits: int


@dataclass(frozen=True, slots=True)
class Narrow:
    """Keep the low 16 bits."""


@dataclass(frozen=True, slots=True)
class And:
    mask: At


@dataclass(frozen=True, slots=True)
class Or:
    bits: int


@dataclass(frozen=True, slots=True)
class Bitcast:
    dtype: DType


@dataclass(frozen=True, slots=True)
class Fma:
    """`value * times + plus`; both steps are exact for the codes of the format, so fusing them changes nothing."""

    times: At
    plus: At


@dataclass(frozen=True, slots=True)
class Lookup:
    """`codebook[code]`, the codebook being an operand of the kernel in `dtype`."""

    dtype: DType


Op: TypeAlias = Shift | Narrow | And | Or | Bitcast | Fma | Lookup


@dataclass(frozen=True, slots=True)
class Decode:
    """`field` moves one of the `per_unit` codes of a word to where `value` can turn it into `dtype`.

    Values come out without `left_out` (an origin that is made up for on the sums) and, where `power` is set, as
    value * 2**(bit of the code - 149): x must carry 2**(149 - power - bit), and sums come out times 2**-power.
    """

    per_unit: int
    every: int
    field: tuple[Op, ...]
    value: tuple[Op, ...]
    dtype: DType
    left_out: float = 0.0
    power: int = 0


def decode(format: Format, dtype: DType, per_unit: int) -> Decode:
    """The operations for `format` in words of `per_unit` codes, with values in `dtype` (f16, bf16 or f32)."""
    bits, mask = format.bits, 2**format.bits - 1
    if format.codebook is not None:
        return Decode(per_unit, 1, (Shift(1, bits),), (And(At(mask, 0, 0)), Lookup(dtype)), dtype)
    if bits > dtype.mantissa:
        raise FormatError(
            f"{format.label}: {bits}-bit codes do not fit the {dtype.mantissa} mantissa bits of {dtype}: use f16 or f32"
        )
    every = max(run for run in range(1, per_unit + 1) if per_unit % run == 0 and run * bits <= dtype.mantissa)
    bias = 2.0**dtype.mantissa
    narrow: tuple[Op, ...] = (Narrow(),) if dtype.bits == 16 else ()
    shift: tuple[Op, ...] = (Shift(every, bits),) if every < per_unit else ()
    exponent = (2 ** (dtype.bits - dtype.mantissa - 2) - 1 + dtype.mantissa) << dtype.mantissa
    value = (
        And(At(0, mask, bits)),
        Or(exponent),
        Bitcast(dtype),
        Fma(At(0, format.step, -bits), At(format.origin, -bias * format.step, -bits)),
    )
    return Decode(per_unit, every, shift + narrow, value, dtype)


def decode_as_subnormal(format: Format, per_unit: int) -> Decode:
    """The fewest operations: a masked code, read as the bits of an f32, *is* the subnormal code * 2**(bit - 149), exactly.

    Affine formats only; their origin is left out. x is to carry 2**(85 - bit), which needs |x| < 2**42: true of f16, not of bf16.
    """
    bits, mask = format.bits, 2**format.bits - 1
    if format.codebook is not None or format.step != 1.0:
        raise FormatError(f"{format.label}: only codes that step by 1 are read as subnormals; leave the zero on the weight")
    every = max(run for run in range(1, per_unit + 1) if per_unit % run == 0 and run * bits <= 23)
    shift: tuple[Op, ...] = (Shift(every, bits),) if every < per_unit else ()
    return Decode(per_unit, every, shift, (And(At(0, mask, bits)), Bitcast(F32)), F32, left_out=format.origin, power=64)


def run(ops: tuple[Op, ...], word: Any, code: int, every: int, codebook: Any = None) -> Any:
    """Execute operations on an integer array in NumPy; bf16 stands as f32 with its bits."""
    p, value = code % every, word
    for op in ops:
        match op:
            case Shift():
                value = value >> (code // op.every * op.every * op.bits)
            case Narrow():
                value = value.astype(np.int16)
            case And():
                value = value & int(op.mask.value(p))
            case Or():
                value = value | value.dtype.type(op.bits)
            case Bitcast():
                wide = (value.astype(np.int32) << 16).view(np.float32) if op.dtype.name == "bf16" else None
                value = value.view({"f16": np.float16, "f32": np.float32}[op.dtype.name]) if wide is None else wide
            case Fma():
                value = value * value.dtype.type(op.times.value(p)) + value.dtype.type(op.plus.value(p))
            case Lookup():
                value = codebook[value]
    return value
