"""Legality: a scheduled program against the limits of an arch. The limits are handed in; nothing here knows an arch."""

from __future__ import annotations

from typing import Protocol

from w4gen.errors import ScheduleError
from w4gen.ir.program import Program
from w4gen.ir.tile import Const, Convert, Dot, Input, Op, Pad, Repeat, Slice, Space, Store
from w4gen.ir.types import DType


class Limits(Protocol):
    """What `verify` reads off an arch."""

    @property
    def name(self) -> str: ...
    @property
    def warp(self) -> int: ...
    @property
    def max_threads(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


ROLES: dict[type, tuple[set[str], ...]] = {
    Dot: ({"w", "x"},),
    Store: ({"acc"}, {"acc", "bias"}, {"acc", "residual"}, {"acc", "bias", "residual"}, {"of"}),
    Convert: (
        *({"codes"}, {"codes", "codebook"}),
        *({"value", "scale"}, {"acc", "scale"}, {"acc", "sum", "scale"}),
        *({"value", "zero"}, {"acc", "sum", "zero"}),
        *({"value"}, {"x"}),
    ),
}


def roles(op: Op) -> tuple[set[str], ...]:
    """The sets of operands that an operation can take."""
    return ROLES.get(type(op), (set(),) if isinstance(op, Const | Input) else ({"of"},))


def bytes_of(program: Program, names: list[str]) -> int:
    """Bytes of the tiles `names`, of codes in their words; an element that many k share counts once."""
    total = 0
    for name in names:
        tile, size, shared = program.tile(name), 1, repeated(program, name)
        for axis, extent in tile.sizes.items():
            size *= 1 if axis in ("span", "code") else -(-extent // shared) if axis == "k" else extent
        total += size * tile.element.bits // 8
    return total


def repeated(program: Program, name: str) -> int:
    """The neighbouring k that read one element of a block of scales or zeros."""
    op = program.op(name)
    while isinstance(op, Slice | Pad):
        name = program.source(name)
        op = program.op(name)
    return op.group if isinstance(op, Repeat) else 1


def verify(program: Program, limits: Limits, warps: int, ring: int = 1) -> Program:
    """The program itself where it is legal, with `ring` of each tile in shared memory.

    Raises `ScheduleError` that names the node, the limit and the way out.
    """
    for name in program:
        given = set(program.operands(name))
        if given not in roles(program.op(name)):
            raise ScheduleError(f"{name} ({program.op(name)}) has operands {sorted(given)}: it takes {roles(program.op(name))}")
        if program.tile(name).kept and program.tile(name).space is not Space.GLOBAL:
            raise ScheduleError(f"{name} is kept in {program.tile(name).space.value} memory: a weight's buffers are global")
    for name in program.of(Slice):
        for block in program.op(name).blocks:  # type: ignore[union-attr]
            if block.size & (block.size - 1):
                raise ScheduleError(
                    f"{name}: block of {block.size} along {block.axis} is not a power of two, as Triton tiles are"
                )
    threads = warps * limits.warp
    if threads > limits.max_threads or warps & (warps - 1):
        raise ScheduleError(f"warps={warps} is {threads} threads; {limits.name} runs powers of two up to {limits.max_threads}")
    views = {program.source(name) for name in program.of(Slice)}  # cut again before anything is loaded
    held = {name for name in program.of(Slice, Dot, Convert) if isinstance(program.tile(name).element, DType)} - views
    pieces = [[name for name in names if name in held and program.tile(name).space is Space.REGISTER] for names in program.ours]
    need = max((bytes_of(program, names) // 4 // threads for names in pieces), default=0)
    if need > limits.registers:
        raise ScheduleError(
            f"the tiles need {need} registers a thread, {limits.name} has {limits.registers}: take smaller blocks or more warps"
        )
    shared = ring * bytes_of(program, [name for name in program if program.tile(name).space is Space.SHARED])
    if shared > limits.shared_bytes:
        raise ScheduleError(f"the tiles need {shared} bytes of shared memory, {limits.name} has {limits.shared_bytes}")
    return program
