"""What is chosen, and why: buckets of M, and a schedule for each. Nothing here times anything."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from w4gen.errors import ScheduleError
from w4gen.ir.groups import spans
from w4gen.ir.layout import QUAD, Layout
from w4gen.ir.problem import EVERY, PAIRED, Problem
from w4gen.ir.program import Program
from w4gen.ir.types import F32, Format
from w4gen.schedule import rewrite
from w4gen.schedule.apply import fits, short, words_summed
from w4gen.schedule.arch import GRID, Arch
from w4gen.schedule.few import few
from w4gen.schedule.many import FUSED, SEVERAL, many, turned
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import layout_of, readable

EDGES = (1, 2, 9, 17, 33, 65, 129, 257, 513, 1025, 2049, 2**31)
BUCKETS = tuple((low, high - 1) for low, high in pairwise(EDGES))
"""Ranges of M that share one kernel."""


@lru_cache(maxsize=1024)
def bucket(m: int) -> tuple[int, int]:
    """The range of M that `m` falls in; (m, m) outside all of them."""
    return next((each for each in BUCKETS if each[0] <= m <= each[1]), (m, m))


def pick(program: Program, arch: Arch) -> Schedule:
    """The schedule that the rules give."""
    problem = program.problem
    layout = layout_of(problem, arch)
    low, high = problem.m
    if problem.gradient:
        return turned(problem, layout, arch) or _gradient(problem, layout, arch)
    if problem.m == EVERY:
        return _alike(problem, layout, arch)
    taken, in_blocks = readable(layout, problem.format, arch), layout.narrowest.row_units() is None
    for fast in (few, many) if high <= SEVERAL else (many, few):
        if taken and in_blocks and (chosen := fast(problem, layout, arch)) is not None:
            return chosen
    if low > FUSED or (arch.fragment is None and low > 1) or not taken:
        return _dense(problem, layout, arch)
    if in_blocks:
        return _gemm(problem, layout, arch)
    if high > 16 or (high == 1 and (layout.narrowest.row_units() or 0) % QUAD):
        return _dense(problem, layout, arch)
    return _gemv(problem, layout, arch)


def ways(program: Program, arch: Arch) -> tuple[Schedule, ...]:
    """What `pick` chooses among: a schedule for each way through a template, whether it is legal for the problem or not."""
    problem = program.problem
    layout = layout_of(problem, arch)
    if problem.gradient:
        return tuple(each for each in (turned(problem, layout, arch), _gradient(problem, layout, arch)) if each)
    if layout.narrowest.row_units() is not None:
        return _gemv(problem, layout, arch), _dense(problem, layout, arch)
    fast = [each for each in (many(problem, layout, arch), few(problem, layout, arch)) if each]
    return *fast, _gemm(problem, layout, arch), _dense(problem, layout, arch)


def _alike(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """One schedule for every M: whichever tile a row is in, matrix cores add up its products in the same order of k."""
    if arch.fragment is None or not readable(layout, problem.format, arch):
        chosen = _dense(problem, layout, arch)
    elif layout.narrowest.row_units() is None:
        chosen = replace(_gemm(replace(problem, m=(17, 32)), layout, arch), split_k=1)
    else:
        chosen = _gemv(problem, layout, arch)
    if chosen.unit != "mma":
        raise ScheduleError(
            f"no kernel for every M (batch-invariant) of {problem.format.label} codes {layout} on {arch.name}: only matrix "
            "instructions take any number of rows alike, so rows are multiplied one by one"
        )
    return chosen


def _gradient(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """dX = dY W on matrix cores: each tile of the weight is decoded once for as many rows of dY as a program holds."""
    if arch.fragment is None and "async_copy" not in arch.features:
        raise ScheduleError(f"no kernel for gradients on {arch.name}: matrix instructions of Triton's are what they are made of")
    rows = 1 << (min(problem.m[1], 1024) - 1).bit_length()
    group, least = rewrite.padded_group(problem, layout), layout.block["k"] if layout.narrowest.row_units() is None else 1

    def programs(block_m: int, block_k: int) -> int:
        return -(-rows // block_m) * -(-problem.k // block_k)

    block_k = max(least, 128 if group % 128 == 0 and programs(64, 128) >= arch.sms else 64)
    # two programs or more on an SM: one decodes while the other multiplies
    block_m = 128 if rows >= 128 and 2 * programs(128, block_k) >= 3 * arch.sms else min(64, max(16, rows))
    return Schedule(
        template="dgrad",
        block_m=block_m,
        block_n=64 if group % block_k == 0 else max(16, 2048 // block_k),  # a scale for each weight takes registers
        block_k=block_k,
        unit="mma",
        scale_at="weight",
        warps=8 if block_m * block_k > 64 * 128 or block_k > 128 else 4,
        stages=3,
    )


def _gemv(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """Codes in rows; each weight is scaled where sums would mix scales, or hold values beyond the range of x's type."""
    chosen = _lanes(problem, layout, arch) if problem.m[1] == 1 else _mma(problem, layout)
    mixed = spans(layout.narrowest, rewrite.padded_group(problem, layout), words_summed(chosen, layout)) is None
    if mixed or (chosen.unit == "mma" and problem.format.minifloat is not None and not fits(problem.format, problem.x)):
        return replace(chosen, scale_at="weight", zero_at="weight")
    return chosen


def _dense(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """Dequantize the whole weight, then the vendor's matmul: any layout and format, and the choice for large M."""
    tall, wide = layout.block["n"], max(128, layout.block["k"])
    if layout.row_units() is None and tall * wide <= 4096 and not tall & (tall - 1) and not wide & (wide - 1):
        form, block_k = problem.format, wide
        heavy = isinstance(form.scale, Format) or (form.zero is not None and F32 in (form.scale, form.zero)) or block_k > 128
        scarce = form.nested and layout.size("k") > problem.k and "wgmma" not in arch.features  # masks take registers too
        blocks = 1 if scarce else 2 if heavy else 4
        block_n = tall * (16 if problem.n > 2**20 else blocks)
    else:
        block_n = max(4, 1 << (-(-problem.n // GRID) - 1).bit_length())  # a grid has no more programs along its second axis
        block_k = max(128, 2048 // block_n)
    return Schedule(template="dequant", block_n=block_n, block_k=block_k, unit="vendor", scale_at="weight", convert_at="global")


def _gemm(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """w decoded in registers as the left operand, k shared out until the programs fill the GPU.

    A step has one scale where a group holds a whole block of the layout; elsewhere the scale goes to the weight. Seen near the
    best of some six hundred settings on an H200 (five shapes, M = 16 … 128).
    """
    group, least = rewrite.padded_group(problem, layout), layout.block["k"]
    on_sums = group % least == 0 and (problem.format.minifloat is None or fits(problem.format, problem.x))
    if not on_sums and (least > 128 or problem.format.nested):
        return _dense(problem, layout, arch)  # 256 k scaled one by one, or all that nested scales are made of, do not fit
    block_k = least * (2 if least < 128 and group % (2 * least) == 0 else 1)
    block_m = min(64, max(16, 1 << (problem.m[1] - 1).bit_length()))
    wgmma = "wgmma" in arch.features
    wide = wgmma and on_sums and (block_m == 64 or (block_m == 32 and problem.n <= 4096))
    block_n, steps = 128 if wide else 64, -(-problem.k // block_k)
    if -(-problem.n // block_n) > GRID:
        return _dense(problem, layout, arch)
    programs = -(-problem.n // block_n) * -(-problem.m[1] // block_m)
    full = (7 if block_m <= 32 else 2) * arch.sms
    least_steps = {d: 3 if wide and programs * d <= arch.sms else 5 for d in range(2, 17)}  # that a program is worth
    shares = [d for d, each in least_steps.items() if steps % d == 0 and programs * d <= full and steps >= each * d]
    split = max(shares, default=1)
    placed = "accumulator" if on_sums else "weight"
    return Schedule(
        template="gemm",
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        split_k=split,
        unit="mma",
        side="left",
        scale_at=placed,
        zero_at=placed if problem.format.zero_after_scale else "weight",
        warps=8 if wide else 4,
        stages=3,
        vector=2 if wgmma else 4,
        overlap=int("gluon" in arch.features and "dependent_launch" in arch.features),
    )


def _lanes(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """One row of x: every thread multiplies whole quads of words. Seen best on an H200 over four shapes (docs/kernels.md).

    As many rows a program as leave enough programs, and two warps; four where rows are few and long. A codebook is looked up
    through the registers of one warp. An f16 x can carry the powers of two that make the shortest decoding; bf16 cannot. Codes in
    planes are put together of several words, whose registers more than two rows exceed (compiled for every arch, not timed).
    """
    n, k = problem.n, problem.k
    if problem.format.codebook is not None:
        warps, block_n = 1, 4 if n >= 8192 else 2
    else:
        warps = 4 if n < 8192 and k >= 8192 else 2
        block_n = 8 if n >= 8192 else 4 if n >= 4096 else 2 if n > 512 or problem.activation == PAIRED else 1
    block_n = min(block_n, 2) if layout.high is not None else block_n
    of_warp = arch.warp * QUAD * layout.narrowest.per_unit
    while warps > 1 and warps // 2 * of_warp >= k:
        warps //= 2
    block_k = warps * of_warp
    form = problem.format
    zero_at = "accumulator" if form.zero_after_scale or (form.zero is None and short(problem)) else "weight"
    return Schedule(template="gemv", block_n=block_n, block_k=block_k, warps=warps, zero_at=zero_at)


def _mma(problem: Problem, layout: Layout) -> Schedule:
    """2 to 16 rows: one k-step of the matrix instruction per code position, x on the left."""
    block_n = 128 if problem.n >= 16384 else 64 if problem.n >= 8192 else 32
    return Schedule(
        template="gemv",
        block_m=16,
        block_n=block_n,
        block_k=16 * layout.narrowest.per_unit,
        unit="mma",
        zero_at="accumulator" if problem.format.zero_after_scale else "weight",
        stages=3,
    )
