"""Applying a schedule is graph rewriting: each function makes one part of it concrete and returns a new program.

`interpret` gives the same result, up to the rounding of the element types chosen, before and after every one of them.
"""

from __future__ import annotations

import numpy as np

from w4gen.ir.decode import Decode
from w4gen.ir.layout import Layout, matrix
from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, Emit, Operands, Program, copy, rewrite
from w4gen.ir.tile import (
    Block,
    Const,
    Convert,
    Dot,
    Field,
    Fold,
    Input,
    Pack,
    Pad,
    Reduce,
    Repeat,
    Slice,
    Space,
    Split,
    Store,
    Unpack,
)
from w4gen.ir.types import F32, I32, DType


def ceil_to(size: int, granule: int) -> int:
    return -(-size // granule) * granule


def padded_group(problem: Problem, layout: Layout) -> int:
    """Weights under one scale as stored: a single group takes the padding of its row along."""
    return layout.size("k") if problem.format.groups(problem.k) == 1 else problem.format.group


def padded(b: Builder, name: str, source: str, **grown: int) -> str:
    """`source` padded to the sizes given, or itself where it has them."""
    tile = b.tile(source)
    ragged = tuple((axis, size) for axis, size in grown.items() if tile.sizes[axis] != size)
    return b.add(name, Pad(ragged), {"of": source}, tile.element) if ragged else source


def pack(program: Program, layout: Layout) -> Program:
    """Store the weight: codes padded and mapped to `layout`, scales row-major; both, and the codebook, become kept tiles."""
    problem = program.problem
    n, k, group = layout.size("n"), layout.size("k"), padded_group(problem, layout)

    def codes(b: Builder, operands: Operands) -> str:
        whole = padded(b, "codes.pad", copy(b, program, "codes", operands), n=n, k=k)
        b.add("codes.stored", Pack(layout), {"of": whole}, I32, Space.GLOBAL, layout=layout, kept=True)
        return b.add("codes.view", Unpack(layout), {"of": "codes.stored"}, problem.format)

    def scale(b: Builder, operands: Operands) -> str:
        element = problem.format.scale
        stored = matrix({"n": n, "g": -(-k // group)}, element.bits)
        whole = padded(b, "scale.pad", copy(b, program, "scale", operands), n=n, g=stored.size("g"))
        return b.add("scale.stored", Pack(stored), {"of": whole}, element, Space.GLOBAL, layout=stored, kept=True)

    def codebook(b: Builder, operands: Operands) -> str:
        tile = program.tile("codebook")
        return b.add("codebook", Const(), {}, F32, Space.GLOBAL, tile.sizes, matrix(tile.sizes, 32), kept=True)

    def x(b: Builder, operands: Operands) -> str:
        tile = program.tile("x")
        b.add("x", Input(), {}, problem.x, Space.GLOBAL, tile.sizes, matrix(tile.sizes, problem.x.bits))
        return padded(b, "x.pad", "x", k=k)

    def spread(b: Builder, operands: Operands) -> str:
        return b.add("scale.k", Repeat(group, k), operands, problem.format.scale)

    emit: dict[str, Emit] = {"codes": codes, "scale": scale, "x": x, "scale.k": spread}
    return rewrite(program, emit | ({"codebook": codebook} if "codebook" in program.graph else {}))


def convert(program: Program, how: Decode, operand: DType, space: Space = Space.REGISTER) -> Program:
    """Decode by the word operations `how`; the Dot takes its operands as `operand`, the weight living in `space`."""

    def decoded(b: Builder, operands: Operands) -> str:
        if "codebook" in operands:
            operands["codebook"] = b.add("codebook.tile", Slice(()), {"of": operands["codebook"]}, F32)
        return b.add("w.value", Convert(how), operands, how.dtype)

    def scaled(b: Builder, operands: Operands) -> str:
        return b.add("w", Convert(), operands, operand, space)

    def dot(b: Builder, operands: Operands) -> str:
        if b.tile(operands["x"]).element != operand:
            operands["x"] = b.add("x.value", Convert(), {"x": operands["x"]}, operand)
        return copy(b, program, "acc", operands)

    return rewrite(program, {"w.value": decoded, "w": scaled, "acc": dot})


def split(program: Program, layout: Layout, spans: int) -> Program:
    """Replace k by the digits that the rows are stored in: word, span (a stretch of codes under one scale) and code."""

    def codes(b: Builder, operands: Operands) -> str:
        return b.add("w.codes", Field(layout, spans), operands, program.problem.format)

    def scale(b: Builder, operands: Operands) -> str:
        made = copy(b, program, "scale.k", operands)
        return b.add("scale.order", Split(layout, spans), {"of": made}, program.problem.format.scale)

    x = last(program, "x.pad", "x")

    def order(b: Builder, operands: Operands) -> str:
        return b.add("x.order", Split(layout, spans), {"of": copy(b, program, x, operands)}, program.problem.x)

    def dot(b: Builder, operands: Operands) -> str:
        return b.add("acc", Dot(("word", "span", "code")), operands, F32)

    return rewrite(program, {"codes.view": codes, x: order, "scale.k": scale, "acc": dot})


def fold(program: Program, quad: int) -> Program:
    """Give every thread whole quads of words: the axis word becomes lane and quad."""

    def words(b: Builder, operands: Operands) -> str:
        folded = b.add("w.quads", Fold(quad), operands, I32)
        return copy(b, program, "w.codes", {"of": folded})

    def view(name: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            made = copy(b, program, f"{name}.order", operands)
            return b.add(f"{name}.quads", Fold(quad), {"of": made}, program.tile(f"{name}.order").element)

        return emit

    def dot(b: Builder, operands: Operands) -> str:
        return b.add("acc", Dot(("lane", "quad", "span", "code")), operands, F32)

    return rewrite(program, {"w.codes": words, "x.order": view("x"), "scale.order": view("scale"), "acc": dot})


def place_scale(program: Program, unit: str, side: str, scale_at: str, origin: float) -> Program:
    """Split the Dot into partial sums over the codes of a stretch, and scale these (or leave the scale on the weight).

    Lanes keep one partial sum each until the end; mma sums over the words of a step at once. An `origin` that the decoding left
    out is made up for here: (sum of code * x + origin * sum of x) * scale.
    """
    inside = ("quad", "code") if unit == "lanes" else ("word", "code")
    moved: Operands = {}

    def weight(b: Builder, operands: Operands) -> str:
        if scale_at == "weight":
            return copy(b, program, "w", operands)
        moved.update(scale=operands["scale"])
        return operands["value"]

    def dot(b: Builder, operands: Operands) -> str:
        part = b.add("part", Dot(("code",) if unit == "lanes" else inside, unit, side), operands, F32)
        part = b.add("sums", Reduce(("quad",)), {"of": part}, F32) if unit == "lanes" else part
        if scale_at == "accumulator":
            # every code of the stretch has the scale of its first one
            first = Slice(tuple(Block(axis, drop=True) for axis in inside))
            scaling = {"acc": part, "scale": b.add("scale.at", first, {"of": moved["scale"]}, program.problem.format.scale)}
            if origin:
                by_code = b.add("x.sum", Reduce(("code",)), {"of": operands["x"]}, F32)
                scaling["sum"] = b.add("x.sums", Reduce(("quad",)), {"of": by_code}, F32)
            part = b.add("scaled", Convert(origin=origin), scaling, F32)
        acc = b.add("acc", Reduce(("span",)), {"of": part}, F32)
        return b.add("total", Reduce(("lane",)), {"of": acc}, F32) if unit == "lanes" else acc

    return rewrite(program, {"w": weight, "acc": dot})


def dequantize(program: Program) -> Program:
    """Write the scaled weight [N, K] to memory and multiply it by the vendor's matmul: two kernels."""
    problem = program.problem

    def dot(b: Builder, operands: Operands) -> str:
        crop = Store((("n", problem.n), ("k", problem.k)))
        dense = b.add("w.dense", crop, {"of": operands["w"]}, b.tile(operands["w"]).element, Space.GLOBAL)
        return b.add("acc", Dot(("k",), "vendor"), {"w": dense, "x": "x"}, F32)

    return rewrite(program, {"acc": dot})


def tile(program: Program, n: int, m: int = 0, split: int = 1, **along: int) -> Program:
    """Cut into blocks: n and m over the grid, one axis of k (lane, word or k itself) over steps, dealt out to `split` programs.

    What does not divide is padded first, which prints as a mask. With m=0 only the weight is cut, along n and k of the grid.
    """
    ((walked, size),) = along.items()
    blocks = {"m": Block("m", m, "m"), "n": Block("n", n, "n"), walked: Block(walked, size, "step" if m else walked)}

    def cut(short: str, view: str, *axes: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            source, taken = copy(b, program, view, operands), [blocks[axis] for axis in axes]
            held = b.tile(source)
            source = padded(
                b, f"{short}.rows", source, **{each.axis: ceil_to(held.sizes[each.axis], each.size) for each in taken}
            )
            return b.add(f"{short}.tile", Slice(tuple(taken)), {"of": source}, held.element)

        return emit

    def accumulate(b: Builder, operands: Operands) -> str:
        over = program.op("acc").over  # type: ignore[union-attr]
        if split == 1:
            return b.add("acc", Reduce(over, "step"), operands, F32)
        parts = b.add("parts", Reduce(over, "step", split), operands, F32, Space.GLOBAL)
        return b.add("acc", Reduce(("part",)), {"of": parts}, F32)

    w, x, scale = (last(program, *names) for names in VIEWS)
    emit: dict[str, Emit] = {w: cut("w", w, "n", walked), scale: cut("scale", scale, "n", walked)}
    if m:
        emit |= {x: cut("x", x, "m", walked), "acc": accumulate}
        emit |= {"bias": cut("bias", "bias", "n")} if program.problem.bias else {}
    return rewrite(program, emit)


VIEWS = (("w.quads", "codes.stored"), ("x.quads", "x.order", "x.pad", "x"), ("scale.quads", "scale.order", "scale.k"))
"""Of each operand, the views that blocks can be cut from, the last one first."""


def last(program: Program, *names: str) -> str:
    """The first of `names` that is in the program; of stored codes that are unpacked at once, the unpacked ones."""
    found = next(name for name in names if name in program.graph)
    return "codes.view" if found == "codes.stored" and "codes.view" in program.graph else found


def spans(layout: Layout, group: int, words: int) -> int | None:
    """The fewest stretches of a word's codes in which `words` neighbours always share one scale; None where none do."""
    count = layout.size("k") // layout.per_unit
    word, code = np.arange(ceil_to(count, words))[:, None], np.arange(layout.per_unit)[None, :]
    groups = np.minimum(layout.index("k", word, code), layout.size("k") - 1) // group
    groups = groups.reshape(-1, words, layout.per_unit)
    for power in range(layout.per_unit.bit_length()):
        pieces = 1 << power
        stretch = groups.reshape(groups.shape[0], words, pieces, -1)
        if (stretch == stretch[:, :1, :, :1]).all():
            return pieces
    return None
