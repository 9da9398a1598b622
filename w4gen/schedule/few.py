"""Few rows of x, in the templates in Gluon that decode in x's type, in pairs. Nothing here times anything."""

from __future__ import annotations

from dataclasses import dataclass

from w4gen.ir.layout import Layout
from w4gen.ir.problem import Problem
from w4gen.ir.types import F16, DType, Format
from w4gen.schedule.apply import fits
from w4gen.schedule.arch import Arch
from w4gen.schedule.rewrite import padded_group
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import steps

SHARED = 48 * 1024
"""Bytes of shared memory that a program may declare in its text; what Triton allocates comes on top."""

LONG, LOOPED = 8192, 26 * 1024
"""The k along which look-ups, one after another, leave registers for one tile alone; and from which on their steps are a loop."""

WIDE = 16384
"""Outputs from which on a program that looks up has pairs of blocks for two tiles too."""

SMALL = 2**22
"""Weights of a layer at most, where each program of 16 outputs may read all of 32 rows of x."""


@dataclass(frozen=True, slots=True)
class Step:
    """How much k is taken at a time: under one scale or several, less than would go (cut), and whether steps of 64 k would do."""

    k: int
    single: bool
    cut: bool
    halved: bool


def few(problem: Problem, layout: Layout, arch: Arch) -> Schedule | None:
    """A template for few rows: None for formats, shapes and archs that none is made for.

    x is copied 16 bytes at a time, and offsets have 32 bits.
    """
    step, form = _step(problem, layout), problem.format
    if "gluon" not in arch.features or step is None or problem.k % 8 or problem.far:
        return None
    in_steps = step.single and _plainly_scaled(form)
    exact = form.bits in (2, 4) if form.codebook is not None else fits(form, problem.x)
    if not exact or not (in_steps or _alone(form)) or _too_wide(problem, step):
        return None
    if problem.m == (1, 1) and problem.x == F16 and form.bits <= 4 and form.affine and in_steps and not problem.epilogue:
        return _halves(problem, step.k, arch)
    return _on_matrix_cores(problem, layout, arch, step)


def _step(problem: Problem, layout: Layout) -> Step | None:
    """The longest step of 64 or 128 k that has one scale; where none has, of several. None where neither fits what is stored."""
    single, several = steps(layout, padded_group(problem, layout))
    # a longer step under several scales leaves few registers
    cut = not single and 64 in several and (problem.format.codebook is None or problem.m[1] > 8)
    sizes = [64] if cut else single or several
    return Step(sizes[0], bool(single), cut, 64 in several) if sizes else None


def _plainly_scaled(form: Format) -> bool:
    """Whether the sums of a step are scaled by one number of 16 or 32 bits, and zeros are whole, if there are any."""
    plain = isinstance(form.scale, DType) and not form.scale.small and not form.flat
    return plain and form.zero_mode in (None, "integer") and not isinstance(form.zero, Format)


def _alone(form: Format) -> bool:
    """Whether there is nothing but scales, none of them looked up."""
    return form.zero is None and all(isinstance(kind, DType) or kind.codebook is None for kind in _tree(form))


def _tree(form: Format) -> list[DType | Format]:
    """The types of a format's scales, of the scales of these, and so on."""
    if form.scale is None:
        return []
    return [form.scale, *(_tree(form.scale) if isinstance(form.scale, Format) else [])]


def _plain(form: Format, step: Step) -> bool:
    """What gemm is as fast for; others it scales weight by weight."""
    return form.codebook is None and form.zero is None and step.single


def _too_wide(problem: Problem, step: Step) -> bool:
    """Whether each program would read too much of x: others read it once for more outputs."""
    return problem.m[1] > 32 or (_plain(problem.format, step) and problem.m[1] > 16 and problem.n * problem.k > SMALL)


def _on_matrix_cores(problem: Problem, layout: Layout, arch: Arch, step: Step) -> Schedule:
    """Few rows by eights. More warps where there are few outputs; where there are many, teams share the rows of x.

    Without teams a warp has pairs of blocks of outputs then; with teams as many words, which are one of 128 k or two of 64.
    """
    n, k, form, looked_up = problem.n, problem.k, problem.format, problem.format.codebook is not None
    ragged = looked_up and k % step.k > 0
    # registers: wgmma's archs have them for more tiles; masks along k beside a look-up take some, as do several scales of a step
    scarce = "wgmma" not in arch.features
    narrow = scarce and (ragged or (looked_up and _crowded(n, k, step)) or not (step.single or step.halved))
    many = n >= 8192 and not ragged
    tall = _plain(form, step) or (many if looked_up else step.cut)
    most = 32 if not scarce and tall else 8 if narrow else 16
    tiles, turns = -(-min(problem.m[1], most) // 8), -(-k // step.k)
    teams, rows = 1 if scarce else _teams(problem, layout, arch, tiles, many), 1
    if teams > 1:
        several = 128 // step.k
        rows = several if tiles == 2 and n >= 16 * several * teams * arch.sms else 1
    elif n >= (WIDE if looked_up and tiles > 1 else 8192) and not (ragged and tiles > 1) and layout.size("n") % 32 == 0:
        rows = 2
    fast = not scarce and many and (tiles == 1 or teams > 1)  # timed: others are bound by registers alone
    crowd = (looked_up and not fast) or n < 16 * rows * max(2, teams) * arch.sms
    room = SHARED - (128 * 4**form.bits if looked_up else 0)
    wanted = 8 if crowd and k >= 4096 else 4
    warps = next(each for each in (8, 4, 2, 1) if each <= wanted and 2 * each * tiles * 1024 <= room)
    if fast:
        bound = 128 if rows == 2 and not crowd and (teams > 1 or looked_up or not step.single) else 0
    else:
        free = not looked_up or (ragged if tiles > 1 else scarce and k > LONG)  # of a bound, which makes these spill
        bound = 0 if free else _bound(n, tiles, scarce)
    return Schedule(
        template="gemv_mma",
        block_m=8 * tiles,
        block_n=16 * rows * teams,
        block_k=step.k,
        unit="mma",
        side="left",
        warps=warps,
        teams=teams,
        stages=2 if turns > 3 * warps else 3,
        ring=min(8, room // (warps * tiles * 1024)),
        maxnreg=bound,
        overlap=int("dependent_launch" in arch.features),
    )


def _teams(problem: Problem, layout: Layout, arch: Arch, tiles: int, many: bool) -> int:
    """Teams that share the rows of x: as many as there are eights of rows, where programs are left for every SM."""
    wide = many or (tiles == 2 and problem.k > 4096 and problem.n > 16 * arch.sms)
    shared = tiles in ((2, 4) if problem.format.codebook is not None else (2,))
    return tiles if wide and shared and layout.size("n") % (32 * tiles) == 0 else 1


def _crowded(n: int, k: int, step: Step) -> bool:
    """Whether look-ups for two tiles spill where registers are scarce: sooner in long steps, and for pairs of blocks."""
    return k * max(step.k, 128 if n >= WIDE else 64) > 64 * LONG and (k < LOOPED or n >= WIDE)


def _bound(n: int, tiles: int, scarce: bool) -> int:
    """Registers of a thread that looks up, which it would ask for far ahead otherwise; 0 for no bound."""
    if n < WIDE and not (tiles > 1 and scarce):
        return 0
    return 128 if tiles == 1 else 168


def _halves(problem: Problem, block_k: int, arch: Arch) -> Schedule:
    """One row of f16 x: chains of halves on lanes. Seen near the best on an H200 over ten shapes.

    Large layers: eight warps a program. Long or small ones: programs of a cluster share k until a warp has few steps; of few
    outputs they have two warps, so that more SMs have a program.
    """
    n, whole, clusters = problem.n, -(-problem.k // block_k), "cluster" in arch.features
    warps, split = 8, 1
    if n < 8192:
        warps = 2 if n <= 1024 and whole > 16 and clusters else 8 if 16 < whole <= 64 else 4
        split = min(8 if warps == 2 else 7, -(-whole // (warps * (1 if whole <= 16 else 2))))
    elif whole > 128:
        warps, split = 4, min(8, -(-whole // 32))
    elif n >= 16384:
        warps = 4
    split = split if clusters else 1
    turns = -(-whole // (warps * split))
    ahead = 4 if turns > 8 and problem.format.zero is None else 2
    return Schedule(
        template="gemv_half",
        block_n=16,
        block_k=block_k,
        unit="halves",
        warps=warps,
        split_k=split,
        sum_at="shared" if split > 1 else "global",
        stages=turns if turns <= 3 else ahead,
        overlap=int("dependent_launch" in arch.features),
    )
