"""The floor of a shape: the fastest kernel that only reads the bytes a call must read, launched the same way."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from w4gen.runtime.timer import Timing, copies_for, time_calls


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the kernel behind start while this one runs."""
    if OVERLAP:
        launch: tl.constexpr = "griddepcontrol.launch_dependents;\nmov.u32 $0, 0;"
        tl.inline_asm_elementwise(launch, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_last(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernel in front has ended."""
    if OVERLAP:
        wait: tl.constexpr = "griddepcontrol.wait;\nmov.u32 $0, 0;"
        tl.inline_asm_elementwise(wait, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def read_only(data_ptr, out_ptr, count, BLOCK: tl.constexpr, TURNS: tl.constexpr, OVERLAP: tl.constexpr, POLICY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read TURNS blocks of words a program; the sum is written only where it has one value in 2**32."""
    let_next_start(OVERLAP)
    start = tl.program_id(0) * BLOCK * TURNS
    total = tl.zeros([BLOCK], tl.int32)
    for turn in tl.static_range(TURNS):
        at = start + turn * BLOCK + tl.arange(0, BLOCK)
        total ^= tl.load(data_ptr + at, mask=at < count, other=0, eviction_policy=POLICY)
    wait_for_last(OVERLAP)
    folded = tl.sum(total, axis=0)
    if folded == 0x5EED1234:
        tl.store(out_ptr, folded)


SETTINGS = ((1024, 1, 4), (1024, 2, 4), (1024, 4, 4), (2048, 2, 4), (2048, 4, 8), (4096, 1, 8), (4096, 4, 8), (512, 1, 4))


@cache
def floor(nbytes: int, device: torch.device, overlap: bool) -> Timing:
    """The time of the fastest of several read-only kernels over `nbytes` cold bytes; with `overlap` each starts early."""
    return read(nbytes, device, overlap, copies_for(nbytes, device), "evict_first")


def read(nbytes: int, device: torch.device, overlap: bool, copies: int, policy: str) -> Timing:
    """The time of the fastest of several kernels that read one of `copies` of `nbytes` bytes after the other, and do no more."""
    count = -(-nbytes // 4)
    data = [torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32, device=device) for _ in range(copies)]
    out = torch.empty(1, dtype=torch.int32, device=device)

    def call(each: torch.Tensor, block: int, turns: int, warps: int) -> Any:
        grid, options = (-(-count // (block * turns)),), {"num_warps": warps, "launch_pdl": overlap}
        return lambda: read_only[grid](each, out, count, block, turns, overlap, policy, **options)  # type: ignore[index]

    timings = [time_calls([call(each, *setting) for each in data]) for setting in SETTINGS]
    return min(timings, key=lambda timing: timing.us)
