"""What is chosen, and why: buckets of M, schedules. Nothing here times anything."""

from __future__ import annotations

from dataclasses import replace

from w4gen.errors import ScheduleError
from w4gen.ir.decode import Decode, decode, decode_as_subnormal
from w4gen.ir.layout import QUAD, Layout
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Space
from w4gen.ir.types import F16, F32
from w4gen.schedule import rewrite
from w4gen.schedule.arch import Arch
from w4gen.schedule.order import layout_for, readable
from w4gen.schedule.schedule import Schedule

BUCKETS = ((1, 1), (2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 2**20))
"""Ranges of M that share one kernel."""


def bucket(m: int) -> tuple[int, int]:
    """The range of M that `m` falls in; (m, m) above the last bucket."""
    return next((each for each in BUCKETS if each[0] <= m <= each[1]), (m, m))


def pick(program: Program, arch: Arch) -> Schedule:
    """The schedule that the rules give."""
    problem = program.problem
    layout = problem.layout or layout_for(problem.format, arch, problem.n, problem.k)
    low, high = problem.m
    if low > FUSED or (arch.fragment is None and low > 1) or not readable(layout, problem.format, arch):
        return _dense(problem)
    if layout.row_units() is None:
        return _fast(problem, layout, arch) or _gemm(problem, layout, arch)
    if high > 16:
        return _dense(problem)
    chosen = _lanes(problem, layout, arch) if high == 1 else _mma(problem, layout)
    if rewrite.spans(layout, rewrite.padded_group(problem, layout), _words(chosen, layout)) is None:
        return replace(chosen, scale_at="weight", zero_at="weight")
    return chosen


FUSED = 128
"""The largest M for which decoding inside the multiplication is predicted faster than dequantizing first."""


def _dense(problem: Problem) -> Schedule:
    """Dequantize the whole weight, then the vendor's matmul: any layout and format, and the choice for large M."""
    block_n = 4 if problem.n <= 4 * 65535 else 64  # a grid has no more programs along its second axis
    return Schedule(template="dequant", block_n=block_n, block_k=512, unit="vendor", scale_at="weight", convert_at="global")


def _fast(problem: Problem, layout: Layout, arch: Arch) -> Schedule | None:
    """A template for few rows in Gluon, where one holds: None for formats, shapes and archs that none is made for.

    x is copied 16 bytes at a time; codes are decoded in x's type, in pairs, and a step of 64 k or more has one scale.
    """
    form, group = problem.format, rewrite.padded_group(problem, layout)
    block_k = next((size for size in (128, 64) if group % size == 0 and size % layout.block["k"] == 0), 0)
    exact = form.codebook is None and form.zero is None and form.bits <= problem.x.mantissa
    if "gluon" not in arch.features or not exact or not block_k or problem.k % 8 or problem.m[1] > 32:
        return None
    if (problem.m[1] > 8 and problem.k > 4096) or (problem.m[1] > 16 and problem.n * problem.k > 2**22):
        return None  # each program would read too much of x: gemm reads it once for more outputs
    n, steps = problem.n, -(-problem.k // block_k)
    if problem.m == (1, 1) and problem.x == F16 and form.bits <= 4:
        return _halves(problem, block_k, arch)
    rows = 2 if layout.size("n") % 32 == 0 and n >= 8192 else 1
    warps = 8 if n < 16 * rows * 2 * arch.sms and problem.k >= 4096 else 4
    tiles = -(-problem.m[1] // 8)
    room = (48 * 1024 - rows * tiles * warps * 512) // (
        warps * tiles * 1024
    )  # pieces of x beside the sums, in static shared memory
    return Schedule(
        template="gemv_mma",
        block_m=8 * tiles,
        block_n=16 * rows,
        block_k=block_k,
        unit="mma",
        side="left",
        warps=warps,
        stages=2 if steps > 3 * warps else 3,
        ring=max(2, min(8, room)),
        overlap=int("dependent_launch" in arch.features),
    )


def _halves(problem: Problem, block_k: int, arch: Arch) -> Schedule:
    """One row of f16 x: chains of halves on lanes. Seen near the best on an H200 over ten shapes.

    Large layers: eight warps a program. Long or small ones: programs of a cluster share k until a warp has few steps.
    """
    n, steps = problem.n, -(-problem.k // block_k)
    few = 1 if steps <= 16 else 2 if steps <= 32 else 3 if steps <= 80 else 4
    warps, split = 8, 1
    if n < 8192:
        warps = 8 if 16 < steps <= 64 else 4
        split = min(8, -(-steps // (warps * few)))
    elif steps > 128:
        warps, split = 4, min(8, -(-steps // 32))
    elif n >= 16384:
        warps = 4
    split = split if "cluster" in arch.features else 1
    turns = -(-steps // (warps * split))
    return Schedule(
        template="gemv_half",
        block_n=16,
        block_k=block_k,
        unit="halves",
        warps=warps,
        split_k=split,
        sum_at="shared" if split > 1 else "global",
        stages=turns if turns <= 3 else 4 if turns > 8 else 2,
        overlap=int("dependent_launch" in arch.features),
    )


def _gemm(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """w decoded in registers as the left operand, k shared out until the programs fill the GPU.

    A step has one scale where a group holds a whole block of the layout; elsewhere the scale goes to the weight. Seen near the
    best of some six hundred settings on an H200 (five shapes, M = 16 … 128).
    """
    group, least = rewrite.padded_group(problem, layout), layout.block["k"]
    on_sums = group % least == 0
    if least > 128 and not on_sums:
        return _dense(problem)  # 256 k of single bits, each scaled by itself, do not fit the registers
    block_k = least * (2 if least < 128 and group % (2 * least) == 0 else 1)
    block_m = min(64, max(16, 1 << (problem.m[1] - 1).bit_length()))
    wgmma = "wgmma" in arch.features
    wide = wgmma and on_sums and (block_m == 64 or (block_m == 32 and problem.n <= 4096))
    block_n, steps = 128 if wide else 64, -(-problem.k // block_k)
    programs = -(-problem.n // block_n) * -(-problem.m[1] // block_m)
    full = (7 if block_m <= 32 else 2) * arch.sms
    split = max(d for d in range(1, 17) if d == 1 or (steps % d == 0 and programs * d <= full and steps >= 5 * d))
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
    through the registers of one warp. An f16 x can carry the powers of two that make the shortest decoding; bf16 cannot.
    """
    n, k = problem.n, problem.k
    if problem.format.codebook is not None:
        warps, block_n = 1, 4 if n >= 8192 else 2
    else:
        warps = 4 if n < 8192 and k >= 8192 else 2
        block_n = 8 if n >= 8192 else 4 if n >= 4096 else 2 if n > 512 else 1
    block_k = warps * arch.warp * QUAD * layout.per_unit
    form = problem.format
    zero_at = "accumulator" if form.zero_after_scale or (form.zero is None and _short(problem)) else "weight"
    return Schedule(template="gemv", block_n=block_n, block_k=block_k, warps=warps, zero_at=zero_at)


def _mma(problem: Problem, layout: Layout) -> Schedule:
    """2 to 16 rows: one k-step of the matrix instruction per code position, x on the left."""
    block_n = 128 if problem.n >= 16384 else 64 if problem.n >= 8192 else 32
    return Schedule(
        template="gemv",
        block_m=16,
        block_n=block_n,
        block_k=16 * layout.per_unit,
        unit="mma",
        zero_at="accumulator" if problem.format.zero_after_scale else "weight",
        stages=3,
    )


def _short(problem: Problem) -> bool:
    """Whether codes can be read as subnormals on lanes."""
    return problem.x == F16 and problem.format.codebook is None and problem.format.step == 1


def _words(schedule: Schedule, layout: Layout) -> int:
    """Neighbouring words whose products are summed before the scale."""
    return QUAD if schedule.unit == "lanes" else schedule.block_k // layout.per_unit


def apply(program: Program, schedule: Schedule, arch: Arch) -> Program:
    """The logical program with every choice of the schedule made concrete: slice, pad, map, convert.

    Raises `ScheduleError` where a choice is not legal for the problem.
    """
    problem = program.problem
    layout = problem.layout or layout_for(problem.format, arch, problem.n, problem.k)
    if layout.size("n") < problem.n or layout.size("k") < problem.k or layout.bits != problem.format.bits:
        raise ScheduleError(f"layout {layout} does not hold {problem.format.label} codes [{problem.n}, {problem.k}]: pack again")
    _agree(problem, schedule)
    lanes, on_sums = schedule.unit == "lanes", schedule.scale_at == "accumulator"
    how = _decode(problem, schedule, layout)
    program = rewrite.convert(rewrite.pack(program, layout), how, F32 if lanes else problem.x)
    if schedule.unit == "vendor":
        return rewrite.tile(rewrite.dequantize(program), "k", schedule.block_k, schedule.block_n)
    if layout.row_units() is None:
        return _in_blocks(program, schedule, layout, how)
    if schedule.side == "left":
        raise ScheduleError(f"layout {layout} is one of rows: w as the left operand is read in the order of its fragments")
    granule = layout.per_unit * (QUAD if lanes else 1)
    if schedule.block_k % granule:
        raise ScheduleError(f"block_k={schedule.block_k} is not a multiple of {granule}, the codes that a load brings: use one")
    group = rewrite.padded_group(problem, layout)
    spans = rewrite.spans(layout, group, _words(schedule, layout)) if on_sums else 1
    if spans is None:
        raise ScheduleError(
            f"scale_at=accumulator needs each sum under one scale; group {group} and block_k={schedule.block_k} mix scales: "
            "take scale_at=weight, or a block_k that divides the group"
        )
    program = rewrite.split(program, layout, spans)
    program = rewrite.fold(program, QUAD) if lanes else program
    inside = ("quad" if lanes else "word", "code")
    program = rewrite.place_scale(program, schedule.unit, schedule.side, schedule.scale_at, how.left_out, inside)
    walked, size = "lane" if lanes else "word", schedule.block_k // granule
    return rewrite.tile(program, walked, size, schedule.block_n, schedule.block_m, schedule.split_k)


def _in_blocks(program: Program, schedule: Schedule, layout: Layout, how: Decode) -> Program:
    """The rest of `apply` for codes in blocks of several rows: a step is whole blocks, under one scale if that is on the sums."""
    block, group = layout.block, rewrite.padded_group(program.problem, layout)
    for axis, size in (("n", schedule.block_n), ("k", schedule.block_k)):
        if size % block[axis]:
            raise ScheduleError(
                f"block_{axis}={size} is not a multiple of {block[axis]}, what a block of the layout holds: use one"
            )
    if schedule.scale_at == "accumulator" and group % schedule.block_k:
        raise ScheduleError(
            f"scale_at=accumulator needs each sum under one scale; block_k={schedule.block_k} does not divide group {group}: "
            "take scale_at=weight, or a block_k that divides the group"
        )
    steps, split = -(-layout.size("k") // schedule.block_k), schedule.split_k
    if split > steps or (schedule.sum_at == "global" and steps % split):
        raise ScheduleError(
            f"split_k={split} with {steps} steps along k: each program needs one, and programs whose sums meet in global memory "
            "need as many each: take a divisor"
        )
    program = rewrite.place_scale(program, schedule.unit, schedule.side, schedule.scale_at, how.left_out, ("k",))
    meet = Space(schedule.sum_at)
    return rewrite.tile(program, "k", schedule.block_k, schedule.block_n, schedule.block_m, schedule.split_k, meet)


FAST = ("gemv_mma", "gemv_half")
"""Templates in Gluon, which decode the pairs of a word where they stand. They run on GPUs only; gemm is their portable twin."""


def _agree(problem: Problem, schedule: Schedule) -> None:
    """Refuse choices that contradict each other or the number of rows."""
    unit, rows = schedule.unit, problem.m[1]
    refusals = (
        (unit in ("lanes", "halves") and rows > 1, f"unit={unit} multiplies one row of x, not {rows}: take unit=mma or vendor"),
        (
            unit == "mma" and rows == 1 and schedule.side == "right",
            "unit=mma multiplies several rows of x, not one: take unit=lanes or vendor",
        ),
        (unit != "mma" and schedule.side == "left", f"side=left with unit={unit}: only a matrix instruction has sides"),
        (
            schedule.split_k > 1 and unit != ("halves" if schedule.sum_at == "shared" else "mma"),
            f"split_k={schedule.split_k} with unit={unit} and sum_at={schedule.sum_at}: mma programs share k through global "
            "memory, halves through the shared memory of a cluster",
        ),
        (
            schedule.convert_at != ("global" if unit == "vendor" else "register"),
            f"convert_at={schedule.convert_at} with unit={unit}: weights are decoded to registers, to global memory for vendor",
        ),
    )
    for contradicts, why in refusals:
        if contradicts:
            raise ScheduleError(why)


def _decode(problem: Problem, schedule: Schedule, layout: Layout) -> Decode:
    """The word operations that the schedule's choices allow."""
    lanes, on_sums, form = schedule.unit == "lanes", schedule.scale_at == "accumulator", problem.format
    if form.zero_after_scale:
        if schedule.zero_at != schedule.scale_at:
            raise ScheduleError(
                f"scale_at={schedule.scale_at} with zero_at={schedule.zero_at}: the zero of {form.label} is subtracted after "
                "scaling, so take both alike"
            )
        if lanes and on_sums and _short(problem):
            return decode_as_subnormal(form, layout.per_unit)
    elif schedule.zero_at == "accumulator":
        if form.zero is not None:
            raise ScheduleError(f"zero_at=accumulator: {form.label} has q - z formed on the weight, exactly: take zero_at=weight")
        if not (lanes and on_sums and problem.x == F16):
            raise ScheduleError("zero_at=accumulator needs unit=lanes, scale_at=accumulator and x in f16: take zero_at=weight")
        return decode_as_subnormal(form, layout.per_unit)
    if schedule.template in FAST and schedule.scale_at == "accumulator":
        return decode(form, problem.x, 16 // form.bits)
    # decoded in f32 and rounded once: a weight that is scaled, or has a fraction, before it is multiplied, and wide codes
    wide = not on_sums or form.zero_mode == "float" or (form.codebook is None and form.bits > problem.x.mantissa)
    in_place = schedule.unit != "vendor" and schedule.side == "right"
    return decode(form, F32 if lanes or wide else problem.x, layout.per_unit, in_place)
