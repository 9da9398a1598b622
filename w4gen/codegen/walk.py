"""Addresses: from a tile that is loaded back through slices, pads and maps to memory, as index arithmetic."""

from __future__ import annotations

from w4gen.codegen.index import Index, Term, suffixed
from w4gen.codegen.tl import STATIC, dims, pointer, variable
from w4gen.errors import TemplateError
from w4gen.ir.layout import Layout
from w4gen.ir.program import Program
from w4gen.ir.tile import Const, Fold, Input, Pad, Repeat, Slice, Split, Tile, Unpack
from w4gen.ir.types import I32


class Walk:
    """The address of every element of a tile, from its indices back through slices, pads and maps to memory."""

    def __init__(self, program: Program, name: str, spans: int) -> None:
        self.program, self.spans = program, spans
        tile = program.tile(name)
        self.dims = self.axes(tile)
        self.masks: list[str] = []
        self.lines: list[str] = []
        self.shift = ""
        self.index = {axis: Index((Term(*self.start(axis)),)) for axis in tile.axes if axis not in STATIC}
        self.code = Term("code") if "code" in tile.axes else Term("span * CODES" if spans > 1 else "0")
        while not program.tile(name).kept and not isinstance(program.op(name), Const | Input):
            self.step(name)
            name = program.source(name)
        self.memory = name
        if isinstance(program.op(name), Input) and "m" in self.dims:
            self.masks.insert(0, f"{suffixed('m', ('m',), self.dims)} < m_count")
        strides = _strides(program.tile(name))
        self.address = self.index.get("unit", Index(()))
        for axis in program.tile(name).axes if "unit" not in self.index else ():
            scaled = self.index[axis].times(strides[axis])
            self.address = Index(self.address.terms + (scaled.terms if scaled.floor == 1 else (self.named(axis, scaled),)))

    def axes(self, tile: Tile) -> tuple[str, ...]:
        """The axes of the tensor that is loaded."""
        return dims(self.program, tile)

    def start(self, axis: str) -> tuple[str, tuple[str, ...]]:
        """The variable that runs along an axis (of a codebook, its entries)."""
        if axis == "c":
            return f"tl.arange(0, {self.program.tile('codebook').sizes['c']})", ("c",)
        return (axis, (axis,)) if axis in self.dims else ("0", ())

    def step(self, name: str) -> None:
        op = self.program.op(name)
        match op:
            case Slice(blocks):
                for block in blocks:
                    if block.drop and block.axis not in STATIC:
                        start = f"step * {block.axis.upper()}S" if block.axis == "word" else "0"
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
            case Unpack(layout):
                self.unpack(layout)
            case Split(layout):
                self.index["k"] = self.split(layout)
                if name == "x.order":
                    self.index["k"] = Index((self.named("k", self.index["k"]),))
            case _:
                raise TemplateError(f"{name} ({op}) cannot be read through: only slices, pads and maps are views")

    def unpack(self, layout: Layout) -> None:
        """The unit that holds an element, and the bit of it at which the element starts, digit by digit."""
        units: list[Term] = []
        bits: list[Term] = []
        for axis in layout.axes:
            index, below = self.index[axis], 1
            for digit in (digit for digit in layout.digits if digit.axis == axis):
                part = index.quotient(below)
                below *= digit.size
                part = part if below == layout.size(axis) else part.remainder(digit.size)
                inside = digit.stride < layout.unit
                (bits if inside else units).extend(part.times(digit.stride if inside else digit.stride // layout.unit).terms)
        self.index["unit"] = Index(tuple(term for term in units if term.modulo != 1))
        self.shift = Index(tuple(term for term in bits if term.modulo != 1)).render(self.dims)

    def split(self, layout: Layout) -> Index:
        """k as the digits of word and code."""
        word, places = self.index.pop("word"), layout.places("k")
        cuts = (place.divide * size for place in places if place.source == "word" for size in (1, place.modulo or 1))
        if not word.splits(*cuts):
            word = Index((self.named("word", word),))
        terms: list[Term] = []
        for place in places:
            at = word if place.source == "word" else Index((self.code,))
            digit = at.quotient(place.divide).remainder(place.modulo) if place.modulo else at.quotient(place.divide)
            terms += digit.times(place.weight).terms
        return Index(tuple(term for term in terms if term.text != "0" and term.modulo != 1))

    def named(self, axis: str, index: Index) -> Term:
        """A variable for an index that is too long to repeat."""
        along = tuple(each for each in self.dims if each in index.axes)
        self.lines.append(f"{axis} = {index.render(along)}")
        return Term(axis, along)

    def load(self, name: str, extra: str = "") -> list[str]:
        memory = pointer(self.program, self.memory)
        where = self.address.render(self.dims)
        lines, mask = list(self.lines), ""
        if self.masks:  # a mask has the shape of the tile, so the address must have it too
            where = " + ".join([where, *(f"{suffixed(a, (a,), self.dims)} * 0" for a in self.dims if a not in self.address.axes)])
            zero = "0" if self.program.tile(self.memory).element == I32 else "0.0"
            inside = self.masks[0] if len(self.masks) == 1 else " & ".join(f"({each})" for each in self.masks)
            if len(self.masks) > 1 or extra:
                lines, inside = [*lines, f"inside = {inside}"], "inside"
            mask = f", mask={inside}, other={zero}"
        if len(where) + len(mask) + len(extra) > 80:
            lines, where = [*lines, f"{variable(name)}_at = {where}"], f"{variable(name)}_at"
        shift = f" >> ({self.shift})" if self.shift else ""
        return [*lines, f"{variable(name)} = tl.load({memory} + {where}{mask}{extra}){shift}"]


class Gathered(Walk):
    """A walk whose indices n and word are tensors of the same shape, made by the template."""

    def axes(self, tile: Tile) -> tuple[str, ...]:
        return ()

    def start(self, axis: str) -> tuple[str, tuple[str, ...]]:
        return axis, ()


class Natural(Walk):
    """A walk along k itself, where the codes of a step's words, one position after the other, are neighbouring k."""

    def axes(self, tile: Tile) -> tuple[str, ...]:
        return ("m", "k")

    def split(self, layout: Layout) -> Index:
        words = self.program.tile("w.tile").sizes["word"]
        if not layout.natural or layout.run != words:
            raise TemplateError(f"a step of {words} words does not hold whole runs of {layout.run} k")
        self.index.pop("word")
        return Index((Term("k", ("k",)),))

    def named(self, axis: str, index: Index) -> Term:
        return index.terms[0]


def _strides(tile: Tile) -> dict[str, int]:
    """Units between neighbours along each axis of a tile in memory: rows of words, or row-major."""
    strides, stride = {}, 1
    for axis, size in reversed(tile.sizes.items()):
        strides[axis] = stride
        stride *= size
    return strides
