"""The schedules that hardware offers for a problem: made from granules, kept where they are legal, ranked by a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm, log

from w4gen.errors import W4Error
from w4gen.ir.layout import QUAD, Layout
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.verify import verify
from w4gen.schedule.apply import apply
from w4gen.schedule.arch import Arch
from w4gen.schedule.cost import Prediction, declared, predicted
from w4gen.schedule.few import SHARED
from w4gen.schedule.many import Tile, heights
from w4gen.schedule.rewrite import ceil_to
from w4gen.schedule.rules import pick, ways
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import layout_of

LANES, ROWS, DEEP = 16, 16, 64
"""What a matrix instruction takes: outputs and k of one, and k of the pieces that x is copied in."""

LARGEST = {"block_n": 256, "block_k": 2048, "block_m": 64, "split_k": 8, "warps": 16, "stages": 4}
"""How far a choice is tried."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with what a model says of it, or with why it is refused."""

    schedule: Schedule
    prediction: Prediction | None = None
    refused: str = ""

    @property
    def us(self) -> float:
        """Predicted microseconds of a call."""
        return self.prediction.us if self.prediction else float("inf")


def candidates(program: Program, arch: Arch, m: int) -> list[Candidate]:
    """Every schedule of the space, the one predicted fastest first, those that are refused last. Ties keep the space's order."""
    found = [judged(program, schedule, arch, m) for schedule in dict.fromkeys(space(program, arch))]
    return sorted(found, key=lambda each: each.us)


ALIKE = 0.05
"""Predictions that differ by a smaller share say nothing of which is faster."""


def shortlist(program: Program, arch: Arch, m: int) -> list[Candidate]:
    """What to time, the most promising first: the rules' choice, then legal candidates by predicted time.

    Of those that are predicted alike, the fewer changes of the rules' choice come first: that was measured, the model was not.
    """
    first = judged(program, pick(program, arch), arch, m)
    own = set(str(first.schedule).split())

    def promise(each: Candidate) -> tuple[int, int]:
        return round(log(each.us) / ALIKE), len(set(str(each.schedule).split()) - own)

    legal = [each for each in candidates(program, arch, m) if not each.refused and each.schedule != first.schedule]
    return [first, *sorted(legal, key=promise)]


def judged(program: Program, schedule: Schedule, arch: Arch, m: int) -> Candidate:
    """A schedule, applied and verified: its predicted time, or why it is not legal."""
    try:
        scheduled = verify(apply(program, schedule, arch), arch, schedule.warps * schedule.teams, schedule.ring)
    except W4Error as error:
        return Candidate(schedule, refused=str(error))
    refused = beyond(program.problem, schedule, arch)
    return Candidate(schedule, refused=refused) if refused else Candidate(schedule, predicted(scheduled, schedule, arch, m))


def beyond(problem: Problem, schedule: Schedule, arch: Arch) -> str:
    """What a template cannot do with a schedule that is legal as a program; empty where it can."""
    taken = declared(schedule, problem)
    room = min(SHARED, arch.shared_bytes) if schedule.template in PIECEWISE else arch.shared_bytes
    if taken > room:
        return f"what is in flight takes {taken} bytes of shared memory, {arch.name} has {room} for it"
    kept = schedule.block_m // 2 + schedule.block_k // 4  # of a team of four warps
    if schedule.x_at == "shared" and 0 < schedule.maxnreg < kept:
        return f"sums and weights of a team take {kept} registers a thread, maxnreg={schedule.maxnreg} leaves fewer"
    if schedule.template == "gemv_mma" and (schedule.block_n // ROWS) % schedule.teams + (schedule.block_m // 4) % schedule.teams:
        return f"{schedule.teams} teams do not share block_n={schedule.block_n} by {ROWS} and block_m={schedule.block_m} by 4"
    if schedule.template == "gemv_mma" and schedule.block_n // ROWS // schedule.teams > 2:
        return f"a warp of {schedule.teams} teams has more than 32 of block_n={schedule.block_n} outputs"
    if schedule.template == "gemm" and schedule.warps * ROWS > schedule.block_n:
        return f"{schedule.warps} warps of {ROWS} outputs each are more than block_n={schedule.block_n}"
    if schedule.template == "gemv" and schedule.unit == "mma" and schedule.block_m < problem.m[1]:
        return f"a program that reads rows of codes computes all rows of x: block_m={schedule.block_m} is below {problem.m[1]}"
    return ""


def space(program: Program, arch: Arch) -> Iterator[Schedule]:
    """What can be asked of the hardware, whether legal or not: each way through a template, as the rules give it, and varied.

    Sizes are multiples of the granules that they cross: of the layout's blocks, of what a load brings, of the matrix instruction.
    """
    problem = program.problem
    layout = layout_of(problem, arch)
    every = ways(program, arch)
    yield from every
    for way in every:
        choices = varied(way, layout, arch, problem.m[1])
        for values in itertools.product(*choices.values()):
            yield replace(way, **dict(zip(choices, values, strict=True)))  # type: ignore[arg-type]


def granules(way: Schedule, layout: Layout, arch: Arch) -> dict[str, int]:
    """The least sizes of blocks along n and k, of which every size is a multiple."""
    steps, mma = layout.narrowest, way.unit in ("mma", "halves")
    loaded = steps.per_unit * (arch.warp * QUAD if way.unit == "lanes" else LANES if mma else 1)
    if steps.row_units() is None:
        deep = DEEP if way.template in PIECEWISE else 1
        return {"n": lcm(layout.block["n"], ROWS if mma else 1), "k": lcm(layout.block["k"], deep)}
    return {"n": LANES if mma else 1, "k": loaded}


PIECEWISE = ("gemv_mma", "gemv_half")
"""Templates that copy x in pieces."""


def varied(way: Schedule, layout: Layout, arch: Arch, rows: int) -> dict[str, list[int]]:
    """The values of each choice that a way leaves open."""
    least = granules(way, layout, arch)
    most = {axis: 2 * ceil_to(layout.size(axis), least[axis]) for axis in ("n", "k")}
    warps = [each for each in doubled(1, LARGEST["warps"]) if each * arch.warp <= arch.max_threads]
    block_n, block_k = (doubled(least[axis], min(LARGEST[f"block_{axis}"], most[axis])) for axis in ("n", "k"))
    stages, split = list(range(1, LARGEST["stages"] + 1)), doubled(1, LARGEST["split_k"])
    if way.unit == "vendor":
        return {"block_n": [each for each in block_n if each <= 64], "warps": [4, 8]}
    if way.unit == "lanes":
        return {"block_n": [each for each in block_n if each <= 16], "block_k": block_k, "warps": warps[:4]}
    if way.unit == "halves":
        return {"warps": warps[:4], "split_k": split if way.split_k > 1 or "cluster" in arch.features else [1], "stages": stages}
    if way.template == "gemv_mma":
        teams = doubled(1, way.block_m // 8) if "wgmma" in arch.features else [1]
        outputs = [each for each in block_n if each <= 32 * teams[-1]]
        return {"block_n": outputs, "warps": warps[:4], "teams": teams, "stages": stages[1:], "ring": [3, 6, 8]}
    if way.template == "dgrad_wgmma":
        return {"block_m": [64, 128, 256], "ring": [3, 4, 6], "stages": [1, 2]}
    if way.template == "gemm_wgmma":
        tall = [each for each in heights(way.teams, rows) if way.block_k == 64 or not Tile(way.teams, each, 1).full]
        shared = [80] * (way.teams == 2)  # registers where two programs share an SM
        return {"block_m": tall, "split_k": split, "ring": [2, 3, 4, 6, 8], "stages": [2], "maxnreg": [0, *shared]}
    tall = [each for each in doubled(16, LARGEST["block_m"]) if each < 2 * rows or each == 16]
    if way.template == "dgrad":
        block_k = [each for each in block_k if each <= 256]
        return {"block_m": [32, 64, 128, 256], "block_n": block_n, "block_k": block_k, "warps": [4, 8], "stages": stages[1:]}
    wide = {"block_n": [each for each in block_n if each >= 32], "warps": [4, 8], "block_m": tall}
    return wide | ({"split_k": split, "stages": stages[1:]} if way.side == "left" else {"stages": stages[1:]})


def doubled(least: int, most: int) -> list[int]:
    """`least` times 1, 2, 4 … up to `most`, and at least the first."""
    return [least << turn for turn in range(16) if turn == 0 or least << turn <= most]
