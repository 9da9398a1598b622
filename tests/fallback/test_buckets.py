"""M = 1 … 300 in order: one kernel for each bucket, whatever the memory of x. Launches are made up, texts are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import w4gen
from w4gen.codegen.render import Kernel
from w4gen.runtime import ops
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import BUCKETS
from w4gen.schedule.stored import layout_for


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
@pytest.mark.parametrize("arch", ["sm_90", "sm_80", "gfx942", "portable"])
def test_compiles_are_as_many_as_buckets(arch: str, form: str, fresh_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_ARCH", arch)
    made: list[Kernel] = []
    seen: set[tuple[int, bool]] = set()

    def launcher(kernel: Kernel, device: torch.device) -> Any:
        def launch(y: torch.Tensor, x: torch.Tensor, *rest: Any) -> None:
            seen.add((x.data_ptr() % 16, x.is_contiguous()))
            assert kernel.problem.m[0] <= rest[-1] == x.shape[0] <= kernel.problem.m[1]

        made.append(kernel)
        return launch

    monkeypatch.setattr(ops, "launcher", launcher)
    monkeypatch.setattr(ops, "LAUNCHES", {})
    w = w4gen.Weight.from_float(torch.randn(64, 256), form)
    w = w.packed_as(layout_for(w.format, ARCHES[arch], w.n, w.k))
    held = torch.zeros(301 * 256 + 1, dtype=torch.float16)
    for m in range(1, 301):
        rows = held[:-1].view(301, 256)
        for x in (rows[:m], rows[1 : m + 1], held[1:].view(301, 256)[:m], rows[:m, :].T.contiguous().T):
            ops.on_gpu(x, list(w.buffers), None, w.n, str(w.format), str(w.layout))
    assert [kernel.problem.m for kernel in made] == [each for each in BUCKETS if each[0] <= 300]
    assert seen == {(0, True)}, "a kernel is compiled for x as it always is: contiguous, from a multiple of 16 bytes"


def test_buckets_leave_no_m_out_and_none_twice() -> None:
    assert [high + 1 for _, high in BUCKETS[:-1]] == [low for low, _ in BUCKETS[1:]]
    assert BUCKETS[0][0] == 1
