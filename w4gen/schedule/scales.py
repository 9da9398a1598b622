"""Where scales and zeros are applied: on the weight, on partial sums, and once for all that lie under one."""

from __future__ import annotations

from w4gen.ir.program import Builder, Emit, Operands, Program, copy, rewrite
from w4gen.ir.tile import Block, Convert, Dot, Reduce, Slice
from w4gen.ir.types import F32
from w4gen.schedule.rewrite import GROUPED


def place_scale(program: Program, unit: str, side: str, scale_at: str, origin: float, along: tuple[str, ...]) -> Program:
    """Split the Dot into partial sums over the codes of a stretch, and scale these (or leave the scale on the weight).

    The codes of a stretch run `along` some axes, the last of which a Dot on lanes sums over at once. Lanes keep one partial sum
    each until the end; mma sums over all of a step at once. An `origin` that the decoding left out is made up for here:
    (sum of code * x + origin * sum of x) * scale. So is a zero that is subtracted after scaling; one that is subtracted before
    stays on the weight, where code = zero gives exactly 0.
    """
    rest = along[:-1]
    lanes = "lane" in program.tile(program.operands("acc")["x"]).axes
    moved: Operands = {}

    def take(b: Builder, operands: Operands) -> str:
        moved.update({name: operands[name] for name in GROUPED if name in operands})
        return operands["value"]

    def centred(b: Builder, operands: Operands) -> str:
        return copy(b, program, "w.centred", operands | {"zero": first_of(b, "zero", operands["zero"], along)})

    def weight(b: Builder, operands: Operands) -> str:
        value, element = take(b, operands), program.tile("w").element
        return value if b.tile(value).element == element else b.add("w", Convert(), {"value": value}, element)

    def scaled(b: Builder, part: str, x: str) -> str:
        """The partial sums times the scale, with what is made up for on them."""
        scaling = {"acc": part, "scale": first_of(b, "scale", moved["scale"], along)}
        total = {}
        if origin or "zero" in moved:
            total["sum"] = b.add("x.sum", Reduce(along[-1:]), {"of": x}, F32)
            if rest:
                total["sum"] = b.add("x.sums", Reduce(rest), {"of": total["sum"]}, F32)
        part = b.add("scaled", Convert(origin=origin), scaling | (total if origin else {}), F32)
        if "zero" in moved:
            zero = {"zero": first_of(b, "zero", moved["zero"], along)}
            part = b.add("shifted", Convert(), {"acc": part} | total | zero, F32)
        return part

    def dot(b: Builder, operands: Operands) -> str:
        part = b.add("part", Dot(along[-1:] if lanes else along, unit, side), operands, F32)
        part = b.add("sums", Reduce(rest), {"of": part}, F32) if lanes else part
        part = scaled(b, part, operands["x"]) if scale_at == "accumulator" else part
        acc = b.add("acc", Reduce(tuple(axis for axis in ("span",) if axis in b.tile(part).axes)), {"of": part}, F32)
        return b.add("total", Reduce(("lane",)), {"of": acc}, F32) if lanes else acc

    emit: dict[str, Emit] = {"acc": dot}
    if scale_at == "accumulator":
        on_weight: dict[str, Emit] = {"w.scaled": take, "w.centred": centred}
        emit |= {"w": weight} | {name: each for name, each in on_weight.items() if name in program.graph}
    return rewrite(program, emit)


def first_of(b: Builder, name: str, source: str, along: tuple[str, ...]) -> str:
    """The scale (or zero) of a stretch along some axes: that of its first code; what is computed is, from the first ones."""
    op, element = b.graph.nodes[source]["op"], b.tile(source).element
    if not isinstance(op, Convert):
        return b.add(f"{name}.at", Slice(tuple(Block(axis, drop=True) for axis in along)), {"of": source}, element)
    stored = {role: each for each, _, role in b.graph.in_edges(source, data="operand")}
    firsts = {
        role: each if role == "codebook" else first_of(b, each.rpartition(".")[0], each, along) for role, each in stored.items()
    }
    return b.add(f"{source}.at", op, firsts, element)


def share(program: Program) -> Program:
    """Scale each row of a tile of the weight by one scale, and take off one zero: for tiles that lie in one group along k."""

    def one(name: str) -> Emit:
        def emit(b: Builder, operands: Operands) -> str:
            firsts = {role: first_of(b, role, operands[role], ("k",)) for role in GROUPED if role in operands}
            return copy(b, program, name, operands | firsts)

        return emit

    return rewrite(program, {name: one(name) for name in ("w.centred", "w.scaled", "w") if name in program.graph})
