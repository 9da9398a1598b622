"""Bytes, operations, and the physical bounds of a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from w4gen.ir.decode import Bitcast, Decode, Except, Narrow, Shift
from w4gen.ir.layout import Layout
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Convert, Dot, Input, Space
from w4gen.schedule.arch import Arch
from w4gen.schedule.schedule import Schedule


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
    dots = [op for op in map(program.op, program.of(Dot)) if isinstance(op, Dot)]
    paired = any(op.side == "left" or op.unit == "halves" for op in dots)  # one operation decodes, or multiplies, two
    on_lanes = any(op.unit in ("lanes", "halves") for op in dots)
    if arch.matrix_tflops and not on_lanes:
        bounds["matrix"] = matrix_us(problem, arch, m)
    if arch.lane_tflops:
        operations = (decoding(program) + m * on_lanes) / (2 if paired else 1)
        bounds["lanes"] = 2 * problem.n * problem.k * operations / arch.lane_tflops / 1e6
    return bounds


def matrix_us(problem: Problem, arch: Arch, m: int) -> float:
    """Microseconds of the multiply-adds with m rows of x on the arch's matrix cores."""
    return 2 * m * problem.n * problem.k / arch.matrix_tflops / 1e6


LATENCY_US = 0.8
"""Microseconds from asking memory to having the bytes, with the memory busy; of the order that GPUs of all makers have."""

REREAD = 3.0
"""How many times faster than memory the L2 cache hands x to one program after another."""

REACHED = {"bytes": 0.9, "matrix": 0.5, "lanes": 0.5}
"""The share of each rate that kernels reach at best, seen on an H200 (docs/results)."""

APART = 0.8
"""The same share of the matrix rate where teams of warps multiply apart, and others bring x."""

START_US, OVERLAPPED_US, SECOND_US = 2.0, 0.7, 2.0
"""Microseconds to start a kernel in a graph, to start one that overlaps the one in front, and for a second function."""

THREADS, REGISTERS = 2048, 65536
"""Threads, and registers of 32 bits, of an SM."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model says of one call: microseconds, those of each ceiling, and how the programs fill the GPU.

    ceilings_us: bytes (memory and rereading x), matrix, lanes (decoding) · resident: programs that an SM holds at once · waves:
    how often all SMs are filled · busy: the share of the GPU's time that has work, through whole waves and SMs without a program.
    """

    us: float
    ceilings_us: dict[str, float]
    resident: int
    waves: float
    busy: float

    @property
    def bottleneck(self) -> str:
        """The ceiling that is hit first, or `waves` where most of the GPU waits for the last programs."""
        return "waves" if self.busy < 0.5 else max(self.ceilings_us, key=lambda name: self.ceilings_us[name])


def predicted(program: Program, schedule: Schedule, arch: Arch, m: int) -> Prediction:
    """A time for one call of a scheduled program with m rows of x: the highest of three ceilings, and what comes on top.

    bytes: as much of the bandwidth as the bytes in flight reach, and x from L2 for one program after another · matrix, lanes: as
    much of the rate as whole waves leave busy. It ranks schedules and is no measurement; rates are those of the data sheet.
    """
    problem, dense = program.problem, schedule.unit == "vendor"
    width = problem.x.bits // 8
    columns = -(-problem.k // schedule.block_k) if dense else schedule.split_k * -(-m // schedule.block_m)
    programs = columns * (-(-problem.k // schedule.block_k) if problem.gradient else -(-problem.n // schedule.block_n))
    resident = residents(schedule, arch, problem)
    each, waves = programs / arch.sms, programs / arch.sms / resident
    busy = waves / ceil(waves) if waves > 1 else each / ceil(each)
    ahead = schedule.ring if schedule.w_at == "shared" else schedule.stages
    asked = schedule.block_n * schedule.block_k * problem.format.bits // 8 * ahead
    flying = min(each, resident) * asked * (schedule.warps if schedule.unit != "lanes" and schedule.template != "gemm" else 1)
    needed = arch.bandwidth_gbs * 1e3 * LATENCY_US / arch.sms
    again = 0 if dense else programs * min(m, schedule.block_m) * problem.inputs // schedule.split_k * width
    bounds = bounds_us(program, arch, m)
    reached = REACHED | ({"matrix": APART} if schedule.x_at == "shared" else {})
    ceilings = {name: us / reached[name] / busy for name, us in bounds.items()}
    ceilings["bytes"] = (
        bounds["bytes"] / REACHED["bytes"] / min(1.0, flying / needed) + again / (REREAD * arch.bandwidth_gbs) / 1e3
    )
    second = schedule.split_k > 1 and schedule.sum_at == "global"
    start = (OVERLAPPED_US if schedule.overlap else START_US) + SECOND_US * (second + dense)
    return Prediction(start + max(ceilings.values()), ceilings, resident, waves, busy)


def residents(schedule: Schedule, arch: Arch, problem: Problem) -> int:
    """Programs that an SM holds at once, by threads, registers (as many as are allowed or usual) and shared memory."""
    parted = schedule.x_at == "shared"  # teams have one more, which brings x
    threads = schedule.warps * (schedule.teams + parted) * arch.warp
    registers = schedule.maxnreg or min(arch.registers, 168 if parted else 128)
    shared = max(1, declared(schedule, problem))
    return max(1, min(THREADS // threads, REGISTERS // (threads * registers), arch.shared_bytes // shared))


def declared(schedule: Schedule, problem: Problem) -> int:
    """Bytes of shared memory of what is in flight in a program, x and words: a ring of each warp, or the stages of a block."""
    width = problem.x.bits // 8
    if schedule.unit == "lanes" or schedule.unit == "vendor":
        return 0
    if schedule.template == "gemv_mma":
        return schedule.ring * schedule.warps * schedule.block_m * 64 * width
    held = schedule.block_n * schedule.block_k * problem.format.bits // 8 if schedule.w_at == "shared" else 0
    if schedule.x_at == "shared":
        return schedule.ring * (schedule.block_m * schedule.block_k * width + held)
    if schedule.template == "dgrad":  # the decoded tile of the weight too
        return (schedule.stages * schedule.block_m + schedule.block_k) * schedule.block_n * width
    return schedule.stages * schedule.block_m * schedule.block_k * width
