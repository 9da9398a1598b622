"""Where the bits of a stored tensor live: a mixed-radix number of digits, each with a stride in bits.

The packer, the unpacker and the address arithmetic printed into kernels are all read off the same digits.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from w4gen.errors import FormatError


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of an axis' index; the digits of an axis are listed from the least significant on."""

    axis: str
    size: int
    stride: int

    def __str__(self) -> str:
        return f"{self.axis}{self.size}@{self.stride}"


@dataclass(frozen=True, slots=True)
class Place:
    """One digit as arithmetic: `source // divide % modulo * weight` is its share of an index (modulo 0: no modulo)."""

    source: str
    divide: int
    modulo: int
    weight: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`address(index) = sum of digit * stride`, in bits, of elements `bits` wide kept in units of `unit` bits.

    Digits below one unit may leave holes (10 codes of 3 bits in 32); above it the units are dense.
    Raises `FormatError` where two elements would share a bit or a unit is never used.
    """

    digits: tuple[Digit, ...]
    bits: int
    unit: int = 32

    def __post_init__(self) -> None:
        end = self.bits
        for digit in sorted((d for d in self.digits if d.size > 1), key=lambda d: d.stride):
            if digit.stride < end or (digit.stride >= self.unit and digit.stride != max(end, self.unit)):
                raise FormatError(f"layout {self} is not one place per element: digit {digit} should start at bit {end}")
            if digit.stride < self.unit < digit.stride * (digit.size - 1) + end:
                raise FormatError(f"layout {self}: digit {digit} crosses the {self.unit}-bit unit")
            end = digit.stride * digit.size

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(digit.axis for digit in self.digits))

    def size(self, axis: str) -> int:
        """Elements along `axis`, padding included."""
        return math.prod(digit.size for digit in self.digits if digit.axis == axis)

    @property
    def units(self) -> int:
        """Storage units of the whole tensor."""
        return math.prod(digit.size for digit in self.digits if digit.stride >= self.unit)

    @property
    def per_unit(self) -> int:
        """Elements in one storage unit."""
        return math.prod(digit.size for digit in self.digits if digit.stride < self.unit)

    def address(self, **index: Any) -> Any:
        """The bit at which the element at `index` (one integer or array per axis) starts."""
        rest, total = dict(index), 0
        for digit in self.digits:
            total = total + rest[digit.axis] % digit.size * digit.stride
            rest[digit.axis] = rest[digit.axis] // digit.size
        return total

    def places(self, axis: str) -> tuple[Place, ...]:
        """The digits of `axis`, least significant first, as functions of `word` (unit in its row) and `code` (place in it).

        This is the inverse of `address` for a layout of rows, where the units of one row are neighbours.
        """
        places, weight = [], 1
        for digit in (digit for digit in self.digits if digit.axis == axis):
            peers = [d for d in self.digits if d.axis == axis and (d.stride < self.unit) == (digit.stride < self.unit)]
            below = math.prod(d.size for d in peers if d.stride < digit.stride)
            top = below * digit.size == math.prod(d.size for d in peers)
            source = "code" if digit.stride < self.unit else "word"
            places.append(Place(source, below, 0 if top else digit.size, weight))
            weight *= digit.size
        return tuple(places)

    @property
    def run(self) -> int:
        """The lowest digit of k: in rows, the neighbouring k that lie at one position of as many words."""
        return next(digit.size for digit in self.digits if digit.axis == "k")

    @property
    def natural(self) -> bool:
        """Whether a block of `run` words, read one code position after the other, holds neighbouring k in order."""
        inside = [place for place in self.places("k") if place.source == "code" and place.modulo != 1]
        return all(place.weight == self.run * place.divide for place in inside) and self.row_units() is not None

    def index(self, axis: str, word: Any, code: Any) -> Any:
        """The index along `axis` of element `code` of unit `word` of a row."""
        total = 0
        for place in self.places(axis):
            value = (word if place.source == "word" else code) // place.divide
            total = total + (value % place.modulo if place.modulo else value) * place.weight
        return total

    def bit(self, code: int) -> int:
        """The bit of its unit at which element `code` starts."""
        start = 0
        for digit in sorted((d for d in self.digits if d.stride < self.unit), key=lambda d: d.stride):
            start, code = start + code % digit.size * digit.stride, code // digit.size
        return start

    @property
    def block_units(self) -> int:
        """Units of a block, the smallest stretch of storage in which every digit of k but the highest runs through."""
        return max((d.stride for d in self.digits if d.axis == "k"), default=self.unit) // self.unit

    @property
    def block(self) -> dict[str, int]:
        """Elements of a block along each axis."""
        inside = [digit for digit in self.digits if digit.stride < self.block_units * self.unit]
        return {axis: math.prod(digit.size for digit in inside if digit.axis == axis) for axis in self.axes}

    def padding(self, **sizes: int) -> float:
        """Elements of padding for each element of a tensor of these sizes."""
        held = math.prod(map(self.size, sizes))
        return held / math.prod(sizes.values()) - 1

    def row_units(self) -> int | None:
        """Units in one row where the units of a row are neighbours, else None."""
        units = math.prod(d.size for d in self.digits if d.axis == "k" and d.stride >= self.unit)
        return None if any(d.axis == "n" and d.size > 1 and d.stride < units * self.unit for d in self.digits) else units

    def __str__(self) -> str:
        return f"{','.join(map(str, self.digits))};{self.bits}/{self.unit}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that `str()` wrote. Raises `FormatError` on anything else."""
        match = re.fullmatch(r"((?:[a-z]+\d+@\d+,?)+);(\d+)/(\d+)", text)
        if match is None:
            raise FormatError(f"cannot read the layout {text!r}: write it with str(layout)")
        digits = re.findall(r"([a-z]+)(\d+)@(\d+)", match[1])
        return cls(tuple(Digit(axis, int(size), int(stride)) for axis, size, stride in digits), int(match[2]), int(match[3]))


QUAD = 4
"""Words that one 16-byte load brings to a thread; rows are whole quads."""


def rows(n: int, k: int, bits: int, run: int = 1) -> Layout:
    """Rows of 32-bit words; `run` consecutive k share a position in `run` consecutive words (run=1: the plain dense stream).

    k is padded to whole blocks of `run` words and whole quads. With 4 bits and run=16, code i of word v in block b is
    k = 128 b + 16 i + v.
    """
    per_word, granule = 32 // bits, max(run, QUAD)
    blocks = -(-k // (granule * per_word)) * granule // run
    k_digits = (Digit("k", run, 32), Digit("k", per_word, bits), Digit("k", blocks, 32 * run))
    return Layout((Digit("n", n, 32 * run * blocks), *k_digits), bits)


def matrix(shape: dict[str, int], bits: int) -> Layout:
    """A row-major tensor of machine words, the last axis fastest."""
    digits, stride = [], bits
    for axis, size in reversed(shape.items()):
        digits.append(Digit(axis, size, stride))
        stride *= size
    return Layout(tuple(reversed(digits)), bits, bits)


def beside(layout: Layout, groups: int, bits: int) -> Layout:
    """The order of a tensor of one machine word for each row n and group g, kept beside codes in `layout`.

    Row-major beside rows. Beside blocks of several rows it follows the rows of a block, those that share a word of codes next to
    each other: what a lane needs of it is one load.
    """
    rows_of = sorted((digit for digit in layout.digits if digit.axis == "n"), key=lambda digit: digit.stride)
    if layout.row_units() is not None:
        return matrix({"n": layout.size("n"), "g": groups}, bits)
    block = [digit for digit in rows_of if digit.stride < layout.block_units * layout.unit]
    order = [*block, Digit("g", groups, 0), *(digit for digit in rows_of if digit not in block)]
    places: dict[Digit, int] = {}
    stride = bits
    for digit in order:
        places[digit], stride = stride, stride * digit.size
    listed = [digit for digit in layout.digits if digit in places] + [Digit("g", groups, 0)]
    return Layout(tuple(Digit(each.axis, each.size, places[each]) for each in listed), bits, bits)


def _spread(layout: Layout) -> tuple[list[int], list[int]]:
    """Sizes with one axis per digit (each layout axis from its most significant digit on), and their order by falling stride."""
    digits = [digit for axis in layout.axes for digit in reversed([d for d in layout.digits if d.axis == axis])]
    order = sorted(range(len(digits)), key=lambda position: -digits[position].stride)
    return [digit.size for digit in digits], order


def _shifts(layout: Layout) -> list[int]:
    """The bit at which each element of a unit starts, in storage order of falling stride."""
    places = [0]
    for digit in sorted((d for d in layout.digits if d.stride < layout.unit), key=lambda d: -d.stride):
        places = [place + index * digit.stride for place in places for index in range(digit.size)]
    return places


def pack(layout: Layout, array: Any, xp: Any) -> Any:
    """Storage units of `array` (axes as `layout.axes`, padded): i32[units] of codes, or the elements where each is a unit."""
    sizes, order = _spread(layout)
    spread = xp.moveaxis(array.reshape(sizes), order, list(range(len(order))))
    if layout.bits == layout.unit:
        return spread.reshape(-1)
    spread = spread.reshape([layout.units, layout.per_unit])
    words = xp.zeros_like(xp.asarray(spread[:, 0], dtype=xp.int32))
    for position, shift in enumerate(_shifts(layout)):
        words |= xp.asarray(spread[:, position], dtype=xp.int32) << shift
    return words


def unpack(layout: Layout, units: Any, xp: Any) -> Any:
    """The array that `pack` stored, padding included: u8 codes, or the elements themselves."""
    if layout.bits < layout.unit:
        mask = 2**layout.bits - 1
        units = xp.stack([xp.asarray((units >> shift) & mask, dtype=xp.uint8) for shift in _shifts(layout)], -1)
    sizes, order = _spread(layout)
    spread = units.reshape([sizes[position] for position in order])
    return xp.moveaxis(spread, list(range(len(order))), order).reshape([layout.size(axis) for axis in layout.axes])
