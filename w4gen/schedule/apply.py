"""Applying a schedule: the rewrites in turn, after what contradicts itself is refused."""

from __future__ import annotations

from w4gen.errors import ScheduleError
from w4gen.ir.decode import Decode, decode_for_x, decode_pairs
from w4gen.ir.groups import spans
from w4gen.ir.layout import QUAD, Layout
from w4gen.ir.problem import EVERY, Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Space
from w4gen.ir.types import F16, F32, DType, Format
from w4gen.schedule import rewrite, scales
from w4gen.schedule.arch import M16K16, Arch
from w4gen.schedule.hoist import hoist
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import decoded, layout_of


def apply(program: Program, schedule: Schedule, arch: Arch) -> Program:
    """The logical program with every choice of the schedule made concrete: slice, pad, map, convert.

    Raises `ScheduleError` where a choice is not legal for the problem.
    """
    problem, layout = program.problem, layout_of(program.problem, arch)
    _holds(problem, layout)
    _agree(problem, schedule)
    how = _decode(problem, schedule, layout)
    program = rewrite.convert(rewrite.pack(program, layout), how, F32 if schedule.unit == "lanes" else problem.x)
    if schedule.unit == "vendor":
        return rewrite.tile(rewrite.dequantize(program), "k", schedule.block_k, schedule.block_n)
    if problem.gradient:
        return _gradient(program, schedule, layout)
    in_order = _in_blocks if layout.narrowest.row_units() is None else _in_rows
    return in_order(program, schedule, layout, how)


def _holds(problem: Problem, layout: Layout) -> None:
    """Refuse a layout that does not hold the problem's codes, in words of 32 bits."""
    if layout.size("n") < problem.n or layout.size("k") < problem.k or layout.width != problem.format.bits:
        raise ScheduleError(f"layout {layout} does not hold {problem.format.label} codes [{problem.n}, {problem.k}]: pack again")
    if any(plane.unit != 32 for plane in layout.planes):
        raise ScheduleError(f"layout {layout} has codes across words, as checkpoints do: pack it as layout_for says")


def _in_rows(program: Program, schedule: Schedule, layout: Layout, how: Decode) -> Program:
    """The rest of `apply` for codes in rows of words: a step is whole words, on lanes whole quads of them for each thread."""
    lanes, steps = schedule.unit == "lanes", layout.narrowest
    if schedule.side == "left":
        raise ScheduleError(f"layout {layout} is one of rows: w as the left operand is read in the order of its fragments")
    granule = steps.per_unit * (QUAD if lanes else 1)
    if lanes and (steps.row_units() or 0) % QUAD:
        raise ScheduleError(
            f"unit=lanes loads {QUAD} words at a time; rows of layout {layout} have {steps.row_units()}: take unit=vendor"
        )
    if schedule.block_k % granule:
        raise ScheduleError(f"block_k={schedule.block_k} is not a multiple of {granule}, the codes that a load brings: use one")
    group = rewrite.padded_group(program.problem, layout)
    pieces = spans(steps, group, words_summed(schedule, layout)) if schedule.scale_at == "accumulator" else 1
    if pieces is None:
        raise ScheduleError(
            f"scale_at=accumulator needs each sum under one scale; group {group} and block_k={schedule.block_k} mix scales: "
            "take scale_at=weight, or a block_k that divides the group"
        )
    program = rewrite.split(program, layout, pieces)
    program = rewrite.fold(program, QUAD) if lanes else program
    inside = ("quad" if lanes else "word", "code")
    program = scales.place_scale(program, schedule.unit, schedule.side, schedule.scale_at, how.left_out, inside)
    walked, size = "lane" if lanes else "word", schedule.block_k // granule
    return rewrite.tile(program, walked, size, schedule.block_n, schedule.block_m, schedule.split_k)


def _gradient(program: Program, schedule: Schedule, layout: Layout) -> Program:
    """The rest of `apply` for dX = dY W: a step is rows of the weight, whose blocks along k are spread over the grid."""
    if layout.narrowest.row_units() is None:
        _whole_blocks(schedule, layout)
    program = scales.place_scale(program, schedule.unit, schedule.side, schedule.scale_at, 0.0, ("n",))
    if rewrite.padded_group(program.problem, layout) % schedule.block_k == 0:
        program = scales.share(program)
    places = Space(schedule.sum_at), Space(schedule.x_at), Space(schedule.w_at)
    return rewrite.tile(program, "n", schedule.block_n, schedule.block_k, schedule.block_m, at=places, across="k")


def _in_blocks(program: Program, schedule: Schedule, layout: Layout, how: Decode) -> Program:
    """The rest of `apply` for codes in blocks of several rows: a step is whole blocks, under one scale if that is on the sums.

    gemv_mma takes several groups in a step, if each is whole fragments: the program then has a step for each.
    """
    group = rewrite.padded_group(program.problem, layout)
    several = schedule.template == "gemv_mma" and schedule.block_k % group == 0 and group % M16K16.size("k") == 0
    size_k = group if several else schedule.block_k
    _whole_blocks(schedule, layout)
    if schedule.scale_at == "accumulator" and group % size_k:
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
    program = scales.place_scale(program, schedule.unit, schedule.side, schedule.scale_at, how.left_out, ("k",))
    places = Space(schedule.sum_at), Space(schedule.x_at), Space(schedule.w_at)
    program = rewrite.tile(program, "k", size_k, schedule.block_n, schedule.block_m, schedule.split_k, places)
    return hoist(program) if schedule.template == "gemv_mma" else program


def _whole_blocks(schedule: Schedule, layout: Layout) -> None:
    """Refuse tiles that end inside a stored block."""
    for axis, size in (("n", schedule.block_n), ("k", schedule.block_k)):
        if size % layout.block[axis]:
            raise ScheduleError(
                f"block_{axis}={size} is not a multiple of {layout.block[axis]}, what a block of the layout holds: use one"
            )


FAST = {"gemv_mma": "accumulator", "gemv_half": "accumulator", "gemm_wgmma": "weight", "dgrad_wgmma": "weight"}
"""Templates in Gluon, which decode the pairs of a word where they stand, and what each scales.

They run on GPUs only; gemm is their portable twin, and dgrad that of dgrad_wgmma.
"""


def _agree(problem: Problem, schedule: Schedule) -> None:
    """Refuse choices that contradict each other or the number of rows."""
    unit, (low, rows) = schedule.unit, problem.m
    scaled = (unit, schedule.scale_at, schedule.split_k) == ("mma", "weight", 1)
    refusals = (
        (
            problem.gradient and not scaled,
            "a gradient sums over rows of scaled weights: take unit=mma, scale_at=weight, split_k=1",
        ),
        (unit in ("lanes", "halves") and rows > 1, f"unit={unit} multiplies one row of x, not {low}…{rows}: take unit=mma"),
        (unit == "vendor" and problem.m == EVERY, "unit=vendor adds up in an order that depends on M: for every M take unit=mma"),
        (unit == "vendor" and schedule.scale_at != "weight", "unit=vendor multiplies scaled weights: take scale_at=weight"),
        (
            unit == "mma" and rows == 1 and schedule.side == "right" and not problem.gradient,
            "unit=mma multiplies several rows of x, not one: take unit=lanes or vendor",
        ),
        (
            schedule.x_at == "shared" and schedule.side != "left",
            f"x_at=shared with side={schedule.side}: x waits in shared memory where w is the left operand",
        ),
        (
            (schedule.w_at == "shared") != (schedule.template == "gemm_wgmma"),
            f"w_at={schedule.w_at}: words wait in shared memory for gemm_wgmma, and for no other template",
        ),
        (unit != "mma" and schedule.side == "left", f"side=left with unit={unit}: only a matrix instruction has sides"),
        (
            schedule.split_k > 1 and unit != ("halves" if schedule.sum_at == "shared" else "mma"),
            f"split_k={schedule.split_k} with unit={unit} and sum_at={schedule.sum_at}: mma programs share k through global "
            "memory, halves through the shared memory of a cluster",
        ),
        (
            FAST.get(schedule.template, schedule.scale_at) != schedule.scale_at,
            f"scale_at={schedule.scale_at}: {schedule.template} scales the other",
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
    per_unit = 1 if layout.high else layout.per_unit
    if form.zero_after_scale:
        if schedule.zero_at != schedule.scale_at:
            raise ScheduleError(
                f"scale_at={schedule.scale_at} with zero_at={schedule.zero_at}: the zero of {form.label} is subtracted after "
                "scaling, so take both alike"
            )
        if lanes and on_sums and short(problem):
            return decode_for_x(form, per_unit)
    elif schedule.zero_at == "accumulator":
        if form.zero is not None:
            raise ScheduleError(f"zero_at=accumulator: {form.label} has q - z formed on the weight, exactly: take zero_at=weight")
        if not (lanes and on_sums and problem.x == F16):
            raise ScheduleError("zero_at=accumulator needs unit=lanes, scale_at=accumulator and x in f16: take zero_at=weight")
        return decode_for_x(form, per_unit)
    if schedule.template in FAST:
        return decode_pairs(form, problem.x, layout.per_unit)
    # decoded in f32 and rounded once: a weight that is scaled, or has a fraction, before it is multiplied, and wide codes
    in_blocks = layout.narrowest.row_units() is None
    scaled = not on_sums and not (problem.gradient and in_blocks and rounded_once(form, problem.x))
    wide = scaled or form.zero_mode == "float" or not fits(form, problem.x)
    in_place = schedule.unit != "vendor" and schedule.side == "right" and not problem.gradient
    return decoded(form, F32 if lanes or wide else problem.x, layout, in_place)


def short(problem: Problem) -> bool:
    """Whether x can carry the power of two that makes the shortest decoding on lanes."""
    return problem.x == F16 and problem.format.codebook is None and 2.0**-16 <= problem.format.step <= 2.0**16


def fits(form: Format, x: DType) -> bool:
    """Whether decoding gives the values in the type of x, exactly (or, of a codebook, rounded)."""
    if form.minifloat is not None:
        return form.minifloat.fits(x)
    return not form.affine or form.bits <= x.mantissa


def rounded_once(form: Format, x: DType) -> bool:
    """Whether a weight that is worked out in the type of x is rounded only as it is scaled: all before that is exact."""
    whole = form.whole and form.zero_mode in (None, "integer")
    return form.scale == x and (whole or (form.minifloat is not None and form.zero is None))


def words_summed(schedule: Schedule, layout: Layout) -> int:
    """Neighbouring words whose products are summed before the scale."""
    return QUAD if schedule.unit == "lanes" else schedule.block_k // layout.narrowest.per_unit
