"""The kernel that moves codes from one layout to another: a program gathers the codes of a stretch of units.

The digits inside blocks are printed. How many blocks there are, and how far apart, are arguments: one kernel serves all layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul

from w4gen import paths
from w4gen.codegen.index import Index, Term
from w4gen.codegen.printer import constants
from w4gen.codegen.render import Kernel, Piece, environment
from w4gen.formats import named
from w4gen.ir.dtype import I32, U8
from w4gen.ir.layout import Digit, Layout
from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, Program
from w4gen.ir.tile import Block, Const, Pack, Slice, Space, Unpack
from w4gen.schedule.rewrite import padded
from w4gen.schedule.schedule import Schedule

BLOCK = 512
"""Units of a program: four of a thread."""
SCHEDULE = Schedule(template="repack", block_k=BLOCK)
ARGUMENTS = ("from_ptr", "to_ptr", "n_count", "k_count", "blocks", "units", "from_n", "from_k")
AXES = ("n", "k")
ELEMENTS = {8: U8, 32: I32}


@dataclass(frozen=True, slots=True)
class Shared:
    """What a digit of the source and one of the target have in common: its value, its weight in the index and in the source's."""

    value: Term
    source: Digit
    weight: int
    times: int

    def in_source(self, unit: int) -> Term:
        """Its share of the place in the source, in so many bits."""
        return replace(self.value, weight=self.source.stride // unit * self.times)


@lru_cache(maxsize=256)
def kernel(source: Layout, target: Layout, n: int, k: int) -> Kernel | None:
    """The kernel that makes `target` of codes [n, k] stored as `source`; None where it would not be plain.

    It reads and writes words or bytes of one plane, whose digits divide each other, below the highest of n and of k.
    """
    if not (_in_blocks(source) and _in_blocks(target)):
        return None
    digits = _shared(source, target)
    if digits is None:
        return None
    made = program(source, target, n, k)
    piece = Piece(SCHEDULE.template, ARGUMENTS, (("unit", BLOCK),))
    return Kernel(piece.name, _text(source, target, digits), (piece,), made.problem, SCHEDULE, made)


def program(source: Layout, target: Layout, n: int, k: int) -> Program:
    """The same as a graph: stored codes, unpacked, cut to size and packed anew."""
    form = named(f"uint{min(source.width, target.width)}")  # what codes mean is all the same here
    b = Builder(Problem(m=(1, 1), n=n, k=k, format=form))
    b.add("from", Const(), {}, ELEMENTS[source.unit], Space.GLOBAL, {"word": source.length}, source)
    b.add("view", Unpack(source), {"of": "from"}, form)
    b.add("codes", Slice((Block("n", n), Block("k", k))), {"of": "view"}, form)
    whole = padded(b, "codes.pad", "codes", n=target.size("n"), k=target.size("k"))
    b.add("to", Pack(target), {"of": whole}, ELEMENTS[target.unit], Space.GLOBAL, layout=target, kept=True)
    return b.done()


def sizes(source: Layout, target: Layout, n: int, k: int) -> tuple[int, ...]:
    """The arguments after the two tensors."""
    apart = (_top(source, axis).stride // source.unit for axis in AXES)
    return n, k, _lowest(target).size, target.length, *apart


def _digits(layout: Layout, axis: str) -> list[tuple[Digit, int]]:
    """The digits of an axis and the weight of each, the highest last."""
    digits = [digit for digit in layout.digits if digit.axis == axis]
    return list(zip(digits, accumulate((digit.size for digit in digits), mul, initial=1), strict=False))


def _top(layout: Layout, axis: str) -> Digit:
    """The highest digit of an axis: it counts blocks."""
    return _digits(layout, axis)[-1][0]


def _lowest(layout: Layout) -> Digit:
    """The axis along which blocks are neighbours, as its highest digit."""
    return min((_top(layout, axis) for axis in AXES), key=lambda digit: (digit.stride, digit.size, digit.axis))


def _in_blocks(layout: Layout) -> bool:
    """Whether all other digits lie below the highest of n and of k, in words or bytes that 32 bits count."""
    if layout.high is not None or layout.unit not in ELEMENTS or set(layout.axes) != set(AXES):
        return False
    tops = [_top(layout, axis) for axis in AXES]
    ends = [digit.stride * digit.size for digit in layout.digits if digit.size > 1 and digit not in tops]
    return max([layout.unit, *ends]) <= _lowest(layout).stride and layout.length < 2**31 - BLOCK


def _shared(source: Layout, target: Layout) -> list[Shared] | None:
    """Both layouts' digits cut where either's are; None where one's do not divide the other's."""
    found = []
    for axis in AXES:
        weights = sorted({weight for layout in (source, target) for _, weight in _digits(layout, axis)})
        if any(high % low for low, high in pairwise(weights)):
            return None
        for low, high in zip(weights, [*weights[1:], 0], strict=True):
            held, below = _holding(source, axis, low)
            made, start = _holding(target, axis, low)
            value = Term(*_variable(target, made), high // low)
            found.append(Shared(replace(value, divide=value.divide * (low // start)), held, low, low // below))
    return found


def _holding(layout: Layout, axis: str, weight: int) -> tuple[Digit, int]:
    """The digit of an axis in which a weight lies, and its own."""
    return [(digit, own) for digit, own in _digits(layout, axis) if own <= weight][-1]


def _variable(target: Layout, digit: Digit) -> tuple[str, tuple[str, ...], int]:
    """What a digit of the target is read from, along no axis of a tensor, and by what that is divided."""
    if digit == _top(target, digit.axis):
        return "near" if digit == _lowest(target) else "far", (), 1
    if digit.stride >= target.unit:
        return "lane", (), digit.stride // target.unit
    return "code", (), math.prod(each.size for each in target.digits if each.size > 1 and each.stride < digit.stride)


def _text(source: Layout, target: Layout, digits: list[Shared]) -> str:
    """The kernel's text: what a unit brings to each sum, and what one of its codes adds."""
    rows = [
        ("BLOCK", BLOCK, "units per program"),
        ("LANES", _lowest(target).stride // target.unit, "units in a block"),
        ("CODES", target.per_unit, "codes in a unit"),
        ("MASK", 2 ** min(source.bits, target.bits) - 1, "the bits of a code"),
    ]
    inside = [digit for digit in target.digits if digit.stride < target.unit]
    codes = (Term(*_variable(target, digit), digit.size, digit.stride) for digit in inside)
    template = environment(paths.templates()).get_template(f"{SCHEDULE.template}.py.jinja")
    return template.render(
        header=f"# codes of {target.bits} bits, from units of {source.unit} bits to units of {target.unit} in another order",
        constants=constants(rows),
        of_unit=_sums(source, [each for each in digits if each.value.text != "code"]),
        of_code=_sums(source, [each for each in digits if each.value.text == "code"]),
        place=_sum(codes),
    )


def _sums(source: Layout, digits: list[Shared]) -> dict[str, str]:
    """What digits bring to n and k, to the source's unit and to the bit in it."""
    found = {axis: _sum(replace(d.value, weight=d.weight) for d in digits if d.source.axis == axis) for axis in AXES}
    tops = {axis: _top(source, axis) for axis in AXES}
    far = {a: _sum(replace(each.value, weight=each.times) for each in digits if each.source == top) for a, top in tops.items()}
    near = [each for each in digits if each.source not in tops.values()]
    units = _sum(each.in_source(source.unit) for each in near if each.source.stride >= source.unit)
    parts = [units, *(f"({text}) * from_{axis}" for axis, text in far.items() if text != "0")]
    found["at"] = " + ".join(part for part in parts if part != "0") or "0"
    found["bit"] = _sum(each.in_source(1) for each in near if each.source.stride < source.unit)
    return found


def _sum(terms: Iterable[Term]) -> str:
    return Index(tuple(terms)).render(())
