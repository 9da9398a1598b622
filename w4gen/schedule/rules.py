"""What is chosen, and why: buckets of M, stored layouts, schedules. Nothing here times anything."""

from __future__ import annotations

import math
from dataclasses import replace

from w4gen.errors import ScheduleError
from w4gen.ir.decode import Decode, decode, decode_for_x
from w4gen.ir.layout import PLANES, QUAD, Digit, Layout, planes, rows, spans
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.tile import Space
from w4gen.ir.types import F16, F32, DType, Format
from w4gen.schedule import rewrite
from w4gen.schedule.arch import Arch, Fragment
from w4gen.schedule.cost import operations
from w4gen.schedule.schedule import Schedule

BUCKETS = ((1, 1), (2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 2**20))
"""Ranges of M that share one kernel."""

PADDING = 0.05
"""The share of padding above which a weight is not stored in the order of a matrix instruction."""

WASTE = 0.02
"""The share of bytes above the fewest possible up to which a layout is taken for its order."""


def bucket(m: int) -> tuple[int, int]:
    """The range of M that `m` falls in; (m, m) above the last bucket."""
    return next((each for each in BUCKETS if each[0] <= m <= each[1]), (m, m))


def layout_for(format: Format, arch: Arch, n: int, k: int) -> Layout:
    """The stored order of the codes, one for every bucket of M: the fewest bytes, then the fewest operations to decode a code.

    The order of the arch's matrix instruction, where the arch has one. Else, and where its blocks would pad the weight too much,
    rows in which 16 consecutive k share a code position of 16 consecutive words: x is then read in contiguous pieces and every
    code lies under one scale. Fewer where 16 would pad a row too much.
    """
    if arch.fragment is not None and 32 % format.bits == 0:
        order = fragment_order(format, arch.fragment, n, k)
        if order.size("n") * order.size("k") <= (1 + PADDING) * n * k:
            return order
    candidates = layouts_for(format, n, k)
    fewest = min(each.length for each in candidates)
    return min(
        (each for each in candidates if each.length <= (1 + WASTE) * fewest),
        key=lambda each: (operations(each, decoded(format, F32, each)), -each.run),
    )


def layouts_for(format: Format, n: int, k: int) -> list[Layout]:
    """The layouts that kernels read: rows of words, and of codes that do not fill a word, rows of their planes."""
    ways = (rows, planes) if format.bits in PLANES else (rows,)
    return [way(n, k, format.bits, run) for way in ways for run in (16, 8, 4, 1)]


def decoded(format: Format, dtype: DType, layout: Layout, in_place: bool = True) -> Decode:
    """The word operations for codes as `layout` holds them: those of planes are put together first, alone in their word."""
    return decode(format, dtype, 1 if layout.high else layout.per_unit, in_place)


def fragment_order(format: Format, fragment: Fragment, n: int, k: int) -> Layout:
    """Codes as a matrix instruction takes them: what a lane holds of a few fragments along k are 16 bytes, a quad of words.

    The codes of a pair of neighbouring k sit half a word apart, so that one mask takes both; those of a codebook next to each
    other, so that one look-up takes both. Half a word (of a codebook: a word) holds the registers of the instruction and
    fragments further along k; what it has no room for goes to the words of the quad. Raises `ScheduleError` for codes that do
    not fill words.
    """
    bits, looked_up = format.bits, format.codebook is not None
    if 32 % bits:
        raise ScheduleError(f"{format.label}: {bits}-bit codes do not fill 32-bit words in the order of fragments: take rows")
    digits = fragment.digits
    (pair,) = fragment.at("pair")
    inside = sorted(fragment.at("register"), key=lambda index: digits[index][0] != "n")
    further = [("k", 2, "register")] * int(math.log2(QUAD * 32 / bits / math.prod(digits[i][1] for i in (pair, *inside))))
    places: dict[int, int] = {pair: bits if looked_up else 16}
    stride = 2 * bits if looked_up else bits
    for index, (_, size, _) in [(i, digits[i]) for i in inside] + list(enumerate(further, len(digits))):
        stride = 32 if stride == 16 and not looked_up else stride
        places[index], stride = stride, stride * size
    for index in fragment.at("lane"):
        places[index], stride = stride, stride * digits[index][1]
    listed = [Digit(axis, size, places[index]) for index, (axis, size, _) in enumerate([*digits, *further])]
    held = {axis: math.prod(digit.size for digit in listed if digit.axis == axis) for axis in ("n", "k")}
    blocks = {axis: -(-size // held[axis]) for axis, size in (("n", n), ("k", k))}
    listed += [Digit("k", blocks["k"], stride), Digit("n", blocks["n"], stride * blocks["k"])]
    return Layout(tuple(sorted(listed, key=lambda digit: digit.axis != "n")), bits)


def pick(program: Program, arch: Arch) -> Schedule:
    """The schedule that the rules give."""
    problem = program.problem
    layout = problem.layout or layout_for(problem.format, arch, problem.n, problem.k)
    low, high = problem.m
    if low > FUSED or (arch.fragment is None and low > 1) or not _readable(layout, problem.format, arch):
        return _dense(problem, layout)
    if layout.narrowest.row_units() is None:
        return _fast(problem, layout, arch) or _gemm(problem, layout, arch)
    if high > 16:
        return _dense(problem, layout)
    chosen = _lanes(problem, layout, arch) if high == 1 else _mma(problem, layout)
    mixed = spans(layout.narrowest, rewrite.padded_group(problem, layout), _words(chosen, layout)) is None
    # unscaled values beyond the range of x's type
    if mixed or (chosen.unit == "mma" and problem.format.minifloat is not None and not _fits(problem.format, problem.x)):
        return replace(chosen, scale_at="weight", zero_at="weight")
    return chosen


def _readable(layout: Layout, format: Format, arch: Arch) -> bool:
    """Whether a template that multiplies reads a layout: rows, or blocks in the very order of the arch's fragments."""
    if layout.row_units() is not None:
        return True
    sizes = layout.size("n"), layout.size("k")
    return arch.fragment is not None and layout == fragment_order(format, arch.fragment, *sizes)


FUSED = 128
"""The largest M for which decoding inside the multiplication is predicted faster than dequantizing first."""


def _dense(problem: Problem, layout: Layout) -> Schedule:
    """Dequantize the whole weight, then the vendor's matmul: any layout and format, and the choice for large M."""
    if layout.row_units() is None:
        tall = 16 if problem.n > 2**20 else 2 if isinstance(problem.format.scale, Format) else 4
        block_n, block_k = tall * layout.block["n"], max(128, layout.block["k"])
    else:
        block_n, block_k = 4 if problem.n <= 4 * 65535 else 64, 512  # a grid has no more programs along its second axis
    return Schedule(template="dequant", block_n=block_n, block_k=block_k, unit="vendor", scale_at="weight", convert_at="global")


def _fast(problem: Problem, layout: Layout, arch: Arch) -> Schedule | None:
    """A template for few rows in Gluon, where one holds: None for formats, shapes and archs that none is made for.

    x is copied 16 bytes at a time; codes are decoded in x's type, in pairs, and a step of 64 k or more has one scale.
    """
    form, group, looked_up = problem.format, rewrite.padded_group(problem, layout), problem.format.codebook is not None
    of_machine = all(isinstance(kind, DType) and not kind.small for kind in (form.scale, form.zero or F16)) and not form.flat
    block_k = next((size for size in (128, 64) if group % size == 0 and size % layout.block["k"] == 0), 0)
    exact = of_machine and (form.bits in (2, 4) if looked_up else form.affine and form.bits <= problem.x.mantissa)
    if "gluon" not in arch.features or not exact or form.zero_mode not in (None, "integer") or not block_k or problem.k % 8:
        return None
    n, k, m = problem.n, problem.k, problem.m[1]
    plain = not looked_up and form.zero is None  # what gemm decodes as fast
    if m > 32 or (plain and ((m > 8 and k > (4096 if block_k == 128 else 8192)) or (m > 16 and n * k > 2**22))):
        return None  # each program would read too much of x: gemm reads it once for more outputs
    if problem.m == (1, 1) and problem.x == F16 and form.bits <= 4 and not looked_up:
        return _halves(problem, block_k, arch)
    tiles, steps = -(-min(m, 32 if plain else 16) // 8), -(-k // block_k)
    rows = 2 if layout.size("n") % 32 == 0 and n >= (16384 if looked_up and tiles > 1 else 8192) else 1
    room = SHARED - (128 * 4**form.bits if looked_up else 0)
    warps = 8 if (looked_up or n < 16 * rows * 2 * arch.sms) and k >= 4096 else 4
    warps = next(each for each in (8, 4, 2, 1) if each <= warps and 2 * each * tiles * 1024 <= room)
    return Schedule(
        template="gemv_mma",
        block_m=8 * tiles,
        block_n=16 * rows,
        block_k=block_k,
        unit="mma",
        side="left",
        warps=warps,
        stages=2 if steps > 3 * warps else 3,
        ring=min(8, room // (warps * tiles * 1024)),
        maxnreg=0 if not looked_up or n < 16384 else 128 if tiles == 1 else 168,  # look-ups are asked for far ahead otherwise
        overlap=int("dependent_launch" in arch.features),
    )


SHARED = 48 * 1024
"""Bytes of shared memory that a program may declare in its text; what Triton allocates comes on top."""


def _halves(problem: Problem, block_k: int, arch: Arch) -> Schedule:
    """One row of f16 x: chains of halves on lanes. Seen near the best on an H200 over ten shapes.

    Large layers: eight warps a program. Long or small ones: programs of a cluster share k until a warp has few steps.
    """
    n, steps = problem.n, -(-problem.k // block_k)
    warps, split = 8, 1
    if n < 8192:
        warps = 8 if 16 < steps <= 64 else 4
        split = min(7, -(-steps // (warps * (1 if steps <= 16 else 2))))
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
        stages=turns if turns <= 3 else 4 if turns > 8 and problem.format.zero is None else 2,
        overlap=int("dependent_launch" in arch.features),
    )


def _gemm(problem: Problem, layout: Layout, arch: Arch) -> Schedule:
    """w decoded in registers as the left operand, k shared out until the programs fill the GPU.

    A step has one scale where a group holds a whole block of the layout; elsewhere the scale goes to the weight. Seen near the
    best of some six hundred settings on an H200 (five shapes, M = 16 … 128).
    """
    group, least = rewrite.padded_group(problem, layout), layout.block["k"]
    on_sums = group % least == 0 and (problem.format.minifloat is None or _fits(problem.format, problem.x))
    if least > 128 and not on_sums:
        return _dense(problem, layout)  # 256 k of single bits, each scaled by itself, do not fit the registers
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
    of_warp = arch.warp * QUAD * layout.narrowest.per_unit
    while warps > 1 and warps // 2 * of_warp >= k:
        warps //= 2
    block_k = warps * of_warp
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
        block_k=16 * layout.narrowest.per_unit,
        unit="mma",
        zero_at="accumulator" if problem.format.zero_after_scale else "weight",
        stages=3,
    )


def _short(problem: Problem) -> bool:
    """Whether x can carry the power of two that makes the shortest decoding on lanes."""
    return problem.x == F16 and problem.format.codebook is None and 2.0**-16 <= problem.format.step <= 2.0**16


def _fits(form: Format, x: DType) -> bool:
    """Whether decoding gives the values in the type of x, exactly (or, of a codebook, rounded)."""
    if form.minifloat is not None:
        return form.minifloat.fits(x)
    return not form.affine or form.bits <= x.mantissa


def _words(schedule: Schedule, layout: Layout) -> int:
    """Neighbouring words whose products are summed before the scale."""
    return QUAD if schedule.unit == "lanes" else schedule.block_k // layout.narrowest.per_unit


def apply(program: Program, schedule: Schedule, arch: Arch) -> Program:
    """The logical program with every choice of the schedule made concrete: slice, pad, map, convert.

    Raises `ScheduleError` where a choice is not legal for the problem.
    """
    problem = program.problem
    layout = problem.layout or layout_for(problem.format, arch, problem.n, problem.k)
    if layout.size("n") < problem.n or layout.size("k") < problem.k or layout.width != problem.format.bits:
        raise ScheduleError(f"layout {layout} does not hold {problem.format.label} codes [{problem.n}, {problem.k}]: pack again")
    if any(plane.unit != 32 for plane in layout.planes):
        raise ScheduleError(f"layout {layout} has codes across words, as checkpoints do: pack it as layout_for says")
    _agree(problem, schedule)
    lanes, on_sums = schedule.unit == "lanes", schedule.scale_at == "accumulator"
    how = _decode(problem, schedule, layout)
    program = rewrite.convert(rewrite.pack(program, layout), how, F32 if lanes else problem.x)
    if schedule.unit == "vendor":
        return rewrite.tile(rewrite.dequantize(program), "k", schedule.block_k, schedule.block_n)
    steps = layout.narrowest
    if steps.row_units() is None:
        return _in_blocks(program, schedule, layout, how)
    if schedule.side == "left":
        raise ScheduleError(f"layout {layout} is one of rows: w as the left operand is read in the order of its fragments")
    granule = steps.per_unit * (QUAD if lanes else 1)
    if schedule.block_k % granule:
        raise ScheduleError(f"block_k={schedule.block_k} is not a multiple of {granule}, the codes that a load brings: use one")
    group = rewrite.padded_group(problem, layout)
    pieces = spans(steps, group, _words(schedule, layout)) if on_sums else 1
    if pieces is None:
        raise ScheduleError(
            f"scale_at=accumulator needs each sum under one scale; group {group} and block_k={schedule.block_k} mix scales: "
            "take scale_at=weight, or a block_k that divides the group"
        )
    program = rewrite.split(program, layout, pieces)
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
    per_unit = 1 if layout.high else layout.per_unit
    if form.zero_after_scale:
        if schedule.zero_at != schedule.scale_at:
            raise ScheduleError(
                f"scale_at={schedule.scale_at} with zero_at={schedule.zero_at}: the zero of {form.label} is subtracted after "
                "scaling, so take both alike"
            )
        if lanes and on_sums and _short(problem):
            return decode_for_x(form, per_unit)
    elif schedule.zero_at == "accumulator":
        if form.zero is not None:
            raise ScheduleError(f"zero_at=accumulator: {form.label} has q - z formed on the weight, exactly: take zero_at=weight")
        if not (lanes and on_sums and problem.x == F16):
            raise ScheduleError("zero_at=accumulator needs unit=lanes, scale_at=accumulator and x in f16: take zero_at=weight")
        return decode_for_x(form, per_unit)
    if schedule.template in FAST and on_sums:
        return decode(form, problem.x, 16 // form.bits if form.affine else layout.per_unit)
    # decoded in f32 and rounded once: a weight that is scaled, or has a fraction, before it is multiplied, and wide codes
    wide = not on_sums or form.zero_mode == "float" or not _fits(form, problem.x)
    in_place = schedule.unit != "vendor" and schedule.side == "right"
    return decoded(form, F32 if lanes or wide else problem.x, layout, in_place)
