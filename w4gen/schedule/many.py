"""Many rows on an arch with wgmma, of x or of dY: which tiles, and how many programs share k. Nothing here times anything."""

from __future__ import annotations

from dataclasses import dataclass

from w4gen.ir.layout import Layout
from w4gen.ir.problem import PAIRED, Problem
from w4gen.ir.types import BF16, F16, F32, Format
from w4gen.schedule.arch import GRID, Arch
from w4gen.schedule.rewrite import padded_group
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import readable, steps

WGMMA = range(33, 2049)
"""The M for which gemm_wgmma may be: above, the vendor's matmul makes up for the time of dequantizing."""

SCALES = {F16: (F16,), BF16: (BF16, F16, F32)}
"""The types of scales that pairs of x's type multiply: as they are, or as a sum of two."""


BOUND = {(2, 64, 1): 0.52, (2, 64, 2): 0.94, (4, 64, 1): 0.92}
"""Microseconds of a step of gemm_wgmma, where what it brings and decodes bounds it: by teams, rows of x, programs on an SM."""

START = {64: 3.0, 128: 5.5, 256: 5.5}
"""Microseconds in which a program with so many rows of x starts and stores."""

AHEAD = {64: 4, 128: 3, 256: 1}
"""Steps whose words two teams ask for ahead where a program has an SM alone, by rows of x."""

RING = {(2, 64): 6, (2, 128): 6, (2, 256): 3, (4, 64): 6, (4, 128): 8}
"""Steps of x in flight of a program that has an SM alone, by teams and rows of x."""


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
        return self.rows > 64 or self.teams > 2 or (self.split == 1 and self.programs(problem) <= arch.sms)

    def us(self, problem: Problem, arch: Arch) -> float:
        """Microseconds of a call: waves of programs, each of which starts, multiplies its steps and stores; then their sums.

        A step of 128 k is bound by its products (at 0.95 of the rate, and what they wait for decoding), or, of few rows, by what
        it brings and decodes; then four teams share an SM, and x too if they are of one program. Constants seen on an H200.
        """
        programs = self.programs(problem)
        resident = 2 if (self.teams, self.rows) == (2, 64) and programs > arch.sms else 1
        products = self.teams * (0.06 + 2 * self.rows * 64 * 128 * arch.sms / arch.matrix_tflops / 0.95e6)
        step = BOUND.get((self.teams, self.rows, resident), products)
        waves = -(-programs // (arch.sms * resident))
        sums = 2.5 + 8 * self.split * problem.m[1] * problem.n / 4e6 if self.split > 1 else 0
        return waves * (step * -(-problem.k // 128) / self.split + START[self.rows]) + sums


def many(problem: Problem, layout: Layout, arch: Arch) -> Schedule | None:
    """Many rows on an arch with wgmma: the rows of a tile, and the programs that share k, of which the model says the least.

    None for what gemm_wgmma does not take: scales that a pair of x's type, or two, do not hold, zeros after scaling, codebooks.
    """
    if not taken(problem, layout, arch) or problem.residual or problem.m[0] not in WGMMA:
        return None
    single, several = steps(layout, padded_group(problem, layout))
    sizes = sorted({*single, *(several if problem.format.zero is None else [])}, reverse=True)
    if not sizes or layout.size("n") % 128 or problem.n > 128 * GRID:
        return None
    whole = layout.size("k") // sizes[0]
    tile = min(_tiles(problem, layout, sizes, whole), key=lambda each: each.us(problem, arch))
    if problem.m[0] > 512 and _dense_us(problem, arch) < tile.us(problem, arch):
        return None
    if whole > 16 and _sooner(problem, arch, tile):
        return None
    alone = tile.alone(problem, arch)
    return Schedule(
        template="gemm_wgmma",
        block_m=tile.rows,
        block_n=64 * tile.teams,
        block_k=64 if (tile.teams, tile.rows) == (4, 128) else sizes[0],
        split_k=tile.split,
        unit="mma",
        side="left",
        scale_at="weight",
        x_at="shared",
        teams=tile.teams,
        stages=AHEAD[tile.rows] if alone and tile.teams == 2 else 1,
        ring=RING[tile.teams, tile.rows] if alone else 4,
        maxnreg=0 if alone else 80,
        overlap=int("dependent_launch" in arch.features),
    )


def _tiles(problem: Problem, layout: Layout, sizes: list[int], whole: int) -> list[Tile]:
    """The tiles that the model chooses among, for steps of these sizes, of the first of which k has `whole`."""
    splits = [split for split in range(1, 11) if split == 1 or (whole % split == 0 and whole // split >= 2)]
    found = [Tile(2, rows, split) for rows in (64, 128, 256) for split in splits]
    if layout.size("n") % 256 == 0:
        found += [Tile(4, 64, 1)] + [Tile(4, 128, 1)] * (64 in sizes)
    roomy = problem.activation in ("", "relu", PAIRED)  # others are worked out in registers that large tiles do not leave
    return [each for each in found if each.rows < 2 * problem.m[1] and (roomy or each.teams * each.rows <= 256)]


def _sooner(problem: Problem, arch: Arch, tile: Tile) -> bool:
    """Whether gemm, of a long layer and up to 128 rows, has more programs, whose sums meet sooner."""
    filled = tile.teams > 2 or arch.sms < 2 * -(-problem.n // 128) <= 2 * arch.sms
    return (problem.m[1] <= 64 and not filled) or (problem.m[1] <= 128 and tile.rows == 64 and tile.split > 1)


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
