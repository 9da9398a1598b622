"""Decode as data: the word operations that turn a stored code into its value, derived from what the format's values are.

Affine codes use the exponent-bias trick: a code of b bits, or-ed into the low mantissa bits of 2**mantissa, *is* the float
2**mantissa + code; one multiply-add removes the bias exactly. The code of a small float is shifted to where a wider float has
sign and exponent, and one multiplication makes up for the other bias. Codebooks are looked up. `codegen` prints the operations,
`run` executes them in NumPy, so that every code of every format is checked for the operations a kernel issues.

`code` is the position of an element in its word. Up to `every` neighbours are decoded where they stand: the word is shifted
down by `step` bits for each `every` codes before, which leaves the code at bit `low`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from w4gen.errors import FormatError
from w4gen.ir.types import F16, F32, DType, Format


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
class Left:
    """Shift up; what is above the word's top is gone."""

    by: int


@dataclass(frozen=True, slots=True)
class Right:
    """Shift down with copies of the top bit, the sign."""

    by: int


@dataclass(frozen=True, slots=True)
class Clear:
    bits: int


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The larger of the word and `bits`, as integers."""

    bits: int


@dataclass(frozen=True, slots=True)
class Except:
    """A word in which all of `ones` are set is no number: it gets `bits` too.

    Either is one run of bits, so that two halves of a word can be told apart at once: if all ones are set, adding the `lowest` of
    them carries into bit `carry`; bits run from `fill` to just below the sign.
    """

    ones: int
    bits: int

    @property
    def lowest(self) -> int:
        return self.ones & -self.ones

    @property
    def carry(self) -> int:
        return self.ones.bit_length()

    @property
    def fill(self) -> int:
        return (self.bits & -self.bits).bit_length() - 1


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


Op: TypeAlias = Shift | Narrow | And | Or | Left | Right | Clear | AtLeast | Except | Bitcast | Fma | Lookup


@dataclass(frozen=True, slots=True)
class Decode:
    """`field` moves one of the `per_unit` codes of a word to where `value` can turn it into `dtype`.

    Values come out without `left_out` (an origin that is made up for on the sums) and, where `power` is set, as
    value * 2**(bit of the code - below): x must carry 2**(below - power - bit), and sums come out times 2**-power.
    """

    per_unit: int
    bits: int
    shift: Shift
    field: tuple[Op, ...]
    value: tuple[Op, ...]
    dtype: DType
    left_out: float = 0.0
    power: int = 0
    below: int = 149

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
    the operations are the same for every position. A code alone in its word (`per_unit` of 1) needs no shift and no mask.
    """
    return _alone(_decode(format, dtype, per_unit, in_place))


def _alone(how: Decode) -> Decode:
    """Without what separates a code from others, where there are none."""
    if how.per_unit > 1:
        return how
    rest = tuple(op for op in how.field if not isinstance(op, Shift))
    return replace(how, shift=Shift(1, 0), field=(), value=rest + how.value[isinstance(how.value[0], And) :])


def _decode(format: Format, dtype: DType, per_unit: int, in_place: bool) -> Decode:
    """`decode`, of codes with others in their word."""
    bits, mask = format.bits, 2**format.bits - 1
    if format.codebook is not None:
        each = Shift(1, bits)
        return Decode(per_unit, bits, each, (each,), (And(At(mask, 0, 0)), Lookup(dtype)), dtype)
    if format.minifloat is not None:
        return _small_float(format.minifloat, dtype, per_unit)
    if bits > dtype.mantissa:
        raise FormatError(
            f"{format.label}: {bits}-bit codes do not fit the {dtype.mantissa} mantissa bits of {dtype}: use f16 or f32"
        )
    shift = shift_for(bits, per_unit, dtype.mantissa) if in_place else Shift(1, bits)
    field: tuple[Op, ...] = (shift,) if shift.step else ()
    bias = 2.0**dtype.mantissa
    exponent = (2 ** (dtype.bits - dtype.mantissa - 2) - 1 + dtype.mantissa) << dtype.mantissa
    code = (And(At(0, mask, 1)), Or(exponent), Bitcast(dtype))
    scaled: tuple[Op, ...]
    if format.origin % format.step:  # half a step: the bias is removed first, or the constant would not be exact
        scaled = (Fma(At(0, 1, -1), At(0, -bias, -1)), Fma(At(format.step, 0, 0), At(format.origin, 0, 0)))
    else:
        scaled = (Fma(At(0, format.step, -1), At(format.origin, -bias * format.step, -1)),)
    return Decode(per_unit, bits, shift, field + ((Narrow(),) if dtype.bits == 16 else ()), code + scaled, dtype)


def _small_float(kind: DType, dtype: DType, per_unit: int) -> Decode:
    """Codes of `kind`, each shifted down to bit 0, as `dtype`, which must have at least its exponent and fraction bits."""
    gap, ones = dtype.exponent - kind.exponent, 2**kind.exponent - 1
    if not kind.fits(dtype):
        raise FormatError(
            f"{kind} does not fit the {dtype.exponent} exponent and {dtype.mantissa} mantissa bits of {dtype}: use f32"
        )
    largest, quiet = (2**dtype.exponent - 1) << dtype.mantissa, 1 << (dtype.mantissa - 1)
    above = ones << dtype.mantissa  # the exponent bits that a code fills
    code: list[Op] = [Left(dtype.mantissa if not kind.signed else dtype.bits - kind.bits)]
    if not kind.signed:
        code.append(And(At(largest, 0, 0)))
    elif gap:
        code += [Right(gap), Clear(largest ^ above)]
    if kind.special == "nan":
        fraction = (2**kind.mantissa - 1) << (dtype.mantissa - kind.mantissa)
        code.append(Except(above | fraction, largest | quiet))
    elif kind.special == "ieee" and gap:
        code.append(Except(above, largest))
    if not kind.signed:
        code.append(AtLeast(quiet))  # the least power of two is subnormal
    code.append(Bitcast(dtype))
    if gap:
        code.append(Fma(At(2.0 ** (dtype.bias - kind.bias), 0, 0), At(0, 0, 0)))
    shift = Shift(1, kind.bits)
    return Decode(per_unit, kind.bits, shift, (shift, *([Narrow()] if dtype.bits == 16 else [])), tuple(code), dtype)


def decode_for_x(format: Format, per_unit: int) -> Decode:
    """The fewest operations, in f32, for an x that carries a power of two; an affine format's origin is left out.

    A masked code, read as the bits of an f32, *is* the subnormal code * 2**(low - 149), exactly, and x is to carry 2**(85 - low).
    A small float goes without its last multiplication. Either needs |x| < 2**42: true of f16, not of bf16.
    """
    bits = format.bits
    if format.minifloat is not None:
        how = _small_float(format.minifloat, F32, per_unit)
        value = tuple(op for op in how.value if not isinstance(op, Fma))
        return _alone(replace(how, value=value, power=64, below=F32.bias - format.minifloat.bias))
    if not format.affine or not 2.0**-16 <= format.step <= 2.0**16:
        raise FormatError(
            f"{format.label}: only affine codes, of steps up to 2**16, are read as subnormals; leave the zero on the weight"
        )
    shift = shift_for(bits, per_unit, F32.mantissa)
    value = (And(At(0, 2**bits - 1, 1)), Bitcast(F32))
    field: tuple[Op, ...] = (shift,) if shift.step else ()
    return _alone(Decode(per_unit, bits, shift, field, value, F32, format.origin, 64, 149 + round(math.log2(format.step))))


def decode_pairs(format: Format, dtype: DType, per_unit: int) -> Decode:
    """The operations, in f16 or bf16, for the codes of half a word, each of which has a neighbour half a word further up.

    A small float as an f16 goes without its last multiplication, by 2**power: values down to the subnormals of f16 are exact, the
    matrix instruction keeps them, and the sums make up for the power. Of bf16 they would leave the range of an f32 sum.
    """
    if format.codebook is not None:
        return decode(format, dtype, per_unit)
    how = decode(format, dtype, 16 // format.bits)
    factor = next((op.times.base for op in how.value if isinstance(op, Fma)), 1.0)
    if format.minifloat is None or dtype != F16 or factor == 1:
        return how
    power = round(math.log2(factor))
    return replace(how, value=tuple(op for op in how.value if not isinstance(op, Fma)), power=power, below=power)


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a small float at bit 0 goes in 16 bits: its sign up by `sign`, what is below it up by `rest`, under these masks."""

    sign: int
    rest: int
    sign_mask: int
    rest_mask: int


def moved(how: Decode) -> Moved | None:
    """The moves of a small float, where both codes of a pair can make them at once; None for other values."""
    left = next((op.by for op in how.value if isinstance(op, Left)), None)
    if left is None or how.dtype.bits != 16:
        return None
    rest = left - next((op.by for op in how.value if isinstance(op, Right)), 0)
    return Moved(left, rest, 0x8000, (2 ** (how.bits - 1) - 1) << rest)


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
            case Left():
                value = value << value.dtype.type(op.by)
            case Right():
                value = value >> value.dtype.type(op.by)
            case Clear():
                value = value & value.dtype.type(~op.bits)
            case AtLeast():
                value = np.maximum(value, value.dtype.type(op.bits))
            case Except():
                value = np.where((value & op.ones) == op.ones, value | value.dtype.type(op.bits), value)
            case Bitcast():
                wide = (value.astype(np.int32) << 16).view(np.float32) if op.dtype.name == "bf16" else None
                value = value.view({"f16": np.float16, "f32": np.float32}[op.dtype.name]) if wide is None else wide
            case Fma():
                value = value * value.dtype.type(op.times.value(low))
                value = value + value.dtype.type(op.plus.value(low)) if op.plus.value(low) else value
            case Lookup():
                value = codebook[value]
    return value
