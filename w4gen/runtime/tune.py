"""Tuning: candidates timed on the GPU that is here, winners checked and kept as rows.

The search is `schedule.search`; this hands it times. A trial runs in a captured graph over cold copies of the weight, each into
an output of its own that was filled with NaN; a winner must match the reference and give the same bits each time.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from w4gen import ahead, cache, toolchain, tuned
from w4gen.ahead import Ask, Done
from w4gen.codegen.render import Kernel
from w4gen.errors import ScheduleError, ToolchainError
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.runtime.check import check, random_call
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import arch_of, launcher
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.schedule.arch import Arch
from w4gen.schedule.cost import bytes_moved
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.search import Found, search, shares
from w4gen.schedule.space import candidates, judged
from w4gen.toolchain import able
from w4gen.tuned import Row
from w4gen.version import __version__

log = logging.getLogger("w4gen")
Floor: TypeAlias = Callable[[int, torch.device, bool], float]
REPEATS = 40
A_TRIAL_S = 0.3
"""Seconds that a trial takes, to decide how many candidates are worth compiling."""

MOST = 64
"""Candidates of a question at most."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is tuned: a problem, the rows of x that it is timed with, how many layers ask it."""

    problem: Problem
    m: int
    count: int = 1

    def value(self, arch: Arch) -> float:
        """What its time is worth: predicted microseconds of all layers that ask it."""
        us = judged(lower(self.problem), pick(lower(self.problem), able(arch)), arch, self.m).us
        return self.count * us if us != float("inf") else 1.0


def tried(question: Question, arch: Arch, seconds: float) -> list[Schedule]:
    """The candidates of a question by id: the rules' choice first, then those predicted fastest."""
    program = lower(question.problem)
    legal = [each.schedule for each in candidates(program, able(arch), question.m) if not each.refused]
    first = pick(program, able(arch))
    return list(dict.fromkeys([first, *legal]))[: max(8, min(MOST, int(seconds / A_TRIAL_S)))]


def tune(
    questions: Sequence[Question],
    seconds: float,
    floor: Floor,
    again: bool = False,
    device: torch.device | None = None,
) -> Iterator[tuple[Question, Row | None, Found | None]]:
    """Tune question by question, each with its share of `seconds`; a row is kept as soon as it is found, so nothing done is lost.

    A question that has a row of this device and Triton is passed over, unless `again`. Out of memory leaves it to the rules.
    floor: microseconds of only reading some bytes, launched early or not.
    """
    device = device or torch.device("cuda", torch.cuda.current_device())
    arch = arch_of(device)
    left = [each for each in questions if again or not known(each.problem, arch)]
    yield from ((each, None, None) for each in questions if each not in left)
    parts = shares([each.value(arch) for each in left], seconds) if left else []
    asks = [
        [Ask(each.problem, arch, schedule) for schedule in tried(each, arch, part)]
        for each, part in zip(left, parts, strict=True)
    ]
    stream = ahead.compiled(ask for each in asks for ask in each)
    finished: dict[Ask, Done] = {}
    try:
        for question, own, part in zip(left, asks, parts, strict=True):
            found = searched(question, own, part, device, lambda ask: ready(ask, stream, finished))
            row = kept(question, own, found, arch, floor, device) if found and found.winner is not None else None
            yield question, row, found
    finally:
        stream.close()  # type: ignore[attr-defined]


def known(problem: Problem, arch: Arch) -> bool:
    """Whether a row of this very device answers, timed with this Triton."""
    row = tuned.tuned(problem, arch)
    return row is not None and row.device == arch.device and row.triton == toolchain.version()


def ready(ask: Ask, stream: Iterator[Done], finished: dict[Ask, Done]) -> Done:
    """What became of an ask, once it is compiled; others go on meanwhile."""
    while ask not in finished:
        done = next(stream)
        finished[done.ask] = done
    return finished[ask]


def searched(
    question: Question, asks: list[Ask], seconds: float, device: torch.device, compiled: Callable[[Ask], Done]
) -> Found | None:
    """The search over the candidates of one question; None where memory ran out, which leaves it to the rules."""

    def timed(each: int) -> float:
        done = compiled(asks[each])
        if done.error:
            raise ToolchainError(f"it does not compile: {done.error}")
        return trial(asks[each].kernel(), question.m, device)

    try:
        found = search(range(len(asks)), timed, lambda each: right(asks[each].kernel()), seconds, time.perf_counter)
    except torch.cuda.OutOfMemoryError as error:
        log.warning("%s is left to the rules: %s", question.problem, str(error).splitlines()[0])
        torch.cuda.empty_cache()
        return None
    for each, why in found.skipped:
        log.info("%s: %s is skipped: %s", question.problem, asks[each].schedule, why)
    return found


def trial(kernel: Kernel, m: int, device: torch.device) -> float:
    """Microseconds of a call with m rows. Raises `ScheduleError` where the GPU refuses it or an output is not written whole."""
    from triton.errors import TritonError

    torch.manual_seed(0)
    x, w, bias = random_call(kernel, m, kernel.problem.n, device)
    copies = [w.clone() for _ in range(copies_for(w.nbytes, device))]
    outputs = [
        torch.full((m, kernel.problem.outputs), torch.nan, dtype=torch_dtype(kernel.problem.y), device=device) for _ in copies
    ]
    try:
        launch = launcher(kernel, device)
        calls = [
            lambda y=y, each=each: launch(y, x, *each.buffers, bias, m)  # type: ignore[misc]
            for y, each in zip(outputs, copies, strict=True)
        ]
        taken = time_calls(calls).us
    except TritonError as error:
        raise ScheduleError(f"the GPU refuses it: {error}") from error
    if outputs[0].isnan().any() or not all(torch.equal(y, outputs[0]) for y in outputs):
        raise ScheduleError("outputs of equal weights differ, or were not written whole")
    return taken


def right(kernel: Kernel) -> bool:
    """Whether a kernel matches the reference at both ends of its bucket, and repeats bit for bit."""
    return check(kernel, REPEATS, timed=False).passed


def kept(question: Question, asks: list[Ask], found: Found, arch: Arch, floor: Floor, device: torch.device) -> Row:
    """The row of a winner, written."""
    ask = asks[found.winner or 0]
    kernel = ask.kernel()
    nbytes = sum(size for name, size in bytes_moved(kernel.program, 1).items() if name in kernel.program.kept)
    row = Row(
        question=tuned.question(question.problem),
        schedule=kernel.schedule,
        device=arch.device,
        sms=arch.device_sms,
        us=round(found.us, 3),
        floor_us=round(floor(nbytes, device, bool(kernel.schedule.overlap)), 3),
        trials=found.trials,
        date=datetime.date.today().isoformat(),
        triton=toolchain.version(),
        w4gen=__version__,
        text=cache.address(kernel.source),
    )
    tuned.save(arch.name, [row])
    return row
