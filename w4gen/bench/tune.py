"""Tuning as people ask for it: some layers, for some seconds, on the GPUs that are here.

Each has a process of its own (`python -m w4gen.bench.tune`), with its share of the questions and of the cores: nothing but its
own work is between its launches. Rows are written by whoever finds them. A kernel that hangs, or that breaks the CUDA context, so
that every later call of the process fails, costs its question; the others go on in a fresh process, and no later run times it.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from logging.handlers import QueueHandler
from types import SimpleNamespace
from typing import IO, Any

import torch

from w4gen import ahead, faults
from w4gen.bench.floors import floor
from w4gen.errors import W4Error
from w4gen.ir.problem import Problem
from w4gen.runtime import tune as runtime
from w4gen.runtime.tune import At, Question
from w4gen.schedule.search import Found
from w4gen.tuned import Row

log = logging.getLogger("w4gen")
Tuned = tuple[Question, Row | None, Found | None]
WORKER = "w4gen.bench.tune"
HUNG_S = 300.0
"""Seconds after which a candidate that is still on the GPU never ends."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one process does: on which GPU and cores, which questions, until when (seconds since the epoch)."""

    gpu: int
    cores: tuple[int, ...]
    questions: tuple[Question, ...]
    end: float
    again: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a share ended: what is left of the share, where it was, its status, and the error that it told."""

    share: Share
    at: At | None
    status: int
    error: Exception | None

    @property
    def how(self) -> str:
        return str(self.error or f"status {self.status}")

    @property
    def fault(self) -> At | None:
        """Where it was when the GPU, which it told, or a signal ended it; None where neither did, or nothing was begun."""
        return self.at if self.error or self.status < 0 else None

    @property
    def rest(self) -> Share | None:
        """What a fresh process goes on with: all but the question at fault. None without a fault, questions or time."""
        if self.fault is None or time.time() >= self.share.end:
            return None
        left = without(self.share, self.fault.question)
        return left if left.questions else None


def tune(asked: Sequence[tuple[Problem, int, int]], seconds: float = 60.0, again: bool = False) -> Iterator[Tuned]:
    """Time schedules for problems, given as (problem, rows of x to time it with, layers that have it), and keep the winners.

    Gives for each question its row (None where one was there, or none was right) and what the search came to (None where there
    was none). `seconds` are shared by what a question's time is worth; what is done is kept, also when the caller stops. All
    visible GPUs of the current one's kind are used. Raises `W4Error` where there is none.
    """
    gpus = alike()
    parts = shared_out([Question(*each) for each in asked], len(gpus))
    end, cores = time.time() + seconds, sorted(os.sched_getaffinity(0))
    own = [tuple(cores[turn :: len(parts)]) for turn in range(len(parts))]
    return everywhere([Share(*each, end, again) for each in zip(gpus, own, map(tuple, parts))])


def here(questions: Sequence[Question], seconds: float, again: bool, at: Callable[[At], None]) -> Iterator[Tuned]:
    """Tune on the current GPU, in this process; `at` is told where it is."""
    return runtime.tune(questions, seconds, lambda nbytes, device, overlap: floor(nbytes, device, overlap).us, again, at=at)


def alike() -> list[int]:
    """The visible GPUs that a row of the current one answers for, that one first. Raises `W4Error` where there is none."""
    if not torch.cuda.is_available():
        raise W4Error("times come from GPUs only, and PyTorch sees none here: run w4gen tune where the kernels will run")
    current, facts = torch.cuda.current_device(), torch.cuda.get_device_properties
    kinds = {each: (facts(each).name, facts(each).multi_processor_count) for each in range(torch.cuda.device_count())}
    return sorted((each for each in kinds if kinds[each] == kinds[current]), key=lambda each: (each != current, each))


def shared_out(questions: Sequence[Question], count: int) -> list[list[Question]]:
    """The questions of each of `count` GPUs, none of them empty: the most bytes first, each to the GPU with the fewest so far.

    Buckets of a weight stay together, as their trials share copies of it.
    """
    of_weight: dict[Any, list[Question]] = defaultdict(list)
    for each in questions:
        of_weight[each.problem.format, each.problem.n, each.problem.k].append(each)
    parts: list[list[Question]] = [[] for _ in range(count)]
    for group in sorted(of_weight.values(), key=nbytes, reverse=True):
        min(parts, key=nbytes).extend(group)
    return [part for part in parts if part]


def nbytes(questions: Sequence[Question]) -> float:
    """Bytes of codes that the layers of some questions read in all."""
    return sum(each.count * each.problem.n * each.problem.k * each.problem.format.bits / 8 for each in questions)


def everywhere(shares: Sequence[Share]) -> Iterator[Tuned]:
    """What the processes of some shares find, as they find it; what is left of one that a fault ended goes to a fresh process."""
    told: queue.SimpleQueue[Tuned | Ended] = queue.SimpleQueue()
    running: dict[int, tuple[subprocess.Popen[str], threading.Thread]] = {}

    def begin(share: Share) -> None:
        process = ahead.started(WORKER)
        running[share.gpu] = process, threading.Thread(target=_follow, args=(share, process, told), daemon=True)
        running[share.gpu][1].start()

    try:
        for share in shares:
            begin(share)
        while running:
            each = told.get()
            if not isinstance(each, Ended):
                yield each
                continue
            del running[each.share.gpu]
            yield from given_up(each)
            if rest := each.rest:
                begin(rest)
    finally:
        for process, _ in running.values():
            process.kill()
        for _, thread in running.values():
            thread.join()


def _follow(share: Share, process: subprocess.Popen[str], told: queue.SimpleQueue[Tuned | Ended]) -> None:
    """Give a process its share, and hand on what it answers and how it ended; one whose candidate hangs is ended."""
    left = share
    at: At | None = None
    error: Exception | None = None

    def hung() -> None:
        nonlocal error
        error = TimeoutError(f"not done after {HUNG_S:g} s")
        process.kill()

    watch = threading.Timer(HUNG_S, hung)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(written(share) + "\n")  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]
    for line in process.stdout:  # type: ignore[union-attr]
        watch.cancel()
        match read(line) if line.endswith("\n") else None:  # it may be killed within a line
            case At() as at:
                pass
            case Exception() as error:
                pass
            case logging.LogRecord() as record if log.isEnabledFor(record.levelno):
                log.handle(record)
            case (question, _, _) as done:
                left, at = without(left, question), None
                told.put(done)
        watch = threading.Timer(HUNG_S, hung)
        if at and at.ask:
            watch.start()
    watch.cancel()
    told.put(Ended(left, at, process.wait(), error))


def given_up(ended: Ended) -> Iterator[Tuned]:
    """The question, if any, that ended a process, which is left to the rules; its candidate is not timed again.

    Raises what the process raised for its caller.
    """
    if isinstance(ended.error, W4Error):
        raise ended.error
    at = ended.fault
    if at is None:
        if ended.status:
            log.warning("tuning on GPU %d ended: %s; a second run goes on with the rest", ended.share.gpu, ended.how)
        return
    if at.ask:
        faults.keep(at.ask.kernel(), at.ask.arch, ended.how)
    timed = f"timed {at.ask.schedule}, which no run does again" if at.ask else "timed nothing"
    log.warning("%s is left to the rules, as the process that tuned it ended: %s; it %s", at.question.problem, ended.how, timed)
    yield at.question, None, Found(None, 0.0, 0, ((at.id, ended.how),))


def without(share: Share, question: Question) -> Share:
    """A share without one of its questions."""
    return replace(share, questions=tuple(each for each in share.questions if each != question))


def written(each: Any) -> str:
    """An object as a line."""
    return base64.b64encode(pickle.dumps(each)).decode()


def read(line: str) -> Any:
    """The object of a line, as one of these processes wrote it."""
    return pickle.loads(base64.b64decode(line))


def main(asked: IO[str], answers: IO[str]) -> None:
    """Tune a share, and tell what is found, what is logged, where it is, and the error that it ends with."""

    def tell(each: Any) -> None:
        answers.write(written(each) + "\n")
        answers.flush()

    share: Share = read(asked.readline())
    if share.cores:
        os.sched_setaffinity(0, share.cores)
    log.setLevel(logging.INFO)
    log.addHandler(QueueHandler(SimpleNamespace(put_nowait=tell)))
    try:
        torch.cuda.set_device(share.gpu)
        for each in here(share.questions, max(0.0, share.end - time.time()), share.again, tell):
            tell(each)
    except (RuntimeError, W4Error) as error:
        log.info("tuning ends", exc_info=True)
        tell(error if isinstance(error, W4Error) else RuntimeError((str(error) or repr(error)).splitlines()[0]))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main(sys.stdin, ahead.answers())
