"""Tuning: candidates timed on the GPU that is here, winners checked and kept as rows.

The search is `schedule.search`; this hands it times. A trial runs in a captured graph over cold copies of the weight, each into
an output of its own that was filled with NaN; a winner must match the reference and give the same bits each time. The rules'
choice is the first candidate of each question, and a row states it unless another is faster by more than `search.TIE`.

What a trial costs is not the launches: so candidates are ranked and compiled by other processes, copies of a weight serve every
trial and every bucket, and a graph, once captured, is replayed when its time is taken again.
"""

from __future__ import annotations

import datetime
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

import torch

from w4gen import ahead, cache, faults, toolchain, tuned
from w4gen.ahead import Ask, Done, Ranking
from w4gen.codegen.render import Kernel
from w4gen.errors import ScheduleError, ToolchainError
from w4gen.ir.layout import Layout
from w4gen.ir.problem import Problem
from w4gen.ir.types import Format
from w4gen.runtime.check import check, random_call, random_weight
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import arch_of, launcher
from w4gen.runtime.timer import captured, copies_for
from w4gen.runtime.weight import Weight
from w4gen.schedule.arch import Arch
from w4gen.schedule.cost import bytes_moved
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.search import Found, search, shares
from w4gen.tuned import Row
from w4gen.version import __version__

log = logging.getLogger("w4gen")
Floor: TypeAlias = Callable[[int, torch.device, bool], float]
Timer: TypeAlias = Callable[[], float]
Follow: TypeAlias = "Callable[[At], None]"
REPEATS = 40
A_TRIAL_S, A_COMPILE_S = 0.1, 1.0
"""Seconds of a trial, and of a compile on one core, to decide how many candidates are worth them."""

LEAST, MOST = 4, 64
"""Candidates of a question."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is tuned: a problem, the rows of x that it is timed with, how many layers ask it."""

    problem: Problem
    m: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class At:
    """Where tuning is: at a question, and while the GPU has a candidate of it, at that one."""

    question: Question
    id: int = -1
    ask: Ask | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A question with its candidates by id, the microseconds that a model predicts for each, and what its time is worth."""

    question: Question
    asks: tuple[Ask, ...]
    predicted: tuple[float, ...]

    @property
    def value(self) -> float:
        """Predicted microseconds of all layers that ask the question."""
        return self.question.count * self.predicted[0] if self.predicted[0] != float("inf") else 1.0

    @property
    def weight(self) -> tuple[Format, int, int]:
        """What buckets of one layer have in common: their trials share copies of the weight."""
        problem = self.question.problem
        return problem.format, problem.n, problem.k

    def cut(self, seconds: float) -> Plan:
        """The plan with as many candidates as can be compiled and timed in its share of the seconds."""
        most = max(LEAST, int(seconds / max(A_TRIAL_S, A_COMPILE_S / ahead.cores())))
        return Plan(self.question, self.asks[:most], self.predicted[:most])


def planned(questions: Sequence[Question], arch: Arch, seconds: float) -> list[Plan]:
    """A plan for each question, the candidates ranked in other processes and cut to what its share of the seconds allows.

    Weights whose time is worth most come first, so that what the seconds do not reach matters least.
    """
    rankings = {Ranking(each.problem, arch, each.m, MOST): each for each in questions}
    ranked: dict[Ranking, Sequence[tuple[str, float]]] = {}
    for done in ahead.compiled(rankings):
        ranked[done.ask] = done.ranked
        if done.error:
            log.warning("%s is left to the rules: %s", done.ask.problem, done.error)
    plans = [
        Plan(
            question,
            tuple(Ask(question.problem, arch, Schedule.parse(schedule)) for schedule, _ in ranked[ranking]),
            tuple(us for _, us in ranked[ranking]),
        )
        for ranking, question in rankings.items()
        if ranked[ranking]
    ]
    worth: dict[object, float] = defaultdict(float)
    for plan in plans:
        worth[plan.weight] += plan.value
    plans.sort(key=lambda plan: worth[plan.weight], reverse=True)
    parts = shares([plan.value for plan in plans], seconds)
    return [plan.cut(part) for plan, part in zip(plans, parts, strict=True)]


def tune(
    questions: Sequence[Question],
    seconds: float,
    floor: Floor,
    again: bool = False,
    device: torch.device | None = None,
    at: Follow = lambda at: None,
) -> Iterator[tuple[Question, Row | None, Found | None]]:
    """Tune question by question, each with its share of `seconds`; a row is kept as soon as it is found, so nothing done is lost.

    A question that has a row of this device and Triton is passed over, unless `again`. Out of memory leaves it to the rules. It
    ends when the seconds do, after one question at least: what is left is for the next time.
    floor: microseconds of only reading some bytes, launched early or not · at: told where it is, as a kernel may end the process.
    """
    start, device = time.perf_counter(), device or torch.device("cuda", torch.cuda.current_device())
    arch = arch_of(device)
    fresh = {tuned.question(each.problem): each for each in reversed(questions) if again or not known(each.problem, arch)}
    plans = planned([each for each in questions if each in fresh.values()], arch, seconds)
    left = [plan.question for plan in plans]
    yield from ((each, None, None) for each in questions if each not in left)
    over: set[Problem] = set()
    asks, workers = [ask for plan in plans for ask in plan.asks], max(1, ahead.cores() - 1)  # a core is for the timing
    stream = ahead.compiled(asks, workers, lambda ask: ask.problem not in over)
    finished: dict[Ask, Done] = {}
    try:
        for turn, plan in enumerate(plans):
            rest = seconds - (time.perf_counter() - start)
            if turn and rest <= 0:
                break
            part = shares([each.value for each in plans[turn:]], max(rest, 0.0))[0]
            row, found = answered(plan, part, device, floor, lambda ask: ready(ask, stream, finished), at)
            over.add(plan.question.problem)
            yield plan.question, row, found
    finally:
        stream.close()  # type: ignore[attr-defined]
        cold.cache_clear()


def known(problem: Problem, arch: Arch) -> bool:
    """Whether a row of this very device answers, timed with this Triton."""
    row = tuned.tuned(problem, arch)
    return row is not None and (row.device, row.triton) == (arch.device, toolchain.version())


def ready(ask: Ask, stream: Iterator[Done], finished: dict[Ask, Done]) -> Done:
    """What became of an ask, once it is compiled; others go on meanwhile."""
    while ask not in finished:
        done = next(stream)
        finished[done.ask] = done
    return finished[ask]


def answered(
    plan: Plan, seconds: float, device: torch.device, floor: Floor, compiled: Callable[[Ask], Done], at: Follow
) -> tuple[Row | None, Found | None]:
    """The row of a question, written, and what its search came to; neither where memory ran out, which leaves it to the rules."""
    try:
        found = searched(plan, seconds, device, floor, compiled, at)
        row = None if found.winner is None else kept(plan.asks[found.winner], found, floor, device, text(plan.asks[0]).schedule)
    except torch.cuda.OutOfMemoryError as error:
        log.warning("%s is left to the rules: %s", plan.question.problem, str(error).splitlines()[0])
        cold.cache_clear()
        torch.cuda.empty_cache()
        return None, None
    for each, why in found.skipped:
        log.info("%s: %s is skipped: %s", plan.question.problem, plan.asks[each].schedule, why)
    return row, found


def searched(
    plan: Plan, seconds: float, device: torch.device, floor: Floor, compiled: Callable[[Ask], Done], at: Follow
) -> Found:
    """The search over the candidates of one question."""
    timers: dict[int, Timer] = {}

    def timed(each: int) -> float:
        at(At(plan.question))
        kernel = launchable(plan.asks[each], compiled)
        at(At(plan.question, each, plan.asks[each]))
        if each not in timers:
            timers[each] = trial(kernel, plan.question.m, device)
        return timers[each]()

    def accepted(each: int) -> bool:
        at(At(plan.question, each, plan.asks[each]))
        verdict = right(text(plan.asks[each]), device)
        at(At(plan.question))
        return verdict

    at(At(plan.question))
    compiled(plan.asks[0])  # the others are compiled while the floor is measured
    early = {bool(ask.schedule and ask.schedule.overlap) for ask in plan.asks}
    least = min(bound(text(plan.asks[0]), floor, device, each) for each in early)
    return search(range(len(plan.asks)), timed, accepted, seconds, time.perf_counter, plan.predicted, least)


def launchable(ask: Ask, compiled: Callable[[Ask], Done]) -> Kernel:
    """The kernel of an ask, once it is compiled. Raises `ToolchainError` where it does not compile, or ended a process before."""
    done, kernel = compiled(ask), text(ask)
    if done.error:
        raise ToolchainError(f"it does not compile: {done.error}")
    if fault := faults.fault(kernel, ask.arch):
        raise ToolchainError(f"it ended the process that timed it before: {fault}")
    return kernel


@lru_cache(maxsize=MOST)
def text(ask: Ask) -> Kernel:
    """The kernel of an ask, rendered once for its trial, its check and its row."""
    return ask.kernel()


@lru_cache(maxsize=1)
def cold(form: Format, n: int, k: int, stored: Layout | None, device: torch.device) -> tuple[Weight, ...]:
    """Copies of a random weight, together more than the L2 cache holds."""
    torch.manual_seed(0)
    w = random_weight(form, n, k, stored, device)
    return w, *(w.clone() for _ in range(copies_for(w.nbytes, device) - 1))


def copies_of(kernel: Kernel, device: torch.device) -> tuple[Weight, ...]:
    """Cold copies of a weight as a kernel reads it; those of the call before where they are the same."""
    problem = kernel.problem
    return cold(problem.format, problem.n, problem.k, kernel.program.tile("codes.stored").layout, device)


def trial(kernel: Kernel, m: int, device: torch.device) -> Timer:
    """`rehearsed` for m rows of random x over cold copies of a random weight."""
    copies = copies_of(kernel, device)
    x, _, bias = random_call(kernel, m, kernel.problem.n, device, copies[0])
    return rehearsed(kernel, x, copies, bias)


def rehearsed(kernel: Kernel, x: torch.Tensor, copies: Sequence[Weight], bias: torch.Tensor | None = None) -> Timer:
    """What times a call with x [M, K], in microseconds, as often as it is called, each time over copies of one weight.

    It raises `ScheduleError`, as making it does, where the GPU refuses the kernel or an output is not written whole.
    """
    from triton.errors import TritonError

    m, sizes = x.shape[0], (x.shape[0], kernel.problem.outputs)
    outputs = [torch.full(sizes, torch.nan, dtype=torch_dtype(kernel.problem.y), device=x.device) for _ in copies]
    try:
        launch = launcher(kernel, x.device)
        replayed = captured([partial(launch, y, x, *each.buffers, bias, m) for y, each in zip(outputs, copies, strict=True)])
    except TritonError as error:
        raise ScheduleError(f"the GPU refuses it: {error}") from error

    def timed() -> float:
        for y in outputs:
            y.fill_(torch.nan)
        us = replayed().us
        written = torch.stack(outputs)
        if not (written == written[0]).all():  # NaN is not equal to itself
            raise ScheduleError("outputs of equal weights differ, or were not written whole")
        return us

    return timed


def right(kernel: Kernel, device: torch.device) -> bool:
    """Whether a kernel matches the reference at both ends of its bucket, and repeats bit for bit."""
    return check(kernel, REPEATS, timed=False, w=copies_of(kernel, device)[0]).passed


def bound(kernel: Kernel, floor: Floor, device: torch.device, early: bool) -> float:
    """Microseconds of only reading the weight that a kernel reads, launched early or not."""
    nbytes = sum(size for name, size in bytes_moved(kernel.program, 1).items() if name in kernel.program.kept)
    return floor(nbytes, device, early)


def kept(ask: Ask, found: Found, floor: Floor, device: torch.device, rules: Schedule) -> Row:
    """The row of a winner, written, with what the rules chose."""
    kernel, arch = text(ask), ask.arch
    row = Row(
        question=tuned.question(ask.problem),
        schedule=kernel.schedule,
        device=arch.device,
        sms=arch.device_sms,
        us=round(found.us, 3),
        rules=str(rules),
        rules_us=round(found.first_us, 3),
        floor_us=round(bound(kernel, floor, device, bool(kernel.schedule.overlap)), 3),
        trials=found.trials,
        date=datetime.date.today().isoformat(),
        triton=toolchain.version(),
        w4gen=__version__,
        text=cache.address(kernel.source),
    )
    tuned.save(arch.name, [row])
    return row
