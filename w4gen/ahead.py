"""Compiles ahead of need, side by side in processes of their own.

A worker runs this module: a question a line on its standard input, an answer a line on its output. So a caller needs no
`if __name__ == "__main__"`, a compiler that crashes takes nobody along, and a worker ends when its caller does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

from w4gen import pipeline, processes, toolchain
from w4gen.codegen.render import Kernel
from w4gen.errors import ToolchainError, W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.progress import tracked
from w4gen.schedule.arch import Arch
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.space import shortlist


@dataclass(frozen=True, slots=True)
class Ask:
    """A kernel that is wanted: under the schedule that a compile gives, or under another."""

    problem: Problem
    arch: Arch
    schedule: Schedule | None = None

    def kernel(self) -> Kernel:
        """Its text. Raises `W4Error` where there is none."""
        if self.schedule is None:
            return pipeline.compile(self.problem, self.arch)
        return pipeline.made(lower(self.problem), self.schedule, self.arch)

    def answer(self) -> dict[str, Any]:
        """Compile it."""
        built = toolchain.build(self.kernel(), self.arch)
        return {"cached": all(binary.cached for binary in built.values())}


@dataclass(frozen=True, slots=True)
class Ranking:
    """The schedules of a problem that are worth a trial with `rows` rows of x, `most` of them: nothing is compiled."""

    problem: Problem
    arch: Arch
    rows: int
    most: int

    def answer(self) -> dict[str, Any]:
        """Each with the microseconds that the model predicts, the rules' choice first."""
        found = shortlist(lower(self.problem), toolchain.able(self.arch), self.rows)[: self.most]
        return {"ranked": [(str(each.schedule), each.us) for each in found]}


Question: TypeAlias = "Ask | Ranking"


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an ask: whether it was compiled before, seconds, and why there is no binary (empty where there is one)."""

    ask: Any
    cached: bool = False
    seconds: float = 0.0
    error: str = ""
    ranked: Sequence[tuple[str, float]] = ()


UNWANTED = "it is not wanted any more"


def compiled(asks: Iterable[Question], workers: int = 0, wanted: Callable[[Question], bool] = lambda ask: True) -> Iterator[Done]:
    """Answer every ask once, in as many processes as there are cores (or `workers`), and tell each as it is done.

    One that is not `wanted` any more when its turn comes is passed over.
    """
    every = list(dict.fromkeys(asks))
    pending: queue.SimpleQueue[Question] = queue.SimpleQueue()
    done: queue.SimpleQueue[Done] = queue.SimpleQueue()
    for ask in every:
        pending.put(ask)
    count = min(workers or cores(), len(every))
    running: dict[int, subprocess.Popen[str]] = {}
    threads = [
        threading.Thread(target=_feed, args=(place, running, pending, done, wanted), daemon=True) for place in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in every:
            yield done.get()
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                pending.get_nowait()
        for process in list(running.values()):
            process.kill()
        for thread in threads:
            thread.join()


def needed(asks: Iterable[Ask], progress: bool = True) -> dict[Ask, Done]:
    """Compile what will be called: what became of each ask. Raises `ToolchainError` where one does not compile."""
    found = dict[Ask, Done]()
    for done in every(asks, progress=progress):
        if done.error:
            raise ToolchainError(f"{done.ask.problem} does not compile: {done.error}")
        found[done.ask] = done
    return found


def every(asks: Iterable[Ask], workers: int = 0, progress: bool = True) -> Iterator[Done]:
    """`compiled`, in the order in which all are done soonest, with progress."""
    wanted = longest_first(asks)
    return tracked(compiled(wanted, workers), len(wanted), "compiling", progress)


def longest_first(asks: Iterable[Ask]) -> list[Ask]:
    """Every ask once, in the order in which they are done soonest side by side: kernels for many rows take longest."""
    return sorted(dict.fromkeys(asks), key=lambda ask: -ask.problem.m[0])


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _feed(
    place: int,
    running: dict[int, subprocess.Popen[str]],
    pending: queue.SimpleQueue[Question],
    done: queue.SimpleQueue[Done],
    wanted: Callable[[Question], bool],
) -> None:
    """Give a worker one ask after the other; one that dies is replaced."""
    while True:
        try:
            ask = pending.get_nowait()
        except queue.Empty:
            break
        if not wanted(ask):
            done.put(Done(ask, error=UNWANTED))
            continue
        process = running[place] = running.get(place) or started("w4gen.ahead")
        reply = _asked(process, base64.b64encode(pickle.dumps(ask)).decode() + "\n")
        if not reply:
            del running[place]
            status = process.wait()
            done.put(Done(ask, error=f"the process that compiled it ended with status {status}"))
            continue
        done.put(Done(ask, **json.loads(reply)))
    if place in running:
        running[place].communicate()


def _asked(process: subprocess.Popen[str], line: str) -> str:
    """The answer of a worker, empty where it died."""
    try:
        process.stdin.write(line)  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return process.stdout.readline()  # type: ignore[union-attr]
    except (OSError, ValueError):
        return ""


def started(module: str) -> subprocess.Popen[str]:
    """A module that is asked and answers line by line, in a session of its own: Ctrl-C is for its caller."""
    compiling = {name: value for name, value in processes.environment().items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        processes.module(module),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=compiling, start_new_session=True,
    )  # fmt: skip


def answers() -> IO[str]:
    """Where such a process writes its answers; what else is printed goes nowhere: Triton prints all PTX that ptxas refuses."""
    told = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return told


def answer(line: str) -> dict[str, Any]:
    """What a line asks for, as our caller wrote it, with the seconds that it took."""
    start = time.perf_counter()
    try:
        found: dict[str, Any] = pickle.loads(base64.b64decode(line)).answer()
    except W4Error as error:
        found = {"error": str(error)}
    return found | {"seconds": time.perf_counter() - start}


def main(questions: IO[str], answers: IO[str]) -> None:
    """Answer line by line until there are no more questions, or nobody who listens."""
    try:
        for line in questions:
            answers.write(json.dumps(answer(line)) + "\n")
            answers.flush()
    except BrokenPipeError:
        os._exit(0)  # what was not told is not told at the end either


if __name__ == "__main__":
    main(sys.stdin, answers())
