"""Compiles ahead of a test, in processes side by side: on a machine with many cores, minutes become seconds. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress

from w4gen import toolchain
from w4gen.api import problem_of
from w4gen.errors import W4Error
from w4gen.pipeline import compile
from w4gen.schedule.arch import ARCHES

Question = tuple[str, int, int, int, str, bool, str]
"""Format, M, N, K, dtype, bias, arch."""


def build(question: Question) -> None:
    """Compile one kernel into the cache that the session shares; what does not compile is for its own test to tell."""
    form, m, n, k, dtype, bias, arch = question
    problem = problem_of(m=m, n=n, k=k, format=form, dtype_name=dtype, bias=bias)
    with suppress(W4Error):
        toolchain.build(compile(problem, ARCHES[arch]), ARCHES[arch])


def compile_all(questions: list[Question]) -> None:
    """Compile the kernels of all questions, each bucket once; workers of pytest-xdist compile side by side anyway."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(build, dict.fromkeys(questions), chunksize=4)
