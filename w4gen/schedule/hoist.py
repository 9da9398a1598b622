"""A rewrite of scales that are made of scales: what is the same for all k leaves the loop."""

from __future__ import annotations

import math

from w4gen.ir.program import Builder, Operands, Program, copy, rewrite
from w4gen.ir.tile import Convert, Repeat, RunOn
from w4gen.ir.types import F32, Format

WHOLE = "scale.whole.at"
"""A scale's value times the scale that it is under, for each group."""

LARGEST = 2.0**16
"""The largest value of a scale's codes for which f32 sums without the scale above them stay far from overflow."""


def hoist(program: Program) -> Program:
    """(sum of part * value) * above instead of the sum of part * (value * above), where one `above` is for all k of a row.

    A program without such a scale is left as it is.
    """
    form = program.problem.format.scale
    if WHOLE not in program.graph or not isinstance(form, Format):
        return program
    op = program.op("scale.scale.k")
    alone = (isinstance(op, RunOn) and op.single) or (isinstance(op, Repeat) and op.group >= op.size)
    if not alone or max(abs(value) for value in form.values if math.isfinite(value)) > LARGEST:
        return program
    above: Operands = {}

    def whole(b: Builder, operands: Operands) -> str:
        above["scale"] = operands["scale"]
        return operands["value"]

    def total(b: Builder, operands: Operands) -> str:
        return b.add("rescaled", Convert(), {"acc": copy(b, program, "acc", operands)} | above, F32)

    return rewrite(program, {WHOLE: whole, "acc": total})
