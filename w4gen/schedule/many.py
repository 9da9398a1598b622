"""Many rows on an arch with wgmma, of x or of dY: which tiles, and how many programs share k. Nothing here times anything."""

from __future__ import annotations

from w4gen.ir.layout import Layout
from w4gen.ir.problem import PAIRED, Problem
from w4gen.ir.types import BF16, F16, F32, Format
from w4gen.schedule.arch import GRID, Arch
from w4gen.schedule.rewrite import padded_group
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import readable

WGMMA = range(33, 2049)
"""The M for which gemm_wgmma may be: above, the vendor's matmul makes up for the time of dequantizing."""

SCALES = {F16: (F16,), BF16: (BF16, F16, F32)}
"""The types of scales that pairs of x's type multiply: as they are, or as a sum of two."""


def many(problem: Problem, layout: Layout, arch: Arch) -> Schedule | None:
    """Many rows on an arch with wgmma: the rows of a tile, and the programs that share k, of which the model says the least.

    None for what gemm_wgmma does not take: scales that a pair of x's type, or two, do not hold, zeros after scaling, codebooks.
    """
    form, group, held = problem.format, padded_group(problem, layout), layout.size("k")
    if not taken(problem, layout, arch) or problem.residual or problem.m[0] not in WGMMA:
        return None
    least = layout.block["k"]
    whole = [size for size in (128, 64) if held % size == size % least == 0]
    sizes = [size for size in whole if group % size == 0 or (form.zero is None and size % group == group % 16 == 0)]
    if not sizes or layout.size("n") % 128 or problem.n > 128 * GRID:
        return None
    block_k, steps = sizes[0], held // sizes[0]
    splits = [split for split in range(1, 11) if split == 1 or (steps % split == 0 and steps // split >= 2)]
    choices = [(2, rows, split) for rows in (64, 128, 256) for split in splits]
    if layout.size("n") % 256 == 0:
        choices += [(4, 64, 1)] + [(4, 128, 1)] * (64 in sizes)
    roomy = problem.activation in ("", "relu", PAIRED)  # others are worked out in registers that large tiles do not leave
    choices = [each for each in choices if each[1] < 2 * problem.m[1] and (roomy or each[0] * each[1] <= 256)]
    teams, rows, split = min(choices, key=lambda choice: _wgmma_us(problem, arch, *choice))
    if problem.m[0] > 512 and _dense_us(problem, arch) < _wgmma_us(problem, arch, teams, rows, split):
        return None
    filled = teams > 2 or arch.sms < 2 * -(-problem.n // 128) <= 2 * arch.sms
    if steps > 16 and ((problem.m[1] <= 64 and not filled) or (problem.m[1] <= 128 and rows == 64 and split > 1)):
        return None  # gemm has more programs, whose sums meet sooner
    alone = rows > 64 or teams > 2 or (split == 1 and _programs(problem, teams, rows, 1) <= arch.sms)
    ahead = {64: 4, 128: 3, 256: 1}[rows] if alone and teams == 2 else 1
    return Schedule(
        template="gemm_wgmma",
        block_m=rows,
        block_n=64 * teams,
        block_k=64 if (teams, rows) == (4, 128) else block_k,
        split_k=split,
        unit="mma",
        side="left",
        scale_at="weight",
        x_at="shared",
        teams=teams,
        stages=ahead,
        ring={64: 6, 128: 6 if teams == 2 else 8, 256: 3}[rows] if alone else 4,
        maxnreg=0 if alone else 80,
        overlap=int("dependent_launch" in arch.features),
    )


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


def _programs(problem: Problem, teams: int, rows: int, split: int) -> int:
    """Programs of gemm_wgmma, whose tiles are `rows` of x by 64 outputs for each team."""
    return -(-problem.m[1] // rows) * -(-problem.n // (64 * teams)) * split


BOUND = {(2, 64, 1): 0.52, (2, 64, 2): 0.94, (4, 64, 1): 0.92}
"""Microseconds of a step of gemm_wgmma, where what it brings and decodes bounds it: by teams, rows of x, programs on an SM."""

START = {64: 3.0, 128: 5.5, 256: 5.5}
"""Microseconds in which a program with so many rows of x starts and stores."""


def _wgmma_us(problem: Problem, arch: Arch, teams: int, rows: int, split: int) -> float:
    """Microseconds of gemm_wgmma: waves of programs, each of which starts, multiplies its steps and stores; then their sums.

    A step of 128 k is bound by its products (at 0.95 of the rate, and what they wait for decoding), or, of few rows, by what it
    brings and decodes; then four teams share an SM, and x too if they are of one program. Constants seen on an H200.
    """
    programs = _programs(problem, teams, rows, split)
    resident = 2 if (teams, rows) == (2, 64) and programs > arch.sms else 1
    products = teams * (0.06 + 2 * rows * 64 * 128 * arch.sms / arch.matrix_tflops / 0.95e6)
    step = BOUND.get((teams, rows, resident), products)
    waves = -(-programs // (arch.sms * resident))
    sums = 2.5 + 8 * split * problem.m[1] * problem.n / 4e6 if split > 1 else 0
    return waves * (step * -(-problem.k // 128) / split + START[rows]) + sums


def _dense_us(problem: Problem, arch: Arch) -> float:
    """Microseconds of dequantizing, at 0.8 of the bandwidth, and of a vendor's matmul at 0.7 of the rate. Seen on an H200."""
    weights = problem.n * problem.k
    return 2 * problem.m[1] * weights / arch.matrix_tflops / 0.7e6 + 2.5 * weights / arch.bandwidth_gbs / 0.8e3 + 5
