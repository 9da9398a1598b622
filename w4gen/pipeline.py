"""The whole story of a compile. Read this first."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from w4gen import cache, knobs, tuned
from w4gen.codegen.render import Kernel, render
from w4gen.errors import ScheduleError, TemplateError
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.program import Program
from w4gen.ir.show import show
from w4gen.ir.verify import verify
from w4gen.schedule.apply import FAST, apply
from w4gen.schedule.arch import ARCHES, Arch
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.toolchain import able, version


def compile(problem: Problem, arch: Arch) -> Kernel:
    """The kernel that answers `problem` on `arch`: its text, stored under its own hash. No GPU is needed.

    Raises `W4Error` where there is none; every child says what was asked, the limit, and the way out.
    """
    start = time.perf_counter()
    program = lower(problem)
    kernel = winner(program, arch) or made(program, pick(program, able(arch)), arch)
    _tell(kernel, time.perf_counter() - start)
    return cache.store(kernel)


def made(program: Program, schedule: Schedule, arch: Arch, templates: Path | None = None) -> Kernel:
    """The kernel of a logical program under one schedule, rendered from w4gen's templates or from a folder of your own.

    Raises `ScheduleError` or `TemplateError` where it is not legal.
    """
    scheduled = verify(apply(program, schedule, arch), arch, schedule.warps * schedule.teams, schedule.ring)
    return render(scheduled, schedule, arch.name, templates)


def twin(kernel: Kernel) -> Kernel:
    """The portable kernel that stands in for a fast one and reads the same layout; of a portable kernel, itself."""
    if kernel.schedule.template not in FAST and not kernel.schedule.overlap:
        return kernel
    layout = kernel.program.tile("codes.stored").layout
    program, arch = lower(replace(kernel.problem, layout=layout)), replace(ARCHES["sm_80"], features=frozenset())
    return made(program, pick(program, arch), arch)


def winner(program: Program, arch: Arch) -> Kernel | None:
    """A stored winner, where one is there and still holds; one of a fast template only with the Triton that it was timed with."""
    row = tuned.tuned(program.problem, arch)
    if row is None:
        return None
    if row.schedule.template in FAST and ("gluon" not in able(arch).features or row.triton not in ("", version())):
        return None
    try:
        return made(program, row.schedule, arch)
    except (ScheduleError, TemplateError) as error:
        cache.log.warning("the tuned schedule of %s does not hold any more (%s): the rules answer", program.problem, error)
        return None


def _tell(kernel: Kernel, seconds: float) -> None:
    """W4GEN_DEBUG: 1 the choice, 2 times, 3 the program, 4 the kernel."""
    level = knobs.DEBUG.number()
    lines = [f"w4gen {kernel.problem}: {kernel.schedule}", f"w4gen rendered in {seconds * 1e3:.1f} ms"]
    lines += [show(kernel.program), kernel.source]
    for line in lines[:level]:
        print(line, file=sys.stderr)
