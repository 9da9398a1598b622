"""Compiles ahead of need, side by side in processes of their own.

A worker is `python -m w4gen.ahead`: a question a line on its standard input, an answer a line on its output. So a caller needs no
`if __name__ == "__main__"`, a compiler that crashes takes nobody along, and a worker ends when its caller does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO

from w4gen import pipeline, toolchain
from w4gen.codegen.render import Kernel
from w4gen.errors import W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.schedule.arch import Arch, arch
from w4gen.schedule.schedule import Schedule


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

    def line(self) -> str:
        """The question as a worker reads it."""
        chosen = "" if self.schedule is None else str(self.schedule)
        device = (self.arch.device, self.arch.device_sms)
        return json.dumps([str(self.problem), self.arch.name, *device, chosen]) + "\n"


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an ask: whether it was compiled before, seconds, and why there is no binary (empty where there is one)."""

    ask: Ask
    cached: bool = False
    seconds: float = 0.0
    error: str = ""


def compiled(asks: Iterable[Ask], workers: int = 0) -> Iterator[Done]:
    """Compile every ask once, in as many processes as there are cores (or `workers`), and tell each as it is done."""
    wanted = list(dict.fromkeys(asks))
    pending: queue.SimpleQueue[Ask] = queue.SimpleQueue()
    done: queue.SimpleQueue[Done] = queue.SimpleQueue()
    for ask in wanted:
        pending.put(ask)
    count = min(workers or len(os.sched_getaffinity(0)), len(wanted))
    running: dict[int, subprocess.Popen[str]] = {}
    threads = [threading.Thread(target=_feed, args=(place, running, pending, done), daemon=True) for place in range(count)]
    for thread in threads:
        thread.start()
    try:
        for _ in wanted:
            yield done.get()
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                pending.get_nowait()
        for process in list(running.values()):
            process.kill()
        for thread in threads:
            thread.join()


def _feed(
    place: int, running: dict[int, subprocess.Popen[str]], pending: queue.SimpleQueue[Ask], done: queue.SimpleQueue[Done]
) -> None:
    """Give a worker one ask after the other; one that dies is replaced."""
    while True:
        try:
            ask = pending.get_nowait()
        except queue.Empty:
            break
        process = running[place] = running.get(place) or _start()
        reply = _asked(process, ask.line())
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


def _start() -> subprocess.Popen[str]:
    """A worker in a session of its own: Ctrl-C is for its caller."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
    return subprocess.Popen(
        [sys.executable, "-m", "w4gen.ahead"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def answer(line: str) -> dict[str, object]:
    """Compile what a line asks for."""
    problem, name, device, sms, chosen = json.loads(line)
    start = time.perf_counter()
    try:
        target = replace(arch(name), device=device, device_sms=sms)
        ask = Ask(Problem.parse(problem), target, Schedule.parse(chosen) if chosen else None)
        built = toolchain.build(ask.kernel(), target)
    except W4Error as error:
        return {"error": str(error), "seconds": time.perf_counter() - start}
    return {"cached": all(binary.cached for binary in built.values()), "seconds": time.perf_counter() - start}


def main(questions: IO[str], answers: IO[str]) -> None:
    """Answer line by line until there are no more questions."""
    for line in questions:
        answers.write(json.dumps(answer(line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    main(sys.stdin, told)
