"""Scales and zeros: the order in which they are kept, and the codes that share one."""

from __future__ import annotations

from math import gcd

import numpy as np

from w4gen.ir.layout import PLANES, Digit, Layout, matrix


def bytes_of_rows(n: int, g: int, bits: int) -> Layout:
    """Rows of bytes, for the codes of scales: 8 // bits neighbours in a byte, or planes where that leaves bits over."""
    widths = PLANES.get(bits, (bits,))
    per_block = 8 // min(widths)
    blocks, split = -(-g // per_block), None
    for width in reversed(widths):
        size = blocks * per_block * width // 8  # bytes of a row
        split = Layout((Digit("n", n, 8 * size), Digit("g", 8 // width, width), Digit("g", size, 8)), width, 8, split)
    return split if split is not None else matrix({"n": n, "g": g}, 8)


def together(group: int, groups: int, bits: int) -> int:
    """Neighbouring groups of a row whose scales lie together: those of 128 k, as far as 16 bytes hold them for two rows.

    Groups of 64 k and more are steps of their own.
    """
    return gcd(groups, min(128 // group, 64 // bits)) if group < 64 and 128 % group == 0 else 1


def beside(layout: Layout, groups: int, bits: int, held: int = 1) -> Layout:
    """The order of a tensor of one machine word for each row n and group g, kept beside codes in `layout`.

    Row-major beside rows. Beside blocks of several rows it follows the rows of a block, those that share a word of codes next to
    each other, then `held` groups, then the other rows: what a lane needs of it is one load.
    """
    rows_of = sorted((digit for digit in layout.digits if digit.axis == "n"), key=lambda digit: digit.stride)
    if layout.row_units() is not None:
        return matrix({"n": layout.size("n"), "g": groups}, bits)
    block = [digit for digit in rows_of if digit.stride < layout.block_units * layout.unit]
    shared = [digit for digit in block if digit.stride < layout.unit]
    near, far = ([Digit("g", held, 0)] if held > 1 else []), Digit("g", groups // held, 1)
    order = [*shared, *near, *block[len(shared) :], far, *(digit for digit in rows_of if digit not in block)]
    places: dict[Digit, int] = {}
    stride = bits
    for digit in order:
        places[digit], stride = stride, stride * digit.size
    listed = [*(digit for digit in layout.digits if digit in places), *near, far]
    return Layout(tuple(Digit(each.axis, each.size, places[each]) for each in listed), bits, bits)


def spans(layout: Layout, group: int, words: int) -> int | None:
    """The fewest stretches of a word's codes in which `words` neighbours always share one scale; None where none do."""
    count = layout.size("k") // layout.per_unit
    word, code = np.arange(-(-count // words) * words)[:, None], np.arange(layout.per_unit)[None, :]
    places = np.broadcast_to(layout.index("k", word, code), (len(word), layout.per_unit))  # a row of one word has no word digit
    groups = (np.minimum(places, layout.size("k") - 1) // group).reshape(-1, words, layout.per_unit)
    for pieces in (pieces for pieces in range(1, layout.per_unit + 1) if layout.per_unit % pieces == 0):
        stretch = groups.reshape(groups.shape[0], words, pieces, -1)
        if (stretch == stretch[:, :1, :, :1]).all():
            return pieces
    return None
