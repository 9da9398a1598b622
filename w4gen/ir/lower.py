"""Problem -> the logical program: whole tensors, no tile sizes, nothing kept yet.

The scales of a format may be values of another format, with scales of their own. One function lowers a format, whether its
values are weights or scales; every stored tensor, a leaf of that tree, is first spread over k (its node is called `….k`).
"""

from __future__ import annotations

from dataclasses import replace

from w4gen.errors import ShapeError
from w4gen.ir.problem import Problem
from w4gen.ir.program import Builder, Operands, Program
from w4gen.ir.tile import Const, Convert, Dot, Input, Repeat, RunOn, Space, Store
from w4gen.ir.types import F32, DType, Format, decoded


def lower(problem: Problem) -> Program:
    """`y = activation(x · wᵀ + bias) + residual`, or `y = x · w`, as a graph. Weights come first, and so print first.

    w is scale · value(codes), a zero being subtracted before scaling or, in the mode `minimum`, after it. Raises `ShapeError` on
    weights without a scale, and on groups that end inside another row.
    """
    form, n, k, m = problem.format, problem.n, problem.k, problem.m[1]
    if form.scale is None:
        raise ShapeError(f"{form.label}: weights need a scale: take scale=f32 with group=-1 and flat=True, one for the tensor")
    if form.flat and form.group != -1 and k % form.group:
        raise ShapeError(
            f"K={k} is not a multiple of the flat group {form.group} ({form.label}): no group may end in another row"
        )
    b = Builder(problem)
    w = _values(b, form, "", n, k, Repeat(1, k))
    b.add("x", Input(), {}, problem.x, Space.GLOBAL, {"m": m, problem.over: problem.inputs})
    b.add("acc", Dot((problem.over,)), {"w": w, "x": "x"}, F32)
    sums = {"acc": "acc"}
    if problem.bias:
        sums["bias"] = b.add("bias", Input(), {}, problem.y, Space.GLOBAL, {"n": n})
    crop = (("m", m), ("k" if problem.gradient else "n", problem.outputs))
    if problem.residual:
        sums["residual"] = b.add("residual", Input(), {}, problem.y, Space.GLOBAL, dict(crop))
    b.add("y", Store(crop, problem.activation), sums, problem.y, Space.GLOBAL)
    return b.done()


def _values(b: Builder, form: Format, at: str, rows: int, columns: int, view: Repeat | RunOn) -> str:
    """The values [n, k] of a format, scaled; `at` names the leaf that holds its codes [rows, columns], which `view` spreads."""
    stem, inside = at or "w", f"{at}." if at else ""
    leaf = b.add(at or "codes", Const(), {}, form, Space.GLOBAL, {"n": rows, ("g" if at else "k"): columns})
    codes = {"codes": b.add(f"{at}.k", view, {"of": leaf}, form) if at else leaf}
    if form.codebook is not None:
        codes["codebook"] = b.add(f"{inside}codebook", Const(), {}, F32, Space.GLOBAL, {"c": 2**form.bits})
    value = b.add(f"{stem}.value", Convert(), codes, F32)
    below, grid = _below(view, form, rows, columns), form.grid(rows, columns)
    roles = {"scale": form.scale, "zero": form.zero}
    held = {role: _spread(b, kind, f"{inside}{role}", *grid, below) for role, kind in roles.items() if kind is not None}
    order = ("scale", "zero") if form.zero_after_scale else ("zero", "scale")
    steps = [role for role in order if role in held]
    names = {"scale": f"{stem}.scaled", "zero": f"{stem}.centred"} | dict.fromkeys(steps[-1:], (at and f"{at}.whole") or "w")
    for role in steps:
        operands: Operands = {"value": value, role: held[role]}
        value = b.add(names[role], Convert(), operands, F32)
    return value


def _spread(b: Builder, kind: DType | Format, at: str, rows: int, columns: int, view: Repeat | RunOn) -> str:
    """Scales or zeros [n, k], of a machine type or themselves the values of a format."""
    kind = decoded(kind)
    if isinstance(kind, Format):
        return _values(b, kind, at, rows, columns, view)
    leaf = b.add(at, Const(), {}, kind, Space.GLOBAL, {"n": rows, "g": columns})
    return b.add(f"{at}.k", view, {"of": leaf}, kind)


def _below(view: Repeat | RunOn, form: Format, rows: int, columns: int) -> Repeat | RunOn:
    """How the scales of [rows, columns] values of `form`, themselves spread by `view`, are spread over [n, k]."""
    if isinstance(view, RunOn):
        return replace(view, every=view.every * form.group_in(rows * columns))
    if form.flat:
        return RunOn(view.group, columns, form.group_in(rows * columns), rows, view.size)
    return Repeat(view.group * form.group_in(columns), view.size)
