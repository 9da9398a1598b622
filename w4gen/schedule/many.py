"""Many rows on an arch with wgmma, of x or of dY: which tiles, and how many programs share k. Nothing here times anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

from w4gen.ir.layout import Layout
from w4gen.ir.problem import PAIRED, Problem
from w4gen.ir.types import BF16, F16, F32, Format
from w4gen.schedule.arch import GRID, Arch
from w4gen.schedule.cost import declared
from w4gen.schedule.few import SMALL
from w4gen.schedule.rewrite import padded_group
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import readable, steps

WGMMA = range(9, 2049)
"""The M for which gemm_wgmma may be: above, the vendor's matmul makes up for the time of dequantizing."""

SEVERAL = 16
"""The largest M for which gemv_mma answers first: where a program of few outputs may read all of x."""

FUSED = 128
"""The largest M for which gemm, decoding inside the multiplication, is predicted faster than dequantizing first."""

SCALES = {F16: (F16,), BF16: (BF16, F16, F32)}
"""The types of scales that pairs of x's type multiply: as they are, or as a sum of two."""

TILES = {
    (2, 16): (2.7, 0.42),
    (2, 32): (2.7, 0.42),
    (2, 64): (3.0, 0.5),
    (2, 128): (3.5, 0.72),
    (2, 256): (4.5, 1.22),
    (4, 32): (4.6, 0.65),
    (4, 64): (4.6, 0.85),
    (4, 128): (5.6, 1.28),
}
"""By teams and rows of x: microseconds in which a program starts and stores, and of 128 k, alone on an SM. Seen on an H200."""

SHARED = {16: 0.7, 32: 0.76, 64: 0.96}
"""Microseconds of 128 k where two programs of two teams share an SM."""

AHEAD = 2
"""Steps whose scales are asked for ahead: a step waits for what was asked before it."""

AT_ONCE = 4
"""Scales of a step that an output has at most: more do not fit the registers, where each is a sum of two."""

RING, SPARE = 8, 10 * 1024
"""Steps of words and x in flight, where shared memory has room for them, and its bytes that other things take."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of gemm_wgmma multiplies: rows of x by 64 outputs for each team, over every split-th step along k."""

    teams: int
    rows: int
    split: int

    def programs(self, problem: Problem) -> int:
        return -(-problem.m[1] // self.rows) * -(-problem.n // (64 * self.teams)) * self.split

    def alone(self, problem: Problem, arch: Arch) -> bool:
        """Whether no other program shares its SM."""
        return self.teams > 2 or self.rows not in SHARED or self.programs(problem) <= arch.sms

    @property
    def full(self) -> bool:
        """Whether sums leave few registers: steps are short then, and scales are asked for one step ahead."""
        return (self.teams, self.rows) == (4, 128)

    def us(self, problem: Problem, arch: Arch) -> float:
        """Microseconds of a call: waves of programs, each of which starts, multiplies its steps and stores; then their sums."""
        alone = self.alone(problem, arch)
        start, step = TILES[self.teams, self.rows]
        step = step if alone else SHARED[self.rows]
        waves = -(-self.programs(problem) // (arch.sms * (1 if alone else 2)))
        sums = 1.5 + 8 * self.split * problem.m[1] * problem.n / 4e6 if self.split > 1 else 0
        return waves * (step * -(-problem.k // 128) / self.split + start) + sums


def many(problem: Problem, layout: Layout, arch: Arch) -> Schedule | None:
    """Many rows on an arch with wgmma: the rows of a tile, and the programs that share k, of which the model says the least.

    None for what gemm_wgmma does not take: scales that a pair of x's type, or two, do not hold, zeros after scaling, codebooks;
    and for few rows of a small layer, whose programs start sooner than a ring fills.
    """
    if not taken(problem, layout, arch) or problem.residual or problem.m[0] not in WGMMA:
        return None
    if problem.m[1] <= 32 and problem.n * problem.k <= SMALL:
        return None
    group = padded_group(problem, layout)
    single, several = steps(layout, group)
    few_scales = [size for size in several if size <= AT_ONCE * group] if problem.format.zero is None else []
    sizes = sorted({*single, *few_scales}, reverse=True)
    if not sizes or layout.size("n") % 128 or problem.n > 128 * GRID:
        return None
    whole = layout.size("k") // sizes[0]
    tile = min(_tiles(problem, layout, sizes, whole), key=lambda each: each.us(problem, arch))
    if problem.m[0] > 512 and _dense_us(problem, arch) < tile.us(problem, arch):
        return None
    if whole > 16 and problem.m[1] <= FUSED and _gemm_us(problem) < tile.us(problem, arch):
        return None
    alone = tile.alone(problem, arch)
    chosen = Schedule(
        template="gemm_wgmma",
        block_m=tile.rows,
        block_n=64 * tile.teams,
        block_k=64 if tile.full else sizes[0],
        split_k=tile.split,
        unit="mma",
        side="left",
        scale_at="weight",
        x_at="shared",
        w_at="shared",
        teams=tile.teams,
        stages=1 if tile.full else AHEAD,
        ring=1,
        maxnreg=0 if alone else 80,
        overlap=int("dependent_launch" in arch.features),
    )
    room = arch.shared_bytes // (1 if alone else 2) - SPARE
    return replace(chosen, ring=min(RING, room // declared(chosen, problem)))


def heights(teams: int, rows: int) -> list[int]:
    """Rows of the tiles that so many teams may have for `rows` rows of x; 16 for no more, as a step with 32 takes as long."""
    return [height for each, height in TILES if each == teams and min(rows, 32) <= height < 2 * rows]


def _tiles(problem: Problem, layout: Layout, sizes: list[int], whole: int) -> list[Tile]:
    """The tiles that the model chooses among, for steps of these sizes, of the first of which k has `whole`."""
    splits = [split for split in range(1, 11) if split == 1 or (whole % split == 0 and whole // split >= 2)]
    every = [2, 4] if layout.size("n") % 256 == 0 else [2]
    found = [Tile(teams, rows, split) for teams in every for rows in heights(teams, problem.m[1]) for split in splits]
    roomy = problem.activation in ("", "relu", PAIRED)  # others are worked out in registers that large tiles do not leave
    return [each for each in found if (64 in sizes or not each.full) and (roomy or each.teams * each.rows <= 256)]


def _gemm_us(problem: Problem) -> float:
    """Microseconds of gemm, of which a program has at most 64 rows of x. Seen on an H200."""
    start, each = (7.5, 0.145) if problem.m[1] <= SEVERAL else (4.6, max(0.22, 0.0047 * problem.m[1]))
    return start + problem.k / 16384 + problem.n * problem.k * each / 1e6


def taken(problem: Problem, layout: Layout, arch: Arch) -> bool:
    """Whether wgmma multiplies these weights: of an arch that has it, in the order of its fragments, x in whole 16-byte parts.

    Pairs of x's type hold the weights, and their scales.
    """
    form = problem.format
    held = form.affine and not form.flat and form.scale in SCALES[problem.x] and form.bits <= problem.x.mantissa
    exact = form.zero is None or (form.zero_mode == "integer" and not isinstance(form.zero, Format))
    stored = readable(layout, form, arch) and layout.row_units() is None and problem.inputs % 8 == 0
    return {"gluon", "wgmma"} <= arch.features and held and exact and stored


TURNED = {64: (3.0, 0.75), 128: (5.0, 0.9), 256: (5.5, 1.45)}
"""Microseconds of dgrad_wgmma with so many rows of dY: of a program, and of each of its steps of 128 outputs. Seen on an H200."""


def turned(problem: Problem, layout: Layout, arch: Arch) -> Schedule | None:
    """dX = dY W of many rows on an arch with wgmma: the rows of a tile of which whole waves take least.

    None for what dgrad_wgmma does not take: codes of other than 4 bits, scales of other than 16, of groups below 128.
    """
    form, whole = problem.format, all(layout.size(axis) % 128 == 0 for axis in ("n", "k"))
    if not taken(problem, layout, arch) or form.bits != 4 or form.scale == F32 or problem.m[0] <= 64:
        return None
    if not whole or padded_group(problem, layout) % 128:
        return None

    def us(rows: int) -> float:
        start, step = TURNED[rows]
        programs = -(-min(problem.m[1], 4096) // rows) * -(-problem.k // 128)
        return -(-programs // arch.sms) * (start + step * layout.size("n") / 128)

    rows = min((rows for rows in TURNED if rows < 256 or form.zero is None), key=us)
    return Schedule(
        template="dgrad_wgmma",
        block_m=rows,
        block_n=128,
        block_k=128,
        unit="mma",
        side="left",
        scale_at="weight",
        x_at="shared",
        teams=2,
        stages=2 if rows < 256 and form.zero is None else 1,
        ring=3 if rows == 256 else 6,
        overlap=int("dependent_launch" in arch.features),
    )


def _dense_us(problem: Problem, arch: Arch) -> float:
    """Microseconds of dequantizing, at 0.8 of the bandwidth, and of a vendor's matmul at 0.7 of the rate. Seen on an H200."""
    weights = problem.n * problem.k
    return 2 * problem.m[1] * weights / arch.matrix_tflops / 0.7e6 + 2.5 * weights / arch.bandwidth_gbs / 0.8e3 + 5
