"""A program as text for people: what runs once, what each kernel runs per call."""

from __future__ import annotations

from w4gen.ir.program import Program
from w4gen.ir.tile import Input


def show(program: Program) -> str:
    """One line a node: name, tile, operation and operands."""
    width = max(len(name) for name in program)
    tiles = max(len(str(program.tile(name))) for name in program)

    def line(name: str) -> str:
        operands = ", ".join(f"{role}={source}" for role, source in program.operands(name).items())
        return f"  {name:<{width}}  {program.tile(name)!s:<{tiles}}  {program.op(name)}({operands})"

    parts = [f"# {program.problem}"]
    kept = ", ".join(program.kept) or "nothing is kept yet"
    parts += [f"offline, once per weight (kept: {kept})", *map(line, program.offline)]
    parts += ["per call, inputs", *(line(name) for name in program.per_call if isinstance(program.op(name), Input))]
    for index, names in enumerate(program.kernels):
        parts += [f"per call, kernel {index}", *map(line, names)]
    return "\n".join(parts)
