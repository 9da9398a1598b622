"""Measurements that end in time, whatever they wait for."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN, LATE = 10.0, 60.0
"""Seconds until what has no time left is told so again, and, after all of it was to be done, until the process is ended."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the body once it has taken so long, and again where that is swallowed; at once without time."""

    def over(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    if seconds <= 0:
        raise TimeoutError("no time was left")
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ended(seconds: float) -> Iterator[None]:
    """End the process, saying where it was, if the body takes so long: a wait in C sees no signal."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def share(left: float, later: int) -> float:
    """Seconds that a compile may take of those left, where so many come later: each keeps 40, or as many as this one gets."""
    return max(left - 40 * later, left / (later + 1))
