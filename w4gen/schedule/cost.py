"""Bytes, operations, and the physical bounds of a time."""

from __future__ import annotations

from math import prod

from w4gen.ir.decode import Bitcast, Decode, Except, Narrow, Shift
from w4gen.ir.layout import Layout
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Convert, Dot, Input, Space
from w4gen.schedule.arch import Arch


def bytes_moved(program: Program, m: int) -> dict[str, int]:
    """Bytes that one call with `m` rows of x must read or write, by tile, each once."""
    tiles = {name: program.tile(name) for name in (*program.kept, *program.of(Input), list(program)[-1])}
    sizes = {name: tile.sizes | ({"m": m} if "m" in tile.axes else {}) for name, tile in tiles.items()}
    return {name: prod(sizes[name].values()) * tile.element.bits // 8 for name, tile in tiles.items()}


def floor_us(program: Program, arch: Arch, m: int) -> float:
    """Microseconds below which no kernel can go on the arch's board: its bytes over the data sheet's bandwidth."""
    return sum(bytes_moved(program, m).values()) / arch.bandwidth_gbs / 1e3


def traffic(program: Program, m: int) -> dict[str, int]:
    """`bytes_moved`, and what the program itself writes and reads again: a dequantized weight, partial sums of split k."""
    own = {name: program.tile(name) for kernel in program.kernels[:-1] for name in kernel}
    between = {name: tile for name, tile in own.items() if tile.space is Space.GLOBAL}
    sizes = {name: tile.sizes | ({"m": m} if "m" in tile.axes else {}) for name, tile in between.items()}
    again = {name: 2 * prod(sizes[name].values()) * tile.element.bits // 8 for name, tile in between.items()}
    return bytes_moved(program, m) | again


def word_operations(how: Decode) -> float:
    """Word operations that decode one weight, on average over a word: neighbours share shifts; reading bits anew is free."""
    shifts = sum(-(-how.per_unit // op.every) - 1 for op in how.field if isinstance(op, Shift) and op.step)
    each = sum(2 if isinstance(op, Except) else not isinstance(op, Shift | Narrow | Bitcast) for op in how.field + how.value)
    return shifts / how.per_unit + each


def operations(layout: Layout, how: Decode) -> float:
    """Word operations that decode one weight as `layout` holds it: a shift and a mask for each plane, to put them together."""
    return word_operations(how) + (2 * len(layout.planes) if layout.high else 0)


def decoding(program: Program) -> float:
    """Word operations that a scheduled program decodes one weight with."""
    op, layout = program.op("w.value"), program.tile("codes.stored").layout
    return operations(layout, op.decode) if isinstance(op, Convert) and op.decode and layout else 0.0


def bounds_us(program: Program, arch: Arch, m: int) -> dict[str, float]:
    """Microseconds below which one call cannot go, by what bounds it, with m rows of x, at data sheet rates.

    bytes: the program's traffic over the memory's bandwidth · matrix: multiply-adds on matrix cores · lanes: decoding once, and
    multiply-adds where the program has them there. A rate that the arch does not state is left out.
    """
    problem, bounds = program.problem, {"bytes": sum(traffic(program, m).values()) / arch.bandwidth_gbs / 1e3}
    on_lanes = any(op.unit == "lanes" for op in map(program.op, program.of(Dot)) if isinstance(op, Dot))
    if arch.matrix_tflops and not on_lanes:
        bounds["matrix"] = matrix_us(problem, arch, m)
    if arch.lane_tflops:
        paired = any(op.side == "left" for op in map(program.op, program.of(Dot)) if isinstance(op, Dot))
        operations = decoding(program) / (2 if paired else 1) + m * on_lanes
        bounds["lanes"] = 2 * problem.n * problem.k * operations / arch.lane_tflops / 1e6
    return bounds


def matrix_us(problem: Problem, arch: Arch, m: int) -> float:
    """Microseconds of the multiply-adds with m rows of x on the arch's matrix cores."""
    return 2 * m * problem.n * problem.k / arch.matrix_tflops / 1e6
