"""`w4gen formats`: the built-in families, and what they cost."""

from __future__ import annotations

from typing import Any

import click

from w4gen import formats as builtin
from w4gen.commands.question import as_json, table, tell
from w4gen.errors import W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import BF16, F16, DType, Format
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.cost import decoding
from w4gen.schedule.rules import apply, pick

SIZE = 4096
"""N and K of the layer that the figures are worked out for: a codebook then weighs next to nothing."""

ZEROS = (
    "_z is (q - z) · s with z one of the codes (GPTQ, AWQ, compressed-tensors, AutoRound), _zf the same with any z (HQQ), "
    "_m is q · s - z (GGUF, which stores -z)."
)
"""Which checkpoint uses which mode of the zero."""

HINT = f"""bits a weight: with scales, zeros and tables · ops: word operations that decode a weight, x being f16 or bf16 (M = 1)
Suffixes change a family: _g64 (group), _row and _tensor (one scale for each), _f16 _bf16 _f32 _e8m0 _e4m3 (type of the scale).
Zeros: {ZEROS} Or --format FILE.py:NAME."""


@click.command()
@as_json
def formats(as_json: bool) -> None:
    """List the built-in formats: what they mean, what they cost, who uses them."""
    rows = [described(form, builtin.USERS.get(form.name, "")) for form in builtin.FAMILIES.values()]
    if as_json:
        tell(rows)
        return
    names = ("format", "bits", "decoded by", "group", "scale", "zero", "bits a weight", "ops f16", "ops bf16", "used by")
    table(*names, rows=[["-" if value is None else str(value) for value in row.values()] for row in rows])
    click.echo(f"\n{HINT}")


def described(form: Format, note: str) -> dict[str, Any]:
    """The figures of one family."""
    return {
        "format": form.label,
        "bits": form.bits,
        "decoding": form.decoding,
        "group": group_of(form),
        "scale": kind_of(form.scale),
        "zero": kind_of(form.zero),
        "bits_per_weight": round(form.stated_bits(SIZE, SIZE), 2),
        "operations_f16": operations(form, F16),
        "operations_bf16": operations(form, BF16),
        "used_by": note,
    }


def group_of(form: Format) -> str:
    """What one scale is for."""
    return ("tensor" if form.flat else "row") if form.group == -1 else str(form.group)


def kind_of(kind: DType | Format | None) -> str | None:
    """The type of scales; of those that are codes, the group and the type of their own scales too."""
    if not isinstance(kind, Format):
        return kind.name if kind else None
    return f"{kind.name}, of {group_of(kind)} under {kind_of(kind.scale) or 'nothing'}"


def operations(form: Format, kind: DType) -> float | None:
    """Word operations that decode one weight in the kernel for one token of `kind`; None where there is no such kernel."""
    problem, arch = Problem(m=(1, 1), n=SIZE, k=SIZE, format=form, x=kind, y=kind), ARCHES["portable"]
    program = lower(problem)
    try:
        return round(decoding(apply(program, pick(program, arch), arch)), 2)
    except W4Error:
        return None
