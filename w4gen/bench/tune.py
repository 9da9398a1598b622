"""Tuning as people ask for it: some layers, for some seconds, on the GPUs that are here.

Where there are several of a kind, each has a process of its own (`python -m w4gen.bench.tune`), with its share of the questions
and of the cores: nothing but its own work is between its launches. Rows are written by whoever finds them.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from w4gen import ahead
from w4gen.bench.floors import floor
from w4gen.ir.problem import Problem
from w4gen.runtime import tune as runtime
from w4gen.runtime.tune import Question
from w4gen.schedule.search import Found
from w4gen.tuned import Row

log = logging.getLogger("w4gen")
Tuned = tuple[Question, Row | None, Found | None]
WORKER = "w4gen.bench.tune"


@dataclass(frozen=True, slots=True)
class Share:
    """What one process does: on which GPU and cores, which questions, until when (seconds since the epoch)."""

    gpu: int
    cores: tuple[int, ...]
    questions: tuple[Question, ...]
    end: float
    again: bool


def tune(asked: Sequence[tuple[Problem, int, int]], seconds: float = 60.0, again: bool = False) -> Iterator[Tuned]:
    """Time schedules for problems, given as (problem, rows of x to time it with, layers that have it), and keep the winners.

    Gives for each question its row (None where one was there, or none was right) and what the search came to (None where there
    was none). `seconds` are shared by what a question's time is worth; what is done is kept, also when the caller stops. All
    visible GPUs of the current one's kind are used. Needs a GPU.
    """
    questions = [Question(*each) for each in asked]
    gpus = alike()
    parts = shared_out(questions, len(gpus))
    if len(parts) < 2:
        return here(questions, seconds, again)
    end, cores = time.time() + seconds, sorted(os.sched_getaffinity(0))
    own = [tuple(cores[turn :: len(parts)]) for turn in range(len(parts))]
    return everywhere([Share(*each, end, again) for each in zip(gpus, own, map(tuple, parts))])


def here(questions: Sequence[Question], seconds: float, again: bool) -> Iterator[Tuned]:
    """Tune on the current GPU, in this process."""
    return runtime.tune(questions, seconds, lambda nbytes, device, overlap: floor(nbytes, device, overlap).us, again)


def alike() -> list[int]:
    """The visible GPUs that a row of the current one answers for, that one first."""
    if not torch.cuda.is_available():
        return [0]
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
    """What the processes of some shares find, as they find it; one that ends early is told, and costs only its own share."""
    found: queue.SimpleQueue[Tuned | None] = queue.SimpleQueue()
    running, stopped = {share: ahead.started(WORKER) for share in shares}, threading.Event()
    threads = [threading.Thread(target=_follow, args=(*each, found, stopped), daemon=True) for each in running.items()]
    for thread in threads:
        thread.start()
    left = len(shares)
    try:
        while left:
            told = found.get()
            if told is None:
                left -= 1
            else:
                yield told
    finally:
        stopped.set()
        for process in running.values():
            process.kill()
        for thread in threads:
            thread.join()


def _follow(
    share: Share, process: subprocess.Popen[str], found: queue.SimpleQueue[Tuned | None], stopped: threading.Event
) -> None:
    """Give a process its share, and hand on what it answers."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(written(share) + "\n")  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]
    for line in process.stdout:  # type: ignore[union-attr]
        found.put(read(line))
    if process.wait() and not stopped.is_set():
        log.warning("tuning on GPU %d ended with status %d: a second run goes on with the rest", share.gpu, process.returncode)
    found.put(None)


def written(each: Any) -> str:
    """An object as a line."""
    return base64.b64encode(pickle.dumps(each)).decode()


def read(line: str) -> Any:
    """The object of a line, as one of these processes wrote it."""
    return pickle.loads(base64.b64decode(line))


def main(asked: IO[str], answers: IO[str]) -> None:
    """Tune a share, and tell each question as it is done."""
    share: Share = read(asked.readline())
    if share.cores:
        os.sched_setaffinity(0, share.cores)
    torch.cuda.set_device(share.gpu)
    for each in here(share.questions, max(0.0, share.end - time.time()), share.again):
        answers.write(written(each) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin, ahead.answers())
