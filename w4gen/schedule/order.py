"""The stored order of a weight's codes: that of the matrix instruction, or rows."""

from __future__ import annotations

import math

from w4gen.errors import ScheduleError
from w4gen.ir.layout import QUAD, Digit, Layout, rows
from w4gen.ir.types import Format
from w4gen.schedule.arch import Arch, Fragment

WASTE = 0.05
"""The share of padding in a row above which a layout with a smaller granule is taken."""


def layout_for(format: Format, arch: Arch, n: int, k: int) -> Layout:
    """The stored order of the codes, one for every bucket of M.

    The order of the arch's matrix instruction, where the arch has one. Else, and where its blocks would pad the weight too much,
    rows in which 16 consecutive k share a code position of 16 consecutive words: x is then read in contiguous pieces and every
    code lies under one scale. Fewer where 16 would pad a row too much.
    """
    if arch.fragment is not None and 32 % format.bits == 0:
        order = fragment_order(format, arch.fragment, n, k)
        if order.size("n") * order.size("k") <= (1 + WASTE) * n * k:
            return order
    candidates = [rows(n, k, format.bits, run) for run in (16, 8, 4, 1)]
    return next((each for each in candidates if each.size("k") - k <= WASTE * k), candidates[-1])


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


def readable(layout: Layout, format: Format, arch: Arch) -> bool:
    """Whether a template that multiplies reads a layout: rows, or blocks in the very order of the arch's fragments."""
    if layout.row_units() is not None:
        return True
    sizes = layout.size("n"), layout.size("k")
    return arch.fragment is not None and layout == fragment_order(format, arch.fragment, *sizes)
