"""Problem -> the logical program: whole tensors, no tile sizes, nothing kept yet."""

from __future__ import annotations

from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, Program
from w4gen.ir.tile import Const, Convert, Dot, Input, Repeat, Space, Store
from w4gen.ir.types import F32


def lower(problem: Problem) -> Program:
    """`y = x · wᵀ + bias`, as a graph. Weights come first, so that their nodes print first.

    w is scale · value(codes), a zero being subtracted before scaling or, in the mode `minimum`, after it.
    """
    form, n, k, m = problem.format, problem.n, problem.k, problem.m[1]
    b = Builder(problem)
    b.add("codes", Const(), {}, form, Space.GLOBAL, {"n": n, "k": k})
    codes = {"codes": "codes"}
    if form.codebook is not None:
        codes["codebook"] = b.add("codebook", Const(), {}, F32, Space.GLOBAL, {"c": 2**form.bits})
    b.add("w.value", Convert(), codes, F32)
    b.add("scale", Const(), {}, form.scale, Space.GLOBAL, {"n": n, "g": form.groups(k)})
    b.add("scale.k", Repeat(form.group_in(k), k), {"of": "scale"}, form.scale)
    if form.zero is not None:
        b.add("zero", Const(), {}, form.zero, Space.GLOBAL, {"n": n, "g": form.groups(k)})
        b.add("zero.k", Repeat(form.group_in(k), k), {"of": "zero"}, form.zero)
    value = "w.value"
    if form.zero is not None and not form.zero_after_scale:
        value = b.add("w.centred", Convert(), {"value": value, "zero": "zero.k"}, F32)
    if form.zero_after_scale:
        value = b.add("w.scaled", Convert(), {"value": value, "scale": "scale.k"}, F32)
        b.add("w", Convert(), {"value": value, "zero": "zero.k"}, F32)
    else:
        b.add("w", Convert(), {"value": value, "scale": "scale.k"}, F32)
    b.add("x", Input(), {}, problem.x, Space.GLOBAL, {"m": m, "k": k})
    b.add("acc", Dot(("k",)), {"w": "w", "x": "x"}, F32)
    sums = {"acc": "acc"}
    if problem.bias:
        sums["bias"] = b.add("bias", Input(), {}, problem.y, Space.GLOBAL, {"n": n})
    b.add("y", Store((("m", m), ("n", n))), sums, problem.y, Space.GLOBAL)
    return b.done()
