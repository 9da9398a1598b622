"""Tuning as people ask for it: some layers, for some seconds, on the GPU that is here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from w4gen.bench.floors import floor
from w4gen.ir.problem import Problem
from w4gen.runtime import tune as runtime
from w4gen.schedule.search import Found
from w4gen.tuned import Row


def tune(
    asked: Sequence[tuple[Problem, int, int]], seconds: float = 60.0, again: bool = False
) -> Iterator[tuple[runtime.Question, Row | None, Found | None]]:
    """Time schedules for problems, given as (problem, rows of x to time it with, layers that have it), and keep the winners.

    Gives for each question its row (None where one was there, or none was right) and what the search came to (None where there
    was none). `seconds` are shared by what a question's time is worth; what is done is kept, also when the caller stops. Needs a
    GPU.
    """
    questions = [runtime.Question(*each) for each in asked]
    return runtime.tune(questions, seconds, lambda nbytes, device, overlap: floor(nbytes, device, overlap).us, again)
