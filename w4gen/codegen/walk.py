"""Addresses: from a tile that is loaded back through slices, pads and maps to memory, as index arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul

from w4gen.codegen.index import Index, Term, suffixed
from w4gen.codegen.tl import STATIC, dims, pointer, variable
from w4gen.errors import TemplateError
from w4gen.ir.layout import Layout
from w4gen.ir.program import Program
from w4gen.ir.tile import Const, Fold, Input, Pad, Repeat, RunOn, Slice, Split, Tile, Unpack
from w4gen.ir.types import U8, DType

STARTS = {"word": "step * WORDS", "k": "step * BLOCK_K"}
"""Where a step begins along an axis."""


class Walk:
    """The address of every element of a tile, from its indices back through slices, pads and maps to memory."""

    def __init__(self, program: Program, name: str, spans: int, starts: Mapping[str, str] = STARTS) -> None:
        self.program, self.spans, self.starts = program, spans, starts
        tile = self.tile = program.tile(name)
        self.dims = dims(program, tile)
        self.masks: list[str] = []
        self.lines: list[str] = []
        self.planes: list[tuple[Layout, Index, str]] = []
        self.index = {axis: Index((Term(*self.start(axis)),)) for axis in tile.axes if axis not in STATIC}
        self.code = Term("code") if "code" in tile.axes else Term("span * CODES" if spans > 1 else "0")
        while not program.tile(name).kept and not isinstance(program.op(name), Const | Input):
            self.step(name)
            name = program.source(name)
        self.memory = name
        if isinstance(program.op(name), Input) and "m" in self.dims:
            self.masks.insert(0, f"{suffixed('m', ('m',), self.dims)} < m_count")
        strides = _strides(program.tile(name))
        self.address = Index(())
        for axis in program.tile(name).axes if not self.planes else ():
            scaled = self.index[axis].times(strides[axis])
            self.address = Index(self.address.terms + (scaled.terms if scaled.floor == 1 else (self.named(axis, scaled),)))

    def start(self, axis: str) -> tuple[str, tuple[str, ...]]:
        """The variable that runs along an axis (of a codebook, its entries)."""
        if axis == "c":
            return f"tl.arange(0, {self.tile.sizes['c']})", ("c",)
        return (axis, (axis,)) if axis in self.dims else ("0", ())

    def step(self, name: str) -> None:
        op = self.program.op(name)
        match op:
            case Slice(blocks):
                for block in blocks:
                    if block.drop and block.axis not in STATIC:
                        start = self.starts.get(block.axis, "0")
                        self.index[block.axis] = Index((Term(start),))
            case Fold(quad):
                lane, inner = self.index.pop("lane"), self.index.pop("quad")
                self.index["word"] = Index((*lane.times(quad).terms, *(t for t in inner.terms if t.text != "0")))
            case Pad(sizes):
                held = self.program.tile(self.program.source(name)).sizes
                for axis, _ in sizes:
                    limit = "m_count" if axis == "m" else {"n": "N", "k": "K"}.get(axis, str(held[axis]))
                    self.masks.append(f"{self.index[axis].render(self.dims)} < {limit}")
            case Repeat(group):
                self.index["g"] = self.index.pop("k").quotient(group)
            case RunOn():
                self.run_on(op)
            case Unpack(layout):
                self.unpack(layout)
            case Split(layout):
                self.index["k"] = self.split(layout)
                if name == "x.order":
                    self.index["k"] = Index((self.named("k", self.index["k"]),))
            case _:
                raise TemplateError(f"{name} ({op}) cannot be read through: only slices, pads and maps are views")

    def run_on(self, op: RunOn) -> None:
        """g, counted over the rows; where the whole tensor has one, it is the first."""
        k, n = self.index.pop("k").quotient(op.group), self.index["n"].times(op.columns)
        if not op.single and k.floor > 1:
            k = Index((self.named("g", k),))
        self.index["g"] = Index(()) if op.single else Index((*n.terms, *k.terms)).quotient(op.every)
        self.index["n"] = Index(())

    def unpack(self, layout: Layout) -> None:
        """Where an element is kept, of each plane: the unit that holds it, and the bit of it at which it starts."""
        if any(plane.unit > 32 for plane in layout.planes):
            raise TemplateError(f"layout {layout} has elements across words: pack it anew")
        self.planes = [(plane, *self.place(plane)) for plane in layout.planes]
        self.offsets = list(accumulate((plane.length for plane in layout.planes), initial=0))

    def place(self, layout: Layout) -> tuple[Index, str]:
        """The unit and the bit of an element in one plane, digit by digit."""
        units, bits = Index(()), Index(())
        for axis in layout.axes:
            digits = [digit for digit in layout.digits if digit.axis == axis]
            cuts = list(accumulate((digit.size for digit in digits), mul, initial=1))
            if not self.index[axis].splits(*cuts[:-1]):
                self.index[axis] = Index((self.named(axis, self.index[axis]),))
            index, below = self.index[axis], 1
            for digit in digits:
                part = index.quotient(below)
                below *= digit.size
                part = part if below == layout.size(axis) else part.remainder(digit.size)
                inside = digit.stride < layout.unit
                if inside:
                    bits += part.times(digit.stride)
                else:
                    units += part.times(digit.stride // layout.unit)
        unit = Index(tuple(term for term in units.terms if term.modulo != 1))
        return unit, Index(tuple(term for term in bits.terms if term.modulo != 1)).render(self.dims) if bits.terms else ""

    def split(self, layout: Layout) -> Index:
        """k as the digits of word and code."""
        word, places = self.index.pop("word"), layout.places("k")
        cuts = (place.divide * size for place in places if place.source == "word" for size in (1, place.modulo or 1))
        if not word.splits(*cuts):
            word = Index((self.named("word", word),))
        whole = Index(())
        for place in places:
            at = word if place.source == "word" else Index((self.code,))
            digit = at.quotient(place.divide).remainder(place.modulo) if place.modulo else at.quotient(place.divide)
            whole += digit.times(place.weight)
        return Index(tuple(term for term in whole.terms if term.text != "0" and term.modulo != 1))

    def named(self, axis: str, index: Index) -> Term:
        """A variable for an index that is too long to repeat."""
        along = tuple(each for each in self.dims if each in index.axes)
        self.lines.append(f"{axis} = {index.render(along)}")
        return Term(axis, along)

    def load(self, name: str, extra: str = "") -> list[str]:
        """The lines that bring a tile to registers: of planes, a load for each, put together."""
        if not self.planes:
            lines, text = self.loaded(name, self.address, "", extra)
            return [*lines, f"{variable(name)} = {text}"]
        found: list[str] = []
        whole = ""
        for number, ((plane, unit, shift), offset) in enumerate(zip(self.planes, self.offsets, strict=False)):
            address = Index((*unit.terms, Term(str(offset)))) if offset else unit
            lines, text = self.loaded(f"{name}.{number}" if number else name, address, shift, extra)
            if len(self.planes) > 1 or plane.unit == 8 > plane.bits:
                text = f"({text}) & 0x{2**plane.bits - 1:X}"
            up = sum(before.bits for before, _, _ in self.planes[:number])
            found += [*lines, f"{variable(name)} |= ({text}) << {up}" if whole else f"{variable(name)} = {text}"]
            whole = name
        return found

    def loaded(self, name: str, address: Index, shift: str, extra: str) -> tuple[list[str], str]:
        """The lines before a load, and the load itself, shifted down."""
        memory = pointer(self.program, self.memory)
        where = address.render(self.dims)
        lines, mask, self.lines = list(self.lines), "", []
        if self.masks or not address.axes:  # a mask has the shape of the tile, and so have scales: the address must have it too
            where = " + ".join([where, *(f"{suffixed(a, (a,), self.dims)} * 0" for a in self.dims if a not in address.axes)])
        element = self.program.tile(self.memory).element
        if self.masks:
            zero = "0" if isinstance(element, DType) and element.kind == "int" else "0.0"
            masks = dict.fromkeys(self.masks)  # a block of rows that are no multiple of it is masked as rows of x are
            inside = self.masks[0] if len(masks) == 1 else " & ".join(f"({each})" for each in masks)
            if len(masks) > 1 or extra:
                lines, inside = [*lines, f"inside = {inside}"], "inside"
            mask = f", mask={inside}, other={zero}"
        if len(where) + len(mask) + len(extra) > 80:
            at, terms = f"{variable(name)}_at", where.split(" + ")
            half = len(terms) // 2 if len(where) > 100 and "(" not in where else len(terms)
            lines = [*lines, f"{at} = {' + '.join(terms[:half])}"]
            lines += [f"{at} += {' + '.join(terms[half:])}"] if terms[half:] else []
            where = at
        text = f"tl.load({memory} + {where}{mask}{extra})" + (".to(tl.int32)" if element == U8 else "")
        return lines, text + (f" >> ({shift})" if shift and shift != "0" else "")


def _strides(tile: Tile) -> dict[str, int]:
    """Units between neighbours along each axis of a tile in memory: rows of words, or row-major."""
    strides, stride = {}, 1
    for axis, size in reversed(tile.sizes.items()):
        strides[axis] = stride
        stride *= size
    return strides
