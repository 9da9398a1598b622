"""The stored order of the codes: one for every bucket of M, from the arch's matrix instruction or, without one, rows."""

from __future__ import annotations

import math

from w4gen.errors import ScheduleError
from w4gen.ir.decode import Decode, decode
from w4gen.ir.layout import PLANES, QUAD, Digit, Layout, planes, rows
from w4gen.ir.problem import Problem
from w4gen.ir.types import F32, DType, Format
from w4gen.schedule.arch import Arch, Fragment
from w4gen.schedule.cost import operations

PADDING = 0.05
"""The share of padding above which a weight is not stored in the order of a matrix instruction."""

WASTE = 0.02
"""The share of bytes above the fewest possible up to which a layout is taken for its order."""


def layout_for(format: Format, arch: Arch, n: int, k: int) -> Layout:
    """The stored order of the codes, one for every bucket of M: the fewest bytes, then the fewest operations to decode a code.

    The order of the arch's matrix instruction, where the arch has one. Else, and where its blocks would pad the weight too much,
    rows in which 16 consecutive k share a code position of 16 consecutive words: x is then read in contiguous pieces and every
    code lies under one scale. Fewer where 16 would pad a row too much.
    """
    if arch.fragment is not None and 32 % format.bits == 0:
        order = fragment_order(format, arch.fragment, n, k)
        if order.size("n") * order.size("k") <= (1 + PADDING) * n * k:
            return order
    candidates = layouts_for(format, n, k)
    fewest = min(each.length for each in candidates)
    return min(
        (each for each in candidates if each.length <= (1 + WASTE) * fewest),
        key=lambda each: (operations(each, decoded(format, F32, each)), -each.run),
    )


def layout_of(problem: Problem, arch: Arch) -> Layout:
    """The stored order of a problem's codes: the one that it names, as its weight is packed already, else `layout_for`."""
    return problem.layout or layout_for(problem.format, arch, problem.n, problem.k)


def layouts_for(format: Format, n: int, k: int) -> list[Layout]:
    """The layouts that kernels read: rows of words, and of codes that do not fill a word, rows of their planes."""
    ways = (rows, planes) if format.bits in PLANES else (rows,)
    return [way(n, k, format.bits, run) for way in ways for run in (16, 8, 4, 1)]


def fragment_order(format: Format, fragment: Fragment, n: int, k: int) -> Layout:
    """Codes as a matrix instruction takes them: what a lane holds of a few fragments along k are 16 bytes, a quad of words.

    The codes of a pair of neighbouring k sit half a word apart, so that one mask takes both; those of a codebook next to each
    other, so that one look-up takes both. Half a word (of a codebook: a word) holds the registers of the instruction and
    fragments further along k; what it has no room for goes to the words of the quad. Raises `ScheduleError` for codes that do
    not fill words.
    """
    bits, looked_up = format.bits, format.codebook is not None
    if 32 % bits:
        raise ScheduleError(f"{format.label}: {bits}-bit codes do not fill 32-bit words in the order of fragments: take rows")
    digits = fragment.digits
    (pair,) = fragment.at("pair")
    inside = sorted(fragment.at("register"), key=lambda index: digits[index][0] != "n")
    further = [("k", 2, "register")] * int(math.log2(QUAD * 32 / bits / math.prod(digits[i][1] for i in (pair, *inside))))
    places: dict[int, int] = {pair: bits if looked_up else 16}
    stride = 2 * bits if looked_up else bits
    for index, (_, size, _) in [(i, digits[i]) for i in inside] + list(enumerate(further, len(digits))):
        stride = 32 if stride == 16 and not looked_up else stride
        places[index], stride = stride, stride * size
    for index in fragment.at("lane"):
        places[index], stride = stride, stride * digits[index][1]
    listed = [Digit(axis, size, places[index]) for index, (axis, size, _) in enumerate([*digits, *further])]
    held = {axis: math.prod(digit.size for digit in listed if digit.axis == axis) for axis in ("n", "k")}
    blocks = {axis: -(-size // held[axis]) for axis, size in (("n", n), ("k", k))}
    listed += [Digit("k", blocks["k"], stride), Digit("n", blocks["n"], stride * blocks["k"])]
    return Layout(tuple(sorted(listed, key=lambda digit: digit.axis != "n")), bits)


def decoded(format: Format, dtype: DType, layout: Layout, in_place: bool = True) -> Decode:
    """The word operations for codes as `layout` holds them: those of planes are put together first, alone in their word."""
    return decode(format, dtype, 1 if layout.high else layout.per_unit, in_place)


def readable(layout: Layout, format: Format, arch: Arch) -> bool:
    """Whether a template that multiplies reads a layout: rows, or blocks in the very order of the arch's fragments."""
    if layout.row_units() is not None:
        return True
    sizes = layout.size("n"), layout.size("k")
    return arch.fragment is not None and layout == fragment_order(format, arch.fragment, *sizes)


def steps(layout: Layout, group: int) -> tuple[list[int], list[int]]:
    """Steps of 128 and of 64 k that are whole blocks of a layout and divide its k: those under one scale, those under several."""
    whole = [size for size in (128, 64) if layout.size("k") % size == size % layout.block["k"] == 0]
    return [size for size in whole if group % size == 0], [size for size in whole if size % group == group % 16 == 0]
