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

MANY = 8192
"""Outputs from which on a warp has pairs of blocks, or teams share x."""

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
    step, form = _step(problem, layout, arch), problem.format
    if "gluon" not in arch.features or step is None or problem.k % 8 or problem.far:
        return None
    in_steps = step.single and _plainly_scaled(form)
    exact = form.bits in (2, 4) if form.codebook is not None else fits(form, problem.x)
    if not exact or not (in_steps or _alone(form)) or _too_wide(problem, arch, step):
        return None
    if problem.m == (1, 1) and problem.x == F16 and form.bits <= 4 and form.affine and in_steps and not problem.epilogue:
        return _halves(problem, step.k, arch)
    return Tiled(problem, layout, arch, step).schedule()


def _step(problem: Problem, layout: Layout, arch: Arch) -> Step | None:
    """The longest step of 64 or 128 k that has one scale; where none has, of several. None where neither fits what is stored."""
    single, several = steps(layout, padded_group(problem, layout))
    # a longer step under several scales leaves few registers to more rows, to a loop over steps, and to pairs of blocks
    many, looked_up = problem.n >= MANY and "wgmma" in arch.features, problem.format.codebook is not None
    long = problem.m[1] > 16 or problem.k * problem.format.bits >= 2**16
    cut = not single and 64 in several and (many and problem.m[1] > 8 if looked_up else many or long)
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


def _too_wide(problem: Problem, arch: Arch, step: Step) -> bool:
    """Whether each program would read too much of x, also where teams share it: gemm reads it once for more outputs."""
    n, k, m = problem.n, problem.k, problem.m[1]
    long = "wgmma" not in arch.features and k > (4096 if step.k == 128 else 8192)  # no teams
    return m > 32 or (_plain(problem.format, step) and ((m > 8 and long) or (m > 16 and n * k > SMALL)))


@dataclass(frozen=True, slots=True)
class Tiled:
    """Few rows on matrix cores, by eights (`tiles`): what a program and a warp of it take, from the problem on.

    Registers bound it: wgmma's archs have them for more tiles; masks along k beside a look-up take some, as do several scales of
    a step. `timed` says what was, on an H200; the rest is bounded where it would spill.
    """

    problem: Problem
    layout: Layout
    arch: Arch
    step: Step

    @property
    def looked_up(self) -> bool:
        return self.problem.format.codebook is not None

    @property
    def ragged(self) -> bool:
        """Whether a look-up has masks along k beside it."""
        return self.looked_up and self.problem.k % self.step.k > 0

    @property
    def scarce(self) -> bool:
        """Whether registers are."""
        return "wgmma" not in self.arch.features

    @property
    def many(self) -> bool:
        """Whether there are outputs for pairs of blocks, or for teams."""
        return self.problem.n >= MANY and not self.ragged

    @property
    def tiles(self) -> int:
        step, form = self.step, self.problem.format
        narrow = self.ragged or (self.looked_up and self.crowded) or not (step.single or step.halved)
        tall = _plain(form, step) or (self.many if self.looked_up else step.cut)
        most = (32 if tall else 16) if not self.scarce else 8 if narrow else 16
        return -(-min(self.problem.m[1], most) // 8)

    @property
    def crowded(self) -> bool:
        """Whether look-ups for two tiles spill where registers are scarce: sooner in long steps, and for pairs of blocks."""
        n, k = self.problem.n, self.problem.k
        return k * max(self.step.k, 128 if n >= WIDE else 64) > 64 * LONG and (k < LOOPED or n >= WIDE)

    @property
    def teams(self) -> int:
        """Teams of warps that share the rows of x: one for each tile where outputs are left for every SM; 1 for none."""
        wide = self.many or (self.tiles == 2 and self.problem.k > 4096 and self.problem.n > 16 * self.arch.sms)
        shared = not self.scarce and self.tiles in ((2, 4) if self.looked_up else (2,))
        return self.tiles if wide and shared and self.layout.size("n") % (32 * self.tiles) == 0 else 1

    @property
    def rows(self) -> int:
        """Times 16 outputs of a warp: of two tiles as many words as 128 k of 16 outputs have, if programs are enough."""
        n, several = self.problem.n, 128 // self.step.k
        if self.teams > 1:
            return several if self.tiles == 2 and n >= 16 * several * self.teams * self.arch.sms else 1
        paired = n >= (WIDE if self.looked_up and self.tiles > 1 else MANY) and not (self.ragged and self.tiles > 1)
        return 2 if paired and self.layout.size("n") % 32 == 0 else 1

    @property
    def timed(self) -> bool:
        return not self.scarce and self.many and (self.tiles == 1 or self.teams > 1)

    @property
    def alone(self) -> bool:
        """Whether an SM has too few programs, so that each takes more warps."""
        least = 16 * self.rows * max(2, self.teams) * self.arch.sms
        return (self.looked_up and not self.timed) or self.problem.n < least

    @property
    def room(self) -> int:
        """Bytes of shared memory for rings of x, beside the table of a look-up."""
        return SHARED - (128 * 4**self.problem.format.bits if self.looked_up else 0)

    @property
    def warps(self) -> int:
        """Warps of a team, of which each has a ring of two pieces at least."""
        most = 8 if self.alone and self.problem.k >= 4096 else 4
        return next(each for each in (8, 4, 2, 1) if each <= most and 2 * each * self.tiles * 1024 <= self.room)

    @property
    def bound(self) -> int:
        """Registers of a thread, which would ask for words far ahead otherwise; 0 for no bound."""
        if self.timed:
            held = self.teams > 1 or not self.step.single or (self.looked_up and self.step.k == 64)
            return 128 if held and self.rows == 2 and not self.alone and self.problem.format.bits <= 4 else 0
        spills = self.ragged if self.tiles > 1 else self.scarce and self.problem.k > LONG  # under a bound
        if not self.looked_up or spills or (self.problem.n < WIDE and not (self.tiles > 1 and self.scarce)):
            return 0
        return 128 if self.tiles == 1 else 168

    def schedule(self) -> Schedule:
        return Schedule(
            template="gemv_mma",
            block_m=8 * self.tiles,
            block_n=16 * self.rows * self.teams,
            block_k=self.step.k,
            unit="mma",
            side="left",
            warps=self.warps,
            teams=self.teams,
            stages=2 if -(-self.problem.k // self.step.k) > 3 * self.warps else 3,
            ring=min(8, self.room // (self.warps * self.tiles * 1024)),
            maxnreg=self.bound,
            overlap=int("dependent_launch" in self.arch.features),
        )


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
