"""`w4gen formats`: the built-in families, and what they cost."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import click

from w4gen import formats as builtin
from w4gen.commands.question import as_json, table, tell
from w4gen.errors import W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import BF16, F16, DType, Format
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.cost import bytes_moved, decoding
from w4gen.schedule.order import layout_for
from w4gen.schedule.rewrite import pack
from w4gen.schedule.rules import apply, pick

SIZE = 4096
"""N and K of the layer that the figures are worked out for: a codebook then weighs next to nothing."""

HINT = """bits a weight: scales and zeros included · ops: word operations that decode one weight, x being f16 or bf16 (one token)
Suffixes change a family: _g64 (group), _row (one scale a row), _f16 _bf16 _f32 (scale). Or --format FILE.py:NAME."""


@click.command()
@as_json
def formats(as_json: bool) -> None:
    """List the built-in formats: what they mean, what they cost, who uses them."""
    rows = [described(form, note) for form, note in noted().items()]
    if as_json:
        tell(rows)
        return
    names = ("format", "bits", "values", "group", "scale", "bits a weight", "ops f16", "ops bf16")
    table(*names, rows=[["-" if value is None else str(value) for value in list(row.values())[: len(names)]] for row in rows])
    click.echo(f"\n{HINT}\n")
    click.echo("\n".join(f"{form.name}: {note}" for form, note in noted().items()))


def noted() -> dict[Format, str]:
    """The built-in families, each with the text that follows it in `formats.py`."""
    lines = ast.parse(inspect.getsource(builtin)).body
    notes = {
        ast.unparse(line.targets[0]): ast.literal_eval(after.value)
        for line, after in pairwise(lines)
        if isinstance(line, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    named = {vars(builtin)[name]: note for name, note in notes.items() if isinstance(vars(builtin)[name], Format)}
    return {form: " ".join(named.get(form, "").split()) for form in builtin.FAMILIES.values()}


def described(form: Format, note: str) -> dict[str, Any]:
    """The figures of one family."""
    problem, arch = Problem(m=(1, 1), n=SIZE, k=SIZE, format=form), ARCHES["portable"]
    program = pack(lower(problem), layout_for(form, arch, SIZE, SIZE))
    kept = sum(size for name, size in bytes_moved(program, 1).items() if name in program.kept)
    return {
        "format": form.label,
        "bits": form.bits,
        "values": "codebook" if form.codebook is not None else "affine",
        "group": "row" if form.group == -1 else form.group,
        "scale": form.scale.name,
        "bits_per_weight": round(8 * kept / SIZE**2, 2),
        "operations_f16": operations(form, F16),
        "operations_bf16": operations(form, BF16),
        "note": note,
    }


def operations(form: Format, kind: DType) -> float | None:
    """Word operations that decode one weight in the kernel for one token of `kind`; None where there is no such kernel."""
    problem, arch = Problem(m=(1, 1), n=SIZE, k=SIZE, format=form, x=kind, y=kind), ARCHES["portable"]
    program = lower(problem)
    try:
        return round(decoding(apply(program, pick(program, arch), arch)), 2)
    except W4Error:
        return None
