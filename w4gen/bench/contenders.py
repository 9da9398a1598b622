"""All who answer one x with one weight, timed in turns: w4gen, cuBLAS, dequantize and multiply, and the peers that are here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from w4gen.bench import host
from w4gen.bench.noise import WRONG
from w4gen.bench.peers import Given, Peer, PeerError
from w4gen.runtime.reference import error
from w4gen.runtime.timer import Timing, captured, copies_for

Call: TypeAlias = Callable[[], torch.Tensor]
ROUNDS = 3
SLOW, LEAST_US = 20, 2000.0
"""A peer that takes so many times cuBLAS's time, and so long, is told and not timed: its turns would take minutes."""
HOST_ROWS = 16
"""Rows of x up to which the host's time is measured: with more the GPU is what is waited for."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One who answers: a call for each cold copy of the weight, the seconds of the first, packing and all, and its error."""

    name: str
    calls: Sequence[Call]
    first_s: float
    error: float
    dtype: str


def contender(
    name: str, make: Callable[[], Call], copies: int, truth: torch.Tensor, again: Callable[[], Call] | None = None
) -> Contender:
    """A contender that `make` packs; `again` makes its other copies, else `make` packs each anew. Raises what they raise."""
    start = time.perf_counter()
    first = make()
    y = first()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    calls = [first, *((again or make)() for _ in range(copies - 1))]
    return Contender(name, calls, round(seconds, 3), error(y, truth), str(y.dtype).removeprefix("torch."))


def peer(each: Peer, given: Given, x: torch.Tensor, truth: torch.Tensor, nbytes: int, cublas_us: float) -> Contender | str:
    """A peer with the weight, or why there is none."""
    rows = x if each.kind is None else x.to(each.kind)

    def make() -> Call:
        call = each.ready(given, x.dtype)
        return lambda: call(rows)

    try:
        with told_as_one():
            made = contender(each.name, make, copies_for(nbytes, x.device), truth)
            slow = once_us(made.calls[0])
    except PeerError as reason:
        return str(reason)
    if not made.error <= WRONG:
        return f"is wrong: error {made.error:.1e}"
    if slow > max(SLOW * cublas_us, LEAST_US):
        return f"takes {slow:.0f} us, over {SLOW} times cuBLAS's time: not timed"
    return made


@contextmanager
def told_as_one() -> Iterator[None]:
    """Whatever a library of somebody else's raises becomes a `PeerError` of one line, so that it stops nobody."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise PeerError(f"failed with {type(error).__name__}: {first[:200]}") from error


def once_us(call: Call) -> float:
    """Microseconds of one call, the host's included."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def answering(
    peers: Sequence[Peer], given: Given, x: torch.Tensor, truth: torch.Tensor, nbytes: int, cublas_us: float
) -> dict[str, Contender | str]:
    """Every peer by name, or why it does not answer."""
    return {each.name: peer(each, given, x, truth, nbytes, cublas_us) for each in peers}


def timed(contenders: Sequence[Contender], rounds: int = ROUNDS) -> dict[str, Timing]:
    """The time of each, all of them in every round: the median of the rounds, and the largest spread."""
    timers = {each.name: captured(each.calls) for each in contenders}
    turns = [{name: timer() for name, timer in timers.items()} for _ in range(rounds)]
    return {
        name: Timing(statistics.median(turn[name].us for turn in turns), max(turn[name].spread for turn in turns))
        for name in timers
    }


def host_us(contenders: Sequence[Contender], m: int) -> dict[str, float]:
    """What an eager call of each costs the host; nothing where m rows keep the GPU busy longer than that."""
    calls: dict[str, Callable[[], object]] = {each.name: each.calls[0] for each in contenders}
    return host.turns(calls, ROUNDS, torch.cuda.synchronize) if m <= HOST_ROWS else {}


def rows(others: Mapping[str, Contender | str], times: Mapping[str, Timing], spent: Mapping[str, float]) -> list[dict[str, Any]]:
    """What is told of each: its figures, or why there are none."""
    told: list[dict[str, Any]] = []
    for name, each in others.items():
        if isinstance(each, str):
            told.append({"name": name, "why": each})
            continue
        figures = {"us": round(times[name].us, 3), "spread": round(times[name].spread, 4), "error": each.error}
        told.append({"name": name, **figures, "dtype": each.dtype, "first_s": each.first_s, "host_us": spent.get(name)})
    return told
