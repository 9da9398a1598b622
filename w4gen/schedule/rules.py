"""What is chosen, and why: buckets of M, stored layouts, schedules. Nothing here times anything."""

from __future__ import annotations

from dataclasses import replace

from w4gen.errors import ScheduleError
from w4gen.ir.decode import Decode, decode, decode_as_subnormal
from w4gen.ir.layout import QUAD, Digit, Layout, rows
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.types import F16, F32, Format
from w4gen.schedule import rewrite
from w4gen.schedule.arch import Arch, Fragment
from w4gen.schedule.schedule import Schedule

BUCKETS = ((1, 1), (2, 16), (17, 32), (33, 64), (65, 128), (129, 2**31 - 1))
"""Ranges of M that share one kernel."""

WASTE = 0.05
"""The share of padding in a row above which a layout with a smaller granule is taken."""


def bucket(m: int) -> tuple[int, int]:
    """The range of M that `m` falls in; (m, m) outside all of them."""
    return next((each for each in BUCKETS if each[0] <= m <= each[1]), (m, m))


def layout_for(format: Format, arch: Arch, n: int, k: int) -> Layout:
    """The stored order of the codes, one for every bucket of M.

    Rows in which 16 consecutive k, one k-step of a matrix instruction, share a code position of 16 consecutive words: x is then
    read in contiguous pieces and every code lies under one scale. Fewer where 16 would pad a row too much.
    """
    candidates = [rows(n, k, format.bits, run) for run in (16, 8, 4, 1)]
    return next((each for each in candidates if each.size("k") - k <= WASTE * k), candidates[-1])


def fragment_order(format: Format, fragment: Fragment, n: int, k: int) -> Layout:
    """Fragments of 4-bit codes, stored as lanes read them: a word is one lane's part of a fragment; four along k are 16 bytes.

    Inside a word the two codes of a pair sit half a word apart, so that one mask takes both. Raises `ScheduleError` for codes
    of other widths.
    """
    if format.bits != 4:
        raise ScheduleError(f"{format.label}: fragments hold eight 4-bit codes a word, not {format.bits}-bit ones: take rows")
    places: dict[int, int] = {}
    stride = format.bits
    for index in sorted(fragment.at("register"), key=lambda i: fragment.digits[i][0] != "n") + fragment.at("pair"):
        places[index], stride = stride, stride * fragment.digits[index][1]
    vector, stride = stride, stride * 4
    for index in fragment.at("lane"):
        places[index], stride = stride, stride * fragment.digits[index][1]
    digits = [Digit(axis, size, places[index]) for index, (axis, size, _) in enumerate(fragment.digits)]
    tall, wide = 16, 16 * 4
    blocks = {"n": -(-n // tall), "k": -(-k // wide)}
    digits += [Digit("k", 4, vector), Digit("k", blocks["k"], stride), Digit("n", blocks["n"], stride * blocks["k"])]
    return Layout(tuple(sorted(digits, key=lambda digit: digit.axis != "n")), format.bits)


def pick(program: Program, arch: Arch) -> Schedule:
    """The schedule that the rules give."""
    problem = program.problem
    layout = problem.layout or layout_for(problem.format, arch, problem.n, problem.k)
    (low, high), words = problem.m, layout.row_units()
    if words is None or (high == 1 and words % QUAD) or (arch.fragment is None and low > 1) or low > FUSED:
        return _dense(problem)
    if low > 1 and _gemm_reads(problem, layout):
        return _gemm(problem, arch)
    if high > 16:
        return _dense(problem)
    return _gemv(problem, layout, arch, lanes=high == 1)


def ways(program: Program, arch: Arch) -> tuple[Schedule, ...]:
    """What `pick` chooses among: a schedule for each way through a template, whether it is legal for the problem or not."""
    problem = program.problem
    layout = problem.layout or layout_for(problem.format, arch, problem.n, problem.k)
    gemvs = (_gemv(problem, layout, arch, lanes) for lanes in (True, False) if layout.row_units() is not None)
    return (*gemvs, _gemm(problem, arch), _dense(problem))


FUSED = 128
"""The largest M for which decoding inside the multiplication is predicted faster than dequantizing first."""


def _dense(problem: Problem) -> Schedule:
    """Dequantize the whole weight, then the vendor's matmul: any layout and format, and the choice for large M."""
    block_n = max(4, 1 << (-(-problem.n // 65535) - 1).bit_length())  # a grid has no more programs along its second axis
    block_k = 2048 // block_n
    return Schedule(template="dequant", block_n=block_n, block_k=block_k, unit="vendor", scale_at="weight", convert_at="global")


def _gemm_reads(problem: Problem, layout: Layout) -> bool:
    """Whether the gemm template can read a layout: affine codes in pairs, whole k-steps of 16, one scale for each."""
    group = rewrite.padded_group(problem, layout)
    return (
        problem.format.codebook is None
        and problem.format.zero is None
        and layout.run == 16
        and layout.natural
        and problem.format.bits <= problem.x.mantissa
        and group % 16 == 0
    )


def _gemm(problem: Problem, arch: Arch) -> Schedule:
    """More than one row: w decoded in registers as the left operand, k shared out until the programs fill the GPU.

    Seen near the best of some hundred settings on an H200 (five shapes, M = 16 … 128). Larger tiles only where wgmma takes
    them, the layer is large, and a step has one scale; elsewhere they spill. So do many rows of x with the long steps of narrow
    codes.
    """
    n, block_k = problem.n, 16 * 32 // problem.format.bits
    one_scale = (problem.format.groups(problem.k) == 1) or problem.format.group % block_k == 0
    large = "wgmma" in arch.features and n * problem.k > 2**26 and one_scale and block_k <= 256
    block_m = min((128 if large else 64) * 128 // max(128, block_k), max(16, 1 << (problem.m[1] - 1).bit_length()))
    wide = large and block_m >= 64
    columns, steps = -(-n // (128 if wide else 64)), -(-problem.k // block_k)
    room = (4 if block_m <= 32 else 2) * arch.sms
    split = max(d for d in range(1, 17) if steps % d == 0 and (d == 1 or (columns * d <= room and steps >= 2 * d)))
    if block_m == 16 and columns > 2 * arch.sms and steps % 4 == 0:
        split = 4
    chosen = Schedule(template="gemm", block_m=block_m, block_n=64, block_k=block_k, split_k=split, unit="mma", side="left")
    chosen = replace(chosen, stages=3 if one_scale or block_k > 128 else 2, vector=2 if "wgmma" in arch.features else 4)
    if not wide:
        return chosen
    if block_m == 128 or block_k > 128:
        return replace(chosen, block_n=128, warps=8)
    return replace(chosen, block_n=128, warps=8, maxnreg=128, stages=3 if split > 1 else 2)


def _gemv(problem: Problem, layout: Layout, arch: Arch, lanes: bool) -> Schedule:
    """Up to 16 rows; each weight is scaled where sums would mix scales."""
    chosen = _lanes(problem, layout, arch) if lanes else _mma(problem, layout)
    if rewrite.spans(layout, rewrite.padded_group(problem, layout), _words(chosen, layout)) is None:
        return replace(chosen, scale_at="weight", zero_at="weight")
    return chosen


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
        return rewrite.tile(rewrite.dequantize(program), schedule.block_n, k=schedule.block_k)
    words = layout.row_units()
    if words is None:
        raise ScheduleError(f"layout {layout} interleaves or reorders rows: only the dequant schedule (unit=vendor) reads it")
    if lanes and words % QUAD:
        raise ScheduleError(f"unit=lanes loads {QUAD} words at a time; rows of layout {layout} have {words}: take unit=vendor")
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
    program = rewrite.place_scale(program, schedule.unit, schedule.side, schedule.scale_at, how.left_out)
    along = {"lane" if lanes else "word": schedule.block_k // granule}
    return rewrite.tile(program, schedule.block_n, schedule.block_m, schedule.split_k, **along)


def _agree(problem: Problem, schedule: Schedule) -> None:
    """Refuse choices that contradict each other or the number of rows."""
    unit, (low, rows) = schedule.unit, problem.m
    refusals = (
        (unit == "lanes" and rows > 1, f"unit=lanes multiplies one row of x, not {low}…{rows}: take unit=mma or vendor"),
        (unit == "vendor" and schedule.scale_at != "weight", "unit=vendor multiplies scaled weights: take scale_at=weight"),
        (unit == "mma" and rows == 1, "unit=mma multiplies several rows of x, not one: take unit=lanes or vendor"),
        (unit != "mma" and schedule.side == "left", f"side=left with unit={unit}: only a matrix instruction has sides"),
        (unit != "mma" and schedule.split_k > 1, f"split_k={schedule.split_k} with unit={unit}: only mma programs share k"),
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
    # decoded in f32 and rounded once: a weight that is scaled, or has a fraction, before it is multiplied, and wide codes
    wide = not on_sums or form.zero_mode == "float" or (form.codebook is None and form.bits > problem.x.mantissa)
    in_place = schedule.unit != "vendor" and schedule.side == "right"
    return decode(form, F32 if lanes or wide else problem.x, layout.per_unit, in_place)
