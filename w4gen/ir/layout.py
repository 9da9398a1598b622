"""Where the bits of a stored tensor live: a mixed-radix number of digits, each with a stride in bits.

The packer, the unpacker and the address arithmetic printed into kernels are all read off the same digits. Codes of 3, 5, 6 or 7
bits lie in units of a few words without a gap (`dense`), in words with a gap at the top (`rows`), or split into planes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import product
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

    Digits below one unit may leave holes (10 codes of 3 bits in 32); above it the units are dense. A unit of more than 32 bits is
    several words, and an element may lie across two of them. Elements split into planes keep their low `bits` here and the rest
    in `high`, whose units follow. Raises `FormatError` where two elements would share a bit or a unit is never used.
    """

    digits: tuple[Digit, ...]
    bits: int
    unit: int = 32
    high: Layout | None = None

    def __post_init__(self) -> None:
        end = self.bits
        for digit in sorted((d for d in self.digits if d.size > 1), key=lambda d: d.stride):
            if digit.stride < end or (digit.stride >= self.unit and digit.stride != max(end, self.unit)):
                raise FormatError(f"layout {self} is not one place per element: digit {digit} should start at bit {end}")
            if digit.stride < self.unit < digit.stride * (digit.size - 1) + end:
                raise FormatError(f"layout {self}: digit {digit} crosses the {self.unit}-bit unit")
            end = digit.stride * digit.size
        if self.unit > 32 and self.unit % 32:
            raise FormatError(f"layout {self}: a unit of {self.unit} bits is not whole words")
        if self.high is not None and any(self.size(axis) != self.high.size(axis) for axis in {*self.axes, *self.high.axes}):
            raise FormatError(f"layout {self}: its planes do not hold the same elements")

    @property
    def planes(self) -> tuple[Layout, ...]:
        """The layout of each plane alone, the one of the lowest bits first."""
        return (replace(self, high=None), *(self.high.planes if self.high else ()))

    @property
    def width(self) -> int:
        """Bits of an element, in all planes."""
        return sum(plane.bits for plane in self.planes)

    @property
    def narrowest(self) -> Layout:
        """The plane with the most elements in a unit: the others hold whole units for each of its."""
        return max(self.planes, key=lambda plane: plane.per_unit)

    @property
    def length(self) -> int:
        """Stored machine words, of all planes: units, of which one wider than 32 bits is several."""
        return sum(plane.units * max(1, plane.unit // 32) for plane in self.planes)

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

    def address(self, bit: int = 0, **index: Any) -> Any:
        """The place of one bit (default: the lowest) of the element at `index` (one integer or array per axis)."""
        if bit >= self.bits and self.high is not None:
            return self.units * self.unit + self.high.address(bit - self.bits, **index)
        rest, total = dict(index), bit
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
    def row_major(self) -> bool:
        """Whether the elements follow one another row by row, the last axis fastest."""
        stride = self.bits
        for digit in (digit for axis in reversed(self.axes) for digit in self.digits if digit.axis == axis):
            if digit.size > 1 and digit.stride != stride:
                return False
            stride *= digit.size
        return True

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
        """Units in one row where the units of a row are neighbours and the rows follow each other, else None."""
        units = math.prod(d.size for d in self.digits if d.axis == "k" and d.stride >= self.unit)
        after = units * self.unit
        for digit in (d for d in self.digits if d.axis == "n" and d.size > 1):
            if digit.stride != after:
                return None
            after *= digit.size
        return units

    def __str__(self) -> str:
        return f"{','.join(map(str, self.digits))};{self.bits}/{self.unit}" + (f"+{self.high}" if self.high else "")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that `str()` wrote. Raises `FormatError` on anything else."""
        low, plus, high = text.partition("+")
        match = re.fullmatch(r"((?:[a-z]+\d+@\d+,?)+);(\d+)/(\d+)", low)
        if match is None:
            raise FormatError(f"cannot read the layout {text!r}: write it with str(layout)")
        digits = (Digit(axis, int(size), int(stride)) for axis, size, stride in re.findall(r"([a-z]+)(\d+)@(\d+)", match[1]))
        return cls(tuple(digits), int(match[2]), int(match[3]), cls.parse(high) if plus else None)


QUAD = 4
"""Words that one 16-byte load brings to a thread; rows are whole quads."""


PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""The widths, lowest bits first, of the planes that codes are split into where no whole number of them fills a word."""


def rows(n: int, k: int, bits: int, run: int = 1, unit: int = 32) -> Layout:
    """Rows of units, words of 32 bits; `run` consecutive k share a position in `run` consecutive units (run=1: a plain stream).

    k is padded to whole blocks of `run` units and whole quads. With 4 bits and run=16, code i of word v in block b is
    k = 128 b + 16 i + v. Of 3 bits a word holds 10, with 2 bits to spare.
    """
    per_unit, granule = unit // bits, max(run, QUAD)
    blocks = -(-k // (granule * per_unit)) * granule // run
    k_digits = (Digit("k", run, unit), Digit("k", per_unit, bits), Digit("k", blocks, unit * run))
    return Layout((Digit("n", n, unit * run * blocks), *k_digits), bits, unit)


def dense(n: int, k: int, bits: int) -> Layout:
    """Rows without a gap: the stream of bits that most checkpoints hold, 32 codes of 3 bits in a unit of 3 words."""
    return rows(n, k, bits, unit=math.lcm(32, bits))


def planes(n: int, k: int, bits: int, run: int = 1) -> Layout:
    """Rows for each plane of `PLANES`, with k padded so that all planes have whole blocks: code i of a block is alike in all."""
    widths = PLANES.get(bits, (bits,))
    per_block = max(run, QUAD) * (32 // min(widths))
    split: Layout | None = None
    for width in reversed(widths):
        split = replace(rows(n, -(-k // per_block) * per_block, width, run), high=split)
    if split is None:
        raise FormatError(f"no planes for codes of {bits} bits")
    return split


def matrix(shape: dict[str, int], bits: int) -> Layout:
    """A row-major tensor of machine words, the last axis fastest."""
    sizes = list(shape.values())
    digits = [Digit(axis, size, bits * math.prod(sizes[index + 1 :])) for index, (axis, size) in enumerate(shape.items())]
    return Layout(tuple(digits), bits, bits)


def _spread(layout: Layout) -> tuple[list[int], list[int]]:
    """Sizes with one axis per digit (each layout axis from its most significant digit on), and their order by falling stride."""
    digits = [digit for axis in layout.axes for digit in reversed([d for d in layout.digits if d.axis == axis])]
    return [digit.size for digit in digits], sorted(range(len(digits)), key=lambda position: -digits[position].stride)


def _shifts(layout: Layout) -> list[int]:
    """The bit at which each element of a unit starts, in storage order of falling stride."""
    places = [0]
    for digit in sorted((d for d in layout.digits if d.stride < layout.unit), key=lambda d: -d.stride):
        places = [place + index * digit.stride for place in places for index in range(digit.size)]
    return places


def pack(layout: Layout, array: Any, xp: Any) -> Any:
    """What is stored of `array` (axes as `layout.axes`, padded): i32 words, u8 in units of 8 bits, elements that fill one."""
    if layout.high is not None:
        low, *_ = layout.planes
        return xp.concatenate([pack(low, array & (2**low.bits - 1), xp), pack(layout.high, array >> low.bits, xp)])
    sizes, order = _spread(layout)
    spread = xp.moveaxis(array.reshape(sizes), order, list(range(len(order))))
    if layout.bits == layout.unit or _in_bytes(layout):
        return spread.reshape(-1) if layout.bits == layout.unit else _bytes(layout, xp.asarray(spread, dtype=xp.uint8), xp)
    spread = xp.asarray(spread.reshape([layout.units, layout.per_unit]), dtype=xp.int32)
    words = [xp.zeros_like(spread[:, 0]) for _ in range(max(1, layout.unit // 32))]
    for position, start in enumerate(_shifts(layout)):
        word, bit = divmod(start, 32)
        words[word] |= spread[:, position] << bit
        if bit + layout.bits > 32:
            words[word + 1] |= spread[:, position] >> (32 - bit)
    return xp.stack(words, -1).reshape(-1)


def unpack(layout: Layout, stored: Any, xp: Any) -> Any:
    """The array that `pack` stored, padding included: u8 codes, or the elements themselves."""
    if layout.high is not None:
        low, *_ = layout.planes
        return unpack(low, stored[: low.length], xp) | (unpack(layout.high, stored[low.length :], xp) << low.bits)
    if layout.bits < layout.unit and _in_bytes(layout):
        held, mask = stored.reshape(-1).view(xp.uint8).reshape([layout.units, layout.unit // 8]), 2**layout.bits - 1
        stored = xp.stack([held[:, start // 8] >> start % 8 & mask for start in _shifts(layout)], -1)
    elif layout.bits < layout.unit:
        words = stored.reshape([layout.units, max(1, layout.unit // 32)])
        stored = xp.stack([xp.asarray(_element(words, start, layout.bits), dtype=xp.uint8) for start in _shifts(layout)], -1)
    sizes, order = _spread(layout)
    spread = stored.reshape([sizes[position] for position in order])
    return xp.moveaxis(spread, list(range(len(order))), order).reshape([layout.size(axis) for axis in layout.axes])


def _in_bytes(layout: Layout) -> bool:
    """Whether no element lies in two bytes: then bytes are moved, not words."""
    return all(start % 8 + layout.bits <= 8 for start in _shifts(layout))


def _bytes(layout: Layout, spread: Any, xp: Any) -> Any:
    """What is stored, byte by byte, of elements [digits of units, digits inside one]."""
    inside = sum(digit.stride < layout.unit for digit in layout.digits)
    places = list(product([...], *map(range, spread.shape[spread.ndim - inside :])))
    held = [xp.zeros_like(spread[places[0]]) for _ in range(layout.unit // 8)]
    for place, start in zip(places, _shifts(layout), strict=True):
        held[start // 8] |= spread[place] << start % 8
    return xp.stack(held, -1).reshape(-1).view(xp.uint8 if layout.unit == 8 else xp.int32)


def _element(words: Any, start: int, bits: int) -> Any:
    """The `bits` from `start` on of units of 32-bit words, some of which may lie in the next word."""
    word, bit = divmod(start, 32)
    below = min(bits, 32 - bit)
    low = (words[:, word] >> bit) & (2**below - 1)
    return low if below == bits else low | ((words[:, word + 1] & (2 ** (bits - below) - 1)) << below)
