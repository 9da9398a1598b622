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


GROUPED = ("scale", "zero")
"""What a weight may have one of for each group."""


def grouped(program: Program) -> list[str]:
    """Those of `GROUPED` that the program has."""
    return [name for name in GROUPED if name in program.graph or f"{name}.stored" in program.graph]


def padded(b: Builder, name: str, source: str, **grown: int) -> str:
    """`source` padded to the sizes given, or itself where it has them."""
    tile = b.tile(source)
    ragged = tuple((axis, size) for axis, size in grown.items() if tile.sizes[axis] != size)
    return b.add(name, Pad(ragged), {"of": source}, tile.element) if ragged else source


def pack(program: Program, layout: Layout) -> Program:
    """Store the weight: codes padded and mapped to `layout`, scales and zeros row-major; all become kept tiles."""
    problem = program.problem
    n, k, group = layout.size("n"), layout.size("k"), padded_group(problem, layout)

    def codes(b: Builder, operands: Operands) -> str:
        whole = padded(b, "codes.pad", copy(b, program, "codes", operands), n=n, k=k)
        b.add("codes.stored", Pack(layout), {"of": whole}, I32, Space.GLOBAL, layout=layout, kept=True)
        return b.add("codes.view", Unpack(layout), {"of": "codes.stored"}, problem.format)

    def of_groups(name: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            element = program.tile(name).element
            stored = matrix({"n": n, "g": -(-k // group)}, element.bits)
            whole = padded(b, f"{name}.pad", copy(b, program, name, operands), n=n, g=stored.size("g"))
            return b.add(f"{name}.stored", Pack(stored), {"of": whole}, element, Space.GLOBAL, layout=stored, kept=True)

        return emit

    def codebook(b: Builder, operands: Operands) -> str:
        tile = program.tile("codebook")
        return b.add("codebook", Const(), {}, F32, Space.GLOBAL, tile.sizes, matrix(tile.sizes, 32), kept=True)

    def x(b: Builder, operands: Operands) -> str:
        tile = program.tile("x")
        b.add("x", Input(), {}, problem.x, Space.GLOBAL, tile.sizes, matrix(tile.sizes, problem.x.bits))
        return padded(b, "x.pad", "x", k=k)

    def spread(name: str) -> Emit:
        return lambda b, operands: b.add(f"{name}.k", Repeat(group, k), operands, program.tile(name).element)

    emit: dict[str, Emit] = {"codes": codes, "x": x}
    emit |= {name: of_groups(name) for name in grouped(program)} | {f"{name}.k": spread(name) for name in grouped(program)}
    return rewrite(program, emit | ({"codebook": codebook} if "codebook" in program.graph else {}))


def convert(program: Program, how: Decode, operand: DType) -> Program:
    """Decode by the word operations `how`; the Dot takes its operands as `operand`."""

    def decoded(b: Builder, operands: Operands) -> str:
        if "codebook" in operands:
            operands["codebook"] = b.add("codebook.tile", Slice(()), {"of": operands["codebook"]}, F32)
        return b.add("w.value", Convert(how), operands, how.dtype)

    def centred(b: Builder, operands: Operands) -> str:
        return b.add("w.centred", Convert(), operands, how.dtype)

    def scaled(b: Builder, operands: Operands) -> str:
        return b.add("w", Convert(), operands, operand)

    def dot(b: Builder, operands: Operands) -> str:
        if b.tile(operands["x"]).element != operand:
            operands["x"] = b.add("x.value", Convert(), {"x": operands["x"]}, operand)
        return copy(b, program, "acc", operands)

    emit: dict[str, Emit] = {"w.value": decoded, "w": scaled, "acc": dot}
    return rewrite(program, emit | ({"w.centred": centred} if "w.centred" in program.graph else {}))


def split(program: Program, layout: Layout, spans: int) -> Program:
    """Replace k by the digits that the rows are stored in: word, span (a stretch of codes under one scale) and code."""

    def codes(b: Builder, operands: Operands) -> str:
        return b.add("w.codes", Field(layout, spans), operands, program.problem.format)

    def order(name: str, view: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            made = copy(b, program, view, operands)
            return b.add(f"{name}.order", Split(layout, spans), {"of": made}, program.tile(view).element)

        return emit

    x = last(program, "x.pad", "x")

    def dot(b: Builder, operands: Operands) -> str:
        return b.add("acc", Dot(("word", "span", "code")), operands, F32)

    groups = {f"{name}.k": order(name, f"{name}.k") for name in grouped(program)}
    return rewrite(program, {"codes.view": codes, x: order("x", x), "acc": dot} | groups)


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

    views = {f"{name}.order": view(name) for name in ("x", *grouped(program))}
    return rewrite(program, {"w.codes": words, "acc": dot} | views)


def place_scale(program: Program, unit: str, side: str, scale_at: str, origin: float) -> Program:
    """Split the Dot into partial sums over the codes of a stretch, and scale these (or leave the scale on the weight).

    Lanes keep one partial sum each until the end; mma sums over the words of a step at once. An `origin` that the decoding left
    out is made up for here: (sum of code * x + origin * sum of x) * scale. So is a zero that is subtracted after scaling; one
    that is subtracted before stays on the weight, where code = zero gives exactly 0.
    """
    inside = ("quad", "code") if unit == "lanes" else ("word", "code")
    rest = inside[:1]
    moved: Operands = {}

    def first_of(b: Builder, name: str, source: str) -> str:
        # every code of the stretch has the scale, and the zero, of its first one
        return b.add(
            f"{name}.at", Slice(tuple(Block(axis, drop=True) for axis in inside)), {"of": source}, b.tile(source).element
        )

    def take(b: Builder, operands: Operands) -> str:
        moved.update({name: operands[name] for name in GROUPED if name in operands})
        return operands["value"]

    def centred(b: Builder, operands: Operands) -> str:
        return copy(b, program, "w.centred", operands | {"zero": first_of(b, "zero", operands["zero"])})

    def weight(b: Builder, operands: Operands) -> str:
        value, element = take(b, operands), program.tile("w").element
        return value if b.tile(value).element == element else b.add("w", Convert(), {"value": value}, element)

    def scaled(b: Builder, part: str, x: str) -> str:
        """The partial sums times the scale, with what is made up for on them."""
        scaling = {"acc": part, "scale": first_of(b, "scale", moved["scale"])}
        total = {}
        if origin or "zero" in moved:
            by_code = b.add("x.sum", Reduce(("code",)), {"of": x}, F32)
            total["sum"] = b.add("x.sums", Reduce(rest), {"of": by_code}, F32)
        part = b.add("scaled", Convert(origin=origin), scaling | (total if origin else {}), F32)
        if "zero" in moved:
            zero = {"zero": first_of(b, "zero", moved["zero"])}
            part = b.add("shifted", Convert(), {"acc": part} | total | zero, F32)
        return part

    def dot(b: Builder, operands: Operands) -> str:
        part = b.add("part", Dot(("code",) if unit == "lanes" else inside, unit, side), operands, F32)
        part = b.add("sums", Reduce(rest), {"of": part}, F32) if unit == "lanes" else part
        part = scaled(b, part, operands["x"]) if scale_at == "accumulator" else part
        acc = b.add("acc", Reduce(("span",)), {"of": part}, F32)
        return b.add("total", Reduce(("lane",)), {"of": acc}, F32) if unit == "lanes" else acc

    emit: dict[str, Emit] = {"acc": dot}
    if scale_at == "accumulator":
        on_weight: dict[str, Emit] = {"w.scaled": take, "w.centred": centred}
        emit |= {"w": weight} | {name: each for name, each in on_weight.items() if name in program.graph}
    return rewrite(program, emit)


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

    axes = {"w": ("n", walked), "x": ("m", walked)} | dict.fromkeys(grouped(program), ("n", walked))
    views = {short: last(program, *VIEWS[short]) for short in axes if m or short != "x"}
    emit: dict[str, Emit] = {view: cut(short, view, *axes[short]) for short, view in views.items()}
    if m:
        emit["acc"] = accumulate
        emit |= {"bias": cut("bias", "bias", "n")} if program.problem.bias else {}
    return rewrite(program, emit)


VIEWS = {"w": ("w.quads", "codes.stored"), "x": ("x.quads", "x.order", "x.pad", "x")}
VIEWS |= {name: (f"{name}.quads", f"{name}.order", f"{name}.k") for name in GROUPED}
"""Of each operand, the views that blocks can be cut from, the last one first."""


def last(program: Program, *names: str) -> str:
    """The first of `names` that is in the program; of stored codes that are unpacked at once, the unpacked ones."""
    found = next(name for name in names if name in program.graph)
    return "codes.view" if found == "codes.stored" and "codes.view" in program.graph else found


def spans(layout: Layout, group: int, words: int) -> int | None:
    """The fewest stretches of a word's codes in which `words` neighbours always share one scale; None where none do."""
    count = layout.size("k") // layout.per_unit
    word, code = np.arange(ceil_to(count, words))[:, None], np.arange(layout.per_unit)[None, :]
    places = np.broadcast_to(layout.index("k", word, code), (len(word), layout.per_unit))  # a row of one word has no word digit
    groups = (np.minimum(places, layout.size("k") - 1) // group).reshape(-1, words, layout.per_unit)
    for power in range(layout.per_unit.bit_length()):
        pieces = 1 << power
        stretch = groups.reshape(groups.shape[0], words, pieces, -1)
        if (stretch == stretch[:, :1, :, :1]).all():
            return pieces
    return None
