"""Bytes and the physical bound of a time."""

from __future__ import annotations

from math import prod

from w4gen.ir.program import Program
from w4gen.ir.tile import Input
from w4gen.schedule.arch import Arch


def bytes_moved(program: Program, m: int) -> dict[str, int]:
    """Bytes that one call with `m` rows of x must read or write, by tile, each once."""
    tiles = {name: program.tile(name) for name in (*program.kept, *program.of(Input), list(program)[-1])}
    sizes = {name: tile.sizes | ({"m": m} if "m" in tile.axes else {}) for name, tile in tiles.items()}
    return {name: prod(sizes[name].values()) * tile.element.bits // 8 for name, tile in tiles.items()}


def floor_us(program: Program, arch: Arch, m: int) -> float:
    """Microseconds below which no kernel can go on the arch's board: its bytes over the data sheet's bandwidth."""
    return sum(bytes_moved(program, m).values()) / arch.bandwidth_gbs / 1e3
