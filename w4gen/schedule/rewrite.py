"""Applying a schedule is graph rewriting: each function makes one part of it concrete and returns a new program.

`interpret` gives the same result, up to the rounding of the element types chosen, before and after every one of them.
"""

from __future__ import annotations

from w4gen.errors import ScheduleError
from w4gen.ir.decode import Decode, decode
from w4gen.ir.groups import beside, bytes_of_rows, together
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
    RunOn,
    Slice,
    Space,
    Split,
    Store,
    Unpack,
)
from w4gen.ir.types import F32, I32, U8, DType, Format


def ceil_to(size: int, granule: int) -> int:
    return -(-size // granule) * granule


def padded_group(problem: Problem, layout: Layout) -> int:
    """Weights under one scale as stored: a single group takes the padding of its row along."""
    return layout.size("k") if problem.format.groups(problem.k) == 1 else problem.format.group


GROUPED = ("scale", "zero")
"""What a weight may have one of for each group."""


def grouped(program: Program) -> list[str]:
    """The stored tensors that have one element for many weights, however deep in a tree of scales: `scale`, `scale.scale`, …"""
    return [name.removesuffix(".k") for name in program if name.endswith(".k")]


def padded(b: Builder, name: str, source: str, **grown: int) -> str:
    """`source` padded to the sizes given, or itself where it has them."""
    tile = b.tile(source)
    ragged = tuple((axis, size) for axis, size in grown.items() if tile.sizes[axis] != size)
    return b.add(name, Pad(ragged), {"of": source}, tile.element) if ragged else source


def pack(program: Program, layout: Layout) -> Program:
    """Store the weight: codes padded and mapped to `layout`, scales and zeros beside them, their codes in bytes; all are kept."""
    problem, n, k = program.problem, layout.size("n"), layout.size("k")

    def codes(b: Builder, operands: Operands) -> str:
        whole = padded(b, "codes.pad", copy(b, program, "codes", operands), n=n, k=k)
        b.add("codes.stored", Pack(layout), {"of": whole}, I32, Space.GLOBAL, layout=layout, kept=True)
        return b.add("codes.view", Unpack(layout), {"of": "codes.stored"}, problem.format)

    def of_groups(name: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            kind, order = program.tile(name).element, order_of(program, name, layout)
            element = U8 if isinstance(kind, Format) else kind
            whole = padded(b, f"{name}.pad", copy(b, program, name, operands), n=order.size("n"), g=order.size("g"))
            made = b.add(f"{name}.stored", Pack(order), {"of": whole}, element, Space.GLOBAL, layout=order, kept=True)
            as_it_is = element == kind and order.row_major
            return made if as_it_is else b.add(f"{name}.view", Unpack(order), {"of": made}, kind)

        return emit

    def spread(name: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            op, element = program.op(f"{name}.k"), program.tile(name).element
            if isinstance(op, Repeat):
                return b.add(f"{name}.k", Repeat(stretched(op, k), k), operands, element)
            if not isinstance(op, RunOn):
                raise ScheduleError(f"{name}.k ({op}) does not spread anything over k")
            if op.single:
                return b.add(f"{name}.k", RunOn(op.group, op.columns, n * op.columns, n, k), operands, element)
            if (op.rows, op.size) == (n, k):
                return b.add(f"{name}.k", op, operands, element)
            return b.add(f"{name}.k", Pad((("n", n), ("k", k))), {"of": b.add(f"{name}.run", op, operands, element)}, element)

        return emit

    def codebook(name: str) -> Emit:
        sizes = program.tile(name).sizes
        return lambda b, operands: b.add(name, Const(), {}, F32, Space.GLOBAL, sizes, matrix(sizes, 32), kept=True)

    def x(b: Builder, operands: Operands) -> str:
        tile = program.tile("x")
        b.add("x", Input(), {}, problem.x, Space.GLOBAL, tile.sizes, matrix(tile.sizes, problem.x.bits))
        return padded(b, "x.pad", "x", **{problem.over: layout.size(problem.over)})

    emit: dict[str, Emit] = {"codes": codes, "x": x}
    emit |= {name: of_groups(name) for name in grouped(program)} | {f"{name}.k": spread(name) for name in grouped(program)}
    return rewrite(program, emit | {name: codebook(name) for name in program if name.endswith("codebook")})


def order_of(program: Program, name: str, layout: Layout) -> Layout:
    """Where a tensor with one element for many weights is stored: beside codes in `layout`, or in rows; narrow codes in bytes."""
    op, tile, k = program.op(f"{name}.k"), program.tile(name), layout.size("k")
    kind, coded = tile.element, isinstance(tile.element, Format)
    if not isinstance(op, Repeat):
        rows, columns = tile.shape
        return bytes_of_rows(rows, columns, kind.bits) if coded else matrix({"n": rows, "g": columns}, kind.bits)
    rows, columns = layout.size("n"), -(-k // stretched(op, k))
    if coded and (kind.bits < 8 or layout.row_units() is not None):
        return bytes_of_rows(rows, columns, kind.bits)
    return beside(layout, columns, kind.bits, together(stretched(op, k), columns, kind.bits))


def stretched(op: Repeat, k: int) -> int:
    """Weights under one element as stored: a single group takes the padding of its row along."""
    return k if op.group >= op.size else op.group


def convert(program: Program, how: Decode, operand: DType) -> Program:
    """Decode by the word operations `how`, scales that are codes in f32; the Dot takes its operands as `operand`."""

    def decoded(name: str) -> Emit:
        form = program.tile(program.operands(name)["codes"]).element
        way = how if name == "w.value" else decode(form, F32, 1)  # type: ignore[arg-type]

        def emit(b: Builder, operands: Operands) -> str:
            if "codebook" in operands:
                table = operands["codebook"]
                operands["codebook"] = b.add(f"{table}.tile", Slice(()), {"of": table}, F32)
            return b.add(name, Convert(way), operands, way.dtype)

        return emit

    def centred(b: Builder, operands: Operands) -> str:
        return b.add("w.centred", Convert(), operands, how.dtype)

    def scaled(b: Builder, operands: Operands) -> str:
        return b.add("w", Convert(), operands, operand)

    def dot(b: Builder, operands: Operands) -> str:
        if b.tile(operands["x"]).element != operand:
            operands["x"] = b.add("x.value", Convert(), {"x": operands["x"]}, operand)
        return copy(b, program, "acc", operands)

    emit: dict[str, Emit] = {"w": scaled, "acc": dot}
    emit |= {name: decoded(name) for name in program.of(Convert) if "codes" in program.operands(name)}
    return rewrite(program, emit | ({"w.centred": centred} if "w.centred" in program.graph else {}))


def split(program: Program, layout: Layout, spans: int) -> Program:
    """Replace k by the digits that the rows are stored in: word, span (a stretch of codes under one scale) and code.

    Codes in planes are seen in the order of the narrowest, whose word has its codes in several words of the others.
    """
    steps = layout.narrowest

    def codes(b: Builder, operands: Operands) -> str:
        if layout.high is None:
            return b.add("w.codes", Field(layout, spans), operands, program.problem.format)
        whole = copy(b, program, "codes.view", operands)
        return b.add("w.order", Split(steps, spans), {"of": whole}, program.problem.format)

    def order(name: str, view: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            made = copy(b, program, view, operands)
            return b.add(f"{name}.order", Split(steps, spans), {"of": made}, program.tile(view).element)

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

    views = {f"{name}.order": view(name) for name in ("w", "x", *grouped(program)) if f"{name}.order" in program.graph}
    return rewrite(program, views | {"acc": dot} | ({"w.codes": words} if "w.codes" in program.graph else {}))


def dequantize(program: Program) -> Program:
    """Write the scaled weight [N, K] to memory and multiply it by the vendor's matmul: two kernels."""
    problem = program.problem

    def dot(b: Builder, operands: Operands) -> str:
        crop = Store((("n", problem.n), ("k", problem.k)))
        dense = b.add("w.dense", crop, {"of": operands["w"]}, b.tile(operands["w"]).element, Space.GLOBAL)
        return b.add("acc", Dot(("k",), "vendor"), {"w": dense, "x": "x"}, F32)

    return rewrite(program, {"acc": dot})


AT = Space.GLOBAL, Space.REGISTER, Space.REGISTER


def tile(
    program: Program,
    walked: str,
    size: int,
    n: int,
    m: int = 0,
    split: int = 1,
    at: tuple[Space, Space, Space] = AT,
    across: str = "n",
) -> Program:
    """Cut into blocks: `across` (n of them) and m over the grid, `walked` (lane, word, k or n) over steps, dealt out to `split`.

    What does not divide is padded first, which prints as a mask. With m=0 only the weight is cut, along n and k of the grid.
    `at` says where the sums of `split` programs meet, where x waits, and where the words of w.
    """
    blocks = {"m": Block("m", m, "m"), across: Block(across, n, across), walked: Block(walked, size, "step" if m else walked)}

    def cut(short: str, view: str, *axes: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            source, taken = copy(b, program, view, operands), [blocks[axis] for axis in axes]
            held = b.tile(source)
            source = padded(
                b, f"{short}.rows", source, **{each.axis: ceil_to(held.sizes[each.axis], each.size) for each in taken}
            )
            place = {"x": at[1], "w": at[2]}.get(short, Space.REGISTER)
            return b.add(f"{short}.tile", Slice(tuple(taken)), {"of": source}, held.element, place)

        return emit

    def accumulate(b: Builder, operands: Operands) -> str:
        over = program.op("acc").over  # type: ignore[union-attr]
        if split == 1:
            return b.add("acc", Reduce(over, "step"), operands, F32)
        parts = b.add("parts", Reduce(over, "step", split), operands, F32, at[0])
        return b.add("acc", Reduce(("part",)), {"of": parts}, F32)

    axes = {"w": (across, walked), "x": ("m", walked)} | dict.fromkeys(grouped(program), (across, walked))
    views = {short: last(program, *views_of(short)) for short in axes if m or short != "x"}
    emit: dict[str, Emit] = {view: cut(short, view, *axes[short]) for short, view in views.items()}
    if m:
        emit["acc"] = accumulate
        emit |= {"bias": cut("bias", "bias", "n")} if program.problem.bias else {}
        emit |= {"residual": cut("residual", "residual", "m", "n")} if program.problem.residual else {}
    return rewrite(program, emit)


def views_of(operand: str) -> tuple[str, ...]:
    """The views of an operand that blocks can be cut from, the last one first."""
    first = {"w": ("codes.stored",), "x": ("x.pad", "x")}.get(operand, (f"{operand}.k",))
    return (f"{operand}.quads", f"{operand}.order", *first)


def last(program: Program, *names: str) -> str:
    """The first of `names` that is in the program; of stored codes that are unpacked at once, the unpacked ones."""
    found = next(name for name in names if name in program.graph)
    return "codes.view" if found == "codes.stored" and "codes.view" in program.graph else found
