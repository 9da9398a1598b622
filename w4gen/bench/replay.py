"""A call in one CUDA graph, and what the kernels of a replay take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from w4gen.bench.spans import split


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A call as a CUDA graph of it; on a CPU the call itself."""
    call()
    if not torch.cuda.is_available():
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def kernels(replay: Callable[[], object], turns: int = 3) -> dict[str, Any]:
    """Kernel time of a step, as the profiler has it; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(turns):
            replay()
        torch.cuda.synchronize()
    on_gpu = [each for each in seen.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    return split([(each.name, each.time_range.start, each.time_range.end) for each in on_gpu], turns)
