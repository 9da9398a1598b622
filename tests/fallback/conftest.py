"""A stand-in for a GPU: what Triton's launcher in C is given, with no GPU and no compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from w4gen.codegen.render import Kernel
from w4gen.runtime import launch, ops
from w4gen.schedule.arch import ARCHES

FLAGS = ("function", "flags")


class Gpu:
    """A GPU that notes what is launched on it, and fills y with how many launches there were."""

    def __init__(self) -> None:
        self.launched: list[tuple[bool, tuple]] = []
        self.asked = 0
        self.current: int | None = None

    def load(self, kernel: Kernel, device: torch.device) -> launch.Launch:
        names = launch.arguments(kernel)
        places = tuple(tuple(map(names.index, piece.arguments)) for piece in kernel.pieces)
        assert len(places) == 1, "these tests are of kernels of one function"
        ways = {early: [launch.Start(self.start(kernel, early), FLAGS)] for early in (False, True)}
        return launch.Launch(kernel, device, 0, ways, (), places)

    def start(self, kernel: Kernel, early: bool) -> Callable[..., None]:
        outputs = kernel.problem.outputs

        def start(*call: object) -> None:
            *grid, stream, function, flags, y, _ = call[:8]
            assert (stream, function, flags) == ("stream of None", *FLAGS)
            self.kernel, self.grid = kernel, tuple(grid)
            self.launched.append((early, call[6:]))
            values = torch.full((call[-1] * outputs,), len(self.launched), dtype=torch.float16)
            ctypes.memmove(y, values.data_ptr(), values.nbytes)

        return start


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made, here = Gpu(), ops.on_gpu

    def counted(*call: object) -> torch.Tensor:
        made.asked += 1
        return here(*call)

    monkeypatch.setattr(ops, "LAUNCHES", {})
    monkeypatch.setattr(ops, "on_gpu", counted)
    for module in (ops, launch):
        monkeypatch.setattr(module, "interpreted", lambda: True)  # the op on a CPU then launches
        monkeypatch.setattr(module, "arch_of", lambda device=None: ARCHES["sm_90"])
    monkeypatch.setattr(ops, "launcher", made.load)
    monkeypatch.setattr(launch, "current_device", lambda: made.current)
    monkeypatch.setattr(launch, "current_stream", "stream of {}".format)
    return made
