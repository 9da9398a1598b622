"""Times on a GPU: graph replay over rotating copies of the weights, cold in L2, median."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: the median of the replays and the half range around it as a share."""

    us: float
    spread: float


def copies_for(nbytes: int, device: torch.device) -> int:
    """Copies of a weight that together are at least three times the L2 cache (and at least three)."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return max(3, min(512, -(-3 * l2 // nbytes)))


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 9) -> Timing:
    """Time `calls`, each over its own copy of the weights, captured back to back in one graph."""
    return captured(calls, replays)()


def captured(calls: Sequence[Callable[[], object]], replays: int = 9) -> Callable[[], Timing]:
    """What times `calls` as often as it is called: they are captured once, which costs more than replaying them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # each once: the first call after a write to a weight does not overlap
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 32 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()

    def replayed() -> Timing:
        times = []
        for turn in range(replays + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times.append(start.elapsed_time(end) * 1e3 / repeats / len(calls))
        median = statistics.median(times)
        return Timing(median, (max(times) - min(times)) / 2 / median)

    return replayed
