"""Decode as data: the word operations that turn a stored code into its value, derived from what the format's values are.

Affine codes use the exponent-bias trick: a code of b bits, or-ed into the low mantissa bits of 2**mantissa, *is* the float
2**mantissa + code; one multiply-add removes the bias exactly. Codebooks are looked up. `codegen` prints the operations,
`run` executes them in NumPy, so that every code of every format is checked for the operations a kernel issues.

`code` is the position of an element in its word. Up to `every` neighbours are decoded where they stand: the word is shifted
down by `step` bits for each `every` codes before, which leaves the code at bit `low`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from w4gen.errors import FormatError
from w4gen.ir.types import F32, DType, Format


@dataclass(frozen=True, slots=True)
class At:
    """The constant `base + factor * 2**(log2 * low)`: exact, one for each bit that a code can stand at."""

    base: float
    factor: float
    log2: int

    def value(self, low: int) -> float:
        return self.base + self.factor * 2.0 ** (self.log2 * low)


@dataclass(frozen=True, slots=True)
class Shift:
    """Bring `every` codes at a time down: `word >> code // every * step`."""

    every: int
    step: int


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
    bits: int
    shift: Shift
    field: tuple[Op, ...]
    value: tuple[Op, ...]
    dtype: DType
    left_out: float = 0.0
    power: int = 0

    def low(self, code: int) -> int:
        """The bit at which a code stands when it is decoded."""
        return code * self.bits - code // self.shift.every * self.shift.step


def shift_for(bits: int, per_unit: int, room: int) -> Shift:
    """The coarsest shift that leaves every code whole inside the low `room` bits."""
    every = min(per_unit, room // bits)
    ends = [(move, min(per_unit, every * (move + 1)) * bits) for move in range(1, -(-per_unit // every))]
    return Shift(every, max((bits * -(-(end - room) // (move * bits)) for move, end in ends), default=0))


def decode(format: Format, dtype: DType, per_unit: int, in_place: bool = True) -> Decode:
    """The operations for `format` in words of `per_unit` codes, with values in `dtype` (f16, bf16 or f32).

    With `in_place` codes are decoded where they stand if the mantissa has room; without, each is shifted down to bit 0, so that
    the operations are the same for every position.
    """
    bits, mask = format.bits, 2**format.bits - 1
    if format.codebook is not None:
        each = Shift(1, bits)
        return Decode(per_unit, bits, each, (each,), (And(At(mask, 0, 0)), Lookup(dtype)), dtype)
    if bits > dtype.mantissa:
        raise FormatError(
            f"{format.label}: {bits}-bit codes do not fit the {dtype.mantissa} mantissa bits of {dtype}: use f16 or f32"
        )
    shift = shift_for(bits, per_unit, dtype.mantissa) if in_place else Shift(1, bits)
    field: tuple[Op, ...] = (shift,) if shift.step else ()
    bias = 2.0**dtype.mantissa
    exponent = (2 ** (dtype.bits - dtype.mantissa - 2) - 1 + dtype.mantissa) << dtype.mantissa
    value = (
        And(At(0, mask, 1)),
        Or(exponent),
        Bitcast(dtype),
        Fma(At(0, format.step, -1), At(format.origin, -bias * format.step, -1)),
    )
    return Decode(per_unit, bits, shift, field + ((Narrow(),) if dtype.bits == 16 else ()), value, dtype)


def decode_as_subnormal(format: Format, per_unit: int) -> Decode:
    """The fewest operations: a masked code, read as the bits of an f32, *is* the subnormal code * 2**(low - 149), exactly.

    Affine formats only; their origin is left out. x is to carry 2**(85 - low), which needs |x| < 2**42: true of f16, not of bf16.
    """
    bits = format.bits
    if format.codebook is not None or format.step != 1.0:
        raise FormatError(f"{format.label}: only codes that step by 1 are read as subnormals; leave the zero on the weight")
    shift = shift_for(bits, per_unit, F32.mantissa)
    value = (And(At(0, 2**bits - 1, 1)), Bitcast(F32))
    field: tuple[Op, ...] = (shift,) if shift.step else ()
    return Decode(per_unit, bits, shift, field, value, F32, left_out=format.origin, power=64)


def run(how: Decode, word: Any, code: int, codebook: Any = None) -> Any:
    """Decode element `code` of an i32 array of words in NumPy; bf16 stands as f32 with its bits."""
    low, value = how.low(code), word
    for op in how.field + how.value:
        match op:
            case Shift():
                value = value >> (code // op.every * op.step)
            case Narrow():
                value = value.astype(np.int16)
            case And():
                value = value & int(op.mask.value(low))
            case Or():
                value = value | value.dtype.type(op.bits)
            case Bitcast():
                wide = (value.astype(np.int32) << 16).view(np.float32) if op.dtype.name == "bf16" else None
                value = value.view({"f16": np.float16, "f32": np.float32}[op.dtype.name]) if wide is None else wide
            case Fma():
                value = value * value.dtype.type(op.times.value(low)) + value.dtype.type(op.plus.value(low))
            case Lookup():
                value = codebook[value]
    return value
