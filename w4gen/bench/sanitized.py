"""`python -m w4gen.bench.sanitized`: small calls of every template, and two planted faults, for compute-sanitizer to watch.

Each call is three launches (from the second on a kernel may start early), checked against the truth, and a line of JSON. All else
that runs on the GPU is copies: operands are made, and results compared, on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from w4gen import ahead
from w4gen.codegen import repack as permute
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.problem import Problem
from w4gen.ir.rounding import limit
from w4gen.runtime import launch, repack
from w4gen.runtime.check import random_call
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.reference import error, reference, typical
from w4gen.schedule.arch import ARCHES, Arch
from w4gen.schedule.rules import bucket
from w4gen.schedule.stored import layout_for

LAUNCHES = 3
CASES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "one row, pairs of halves": ("int4_g128", 1, 250, 1016, {"bias": True}),
    "one row, a cluster": ("uint4_g128_z", 1, 250, 2040, {}),
    "few rows": ("nf4_g64", 7, 250, 1016, {"bias": True}),
    "rows shared by teams": ("int4_g128", 13, 8442, 1016, {"bias": True}),
    "more rows, zeros": ("uint4_g128_z", 13, 250, 1016, {}),
    "codes in planes, one row": ("int3_g64", 1, 250, 1016, {}),
    "codes in planes, rows": ("int3_g64", 13, 250, 1016, {}),
    "shared k, epilogue": ("int4_g128", 29, 250, 2040, {"activation": "gelu", "residual": True}),
    "nested scales": ("nf4_dq", 7, 256, 1024, {}),
    "teams of warps": ("int4_g128", 300, 1024, 1528, {}),
    "teams of warps, shared k": ("int4_g128", 50, 256, 2040, {}),
    "a gradient": ("int4_g128", 45, 250, 504, {"gradient": True}),
    "a gradient, words turned": ("int4_g128", 130, 2040, 504, {"gradient": True}),
    "dequantized first": ("int4_g128", 2049, 250, 248, {}),
}
"""Format, rows, outputs, inputs and what else is asked: sizes that end within a tile, where masks are.

Teams of warps take more steps than their ring has slots, so that one is filled again.
"""
MOVED = "codes moved"
CALLS = (*CASES, MOVED)
"""All that is called."""


def asks(arch: Arch) -> dict[str, ahead.Ask]:
    """The kernel of each call."""
    return {
        name: ahead.Ask(Problem(m=bucket(m), n=n, k=k, format=named(form), **more), arch)
        for name, (form, m, n, k, more) in CASES.items()
    }


def called(ask: ahead.Ask, m: int, device: torch.device) -> dict[str, Any]:
    """Launch a kernel on random operands: its worst error to the truth, and whether the launches gave the same bits."""
    kernel, cpu = ask.kernel(), torch.device("cpu")
    problem = kernel.problem
    x, w, bias, *residual = random_call(kernel, m, problem.n, cpu)
    start = launch.launcher(kernel, device)
    given = [each if each is None else each.to(device) for each in (x, *w.buffers, bias, *residual)]
    found = []
    for _ in range(LAUNCHES):
        y = torch.full((m, problem.outputs), torch.nan, dtype=torch_dtype(problem.y)).to(device)
        start(y, *given, m)
        found.append(y.cpu())
    least = 0.0 if problem.epilogue else typical(x, w, problem.n, problem.gradient)
    truth = reference(x, w, bias, problem.activation, *residual, gradient=problem.gradient)
    worst, allowed = max(error(each, truth, least) for each in found), limit(kernel.program, m * problem.outputs)
    equal = all(torch.equal(each, found[0]) for each in found)
    return {
        "template": kernel.name,
        "kernels": [piece.name for piece in kernel.pieces],
        "problem": str(problem),
        "error": worst,
        "error_limit": allowed,
        "right": worst <= allowed and equal,
    }


def moved(device: torch.device, n: int = 250, k: int = 1016) -> dict[str, Any]:
    """Repack codes from bytes, and from rows, into the order of fragments, and back: bit for bit as without a kernel."""
    form, arch = named("int4_g128"), ARCHES["sm_90"]
    rows, order = layouts.dense(n, k, form.bits), layout_for(form, arch, n, k)
    codes = torch.randint(0, 2**form.bits, (n, k), dtype=torch.uint8)
    plain = layouts.matrix({"n": n, "k": k}, 8)
    held = {plain: codes.reshape(-1), rows: repack.packed(codes, rows), order: repack.packed(codes, order)}
    equal, kernels = True, set()
    for source, target in ((plain, order), (rows, order), (order, rows)):
        kernel = permute.kernel(source, target, n, k)
        repack.STARTS[kernel.source, device] = launch.loaded(kernel, kernel.pieces[0], device)  # also for few codes
        kernels.update(piece.name for piece in kernel.pieces)
        for _ in range(LAUNCHES):
            found = repack.by_kernel(held[source].to(device), source, target, n, k)
            equal &= found is not None and torch.equal(found.cpu(), held[target])
    return {"template": permute.SCHEDULE.template, "kernels": sorted(kernels), "right": equal}


@triton.jit
def planted_read(data_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A fault: some of what it reads is past the end, and nobody has written the rest."""
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(data_ptr + at))


@triton.jit
def planted_race(out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A fault: all warps write one word of shared memory, and read it, without a barrier."""
    lane = tl.arange(0, BLOCK)
    race: tl.constexpr = "mov.u32 $0, 0;\nst.shared.b32 [$0], $1;\nld.shared.b32 $0, [$0];"
    read = tl.inline_asm_elementwise(race, "=&r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out_ptr, tl.sum(read, axis=0))  # the sum is why the kernel has shared memory


PLANTED = {"memcheck": "planted_read", "initcheck": "planted_read", "racecheck": "planted_race"}
"""What each tool must see, or it sees nothing."""


def plant(device: torch.device) -> None:
    """Launch both faults: they harm nothing but their own memory."""
    out = torch.zeros(1024, dtype=torch.int32).to(device)
    planted_read[(1,)](torch.empty(1000, dtype=torch.int32, device=device), out, 1024)  # type: ignore[index]
    planted_race[(1,)](out, 256)  # type: ignore[index]
    torch.cuda.synchronize()


def run(device: torch.device) -> Iterator[dict[str, Any]]:
    """Every call in turn, then the faults."""
    torch.manual_seed(0)
    for name, ask in asks(launch.arch_of(device)).items():
        yield {"case": name} | called(ask, CASES[name][1], device)
    yield {"case": MOVED} | moved(device)
    plant(device)
    yield {"case": "planted"}


if __name__ == "__main__":
    for line in run(torch.device("cuda", torch.cuda.current_device())):
        print(json.dumps(line), flush=True)
