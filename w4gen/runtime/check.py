"""What a rendered file does when it is run: check itself against the truth, and on a GPU time itself.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own, as that mode must be chosen before triton
is imported; of a large grid the first programs run. A kernel that no interpreter runs (inline PTX, Gluon) is compiled, which
proves that each value is in the lane that reads it, and its portable twin, which reads the same weight, runs in its place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w4gen.codegen.render import Kernel, read
from w4gen.errors import W4Error
from w4gen.ir.layout import Layout
from w4gen.ir.rounding import limit
from w4gen.ir.types import PER_TENSOR, Format
from w4gen.proof import without_gpu
from w4gen.runtime import dtypes
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import launcher
from w4gen.runtime.reference import error, reference, typical
from w4gen.runtime.repack import first_rows
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.weight import Weight
from w4gen.schedule.rewrite import ceil_to
from w4gen.toolchain import interpreted

OUTPUTS = 32
"""Outputs of a row that the interpreter computes at least, in whole programs."""

CALLS = 3
MOST = 160
"""Rows of x at most; a bucket may have no end."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked: the largest error over the bucket's ends, how many outputs, where, whether repeats were equal."""

    error: float
    limit: float
    outputs: int
    of: int
    where: str
    equal: bool
    us: float | None = None
    calls: int = CALLS

    @property
    def passed(self) -> bool:
        return self.error <= self.limit and self.equal

    def __str__(self) -> str:
        verdict = "checked" if self.passed else "WRONG"
        repeats = f"{self.calls} calls {'equal' if self.equal else 'DIFFERENT'} bit for bit"
        time = "" if self.us is None else f", {self.us:.2f} us a call (cold L2, graph)"
        error = f"error {self.error:.1e} (limit {self.limit:.1e}) on {self.outputs} of {self.of} outputs"
        return f"{verdict} {self.where}: {error}, {repeats}{time}"


def random_call(kernel: Kernel, m: int, rows: int, device: torch.device, w: Weight | None = None) -> tuple[Any, ...]:
    """Fresh x [m, K] (of a gradient dY [m, N]), the first `rows` rows of a Weight, stored as the kernel reads them, a bias [N].

    A residual too, if one is asked for. The weight is `w` where it is given: making one takes longer than anything else here.
    """
    problem, stored = kernel.problem, kernel.program.tile("codes.stored").layout
    form, kind = problem.format, torch_dtype(problem.x)
    if stored is not None and rows < problem.n:
        stored = first_rows(stored, rows)
    w = w or random_weight(form, rows, problem.k, stored, device)
    x = torch.randn(m, problem.inputs, device=device).to(kind)
    bias = torch.randn(problem.n, device=device).to(kind) if problem.bias else None
    return x, w, bias, *[torch.randn(m, problem.n, device=device).to(kind)] * problem.residual


def random_weight(form: Format, rows: int, k: int, stored: Layout | None, device: torch.device) -> Weight:
    """Random codes under random scales; scales that are themselves codes are those of normal weights."""
    if form.codebook == PER_TENSOR or any(isinstance(kind, Format) for kind, _ in list(form.parts(rows, k).values())[1:]):
        w = Weight.from_float(torch.randn(rows, k, device=device) * 0.02, form)
        return w if stored is None else w.packed_as(stored)
    numbers = torch.tensor([code for code, value in enumerate(form.values) if math.isfinite(value)], device=device)
    codes = numbers[torch.randint(0, len(numbers), (rows, k), device=device)].to(torch.uint8)
    scales = torch.rand(form.grid(rows, k), device=device) * 0.02 + 0.005
    zeros = random_zeros(form, scales)
    return Weight.from_codes(codes, scales.to(dtypes.torch_dtype(form.scale)), zeros, form, stored)  # type: ignore[arg-type]


def random_zeros(form: Format, scales: torch.Tensor) -> torch.Tensor | None:
    """Zeros [rows, groups] as real weights have them: within the range of the values."""
    if form.zero is None:
        return None
    low, high = min(form.values), max(form.values)
    zeros = torch.rand_like(scales) * (high - low) + low
    zeros = zeros.round() if form.zero_mode == "integer" else zeros * scales if form.zero_after_scale else zeros
    return zeros.to(torch_dtype(form.zero))


def check(kernel: Kernel, calls: int = CALLS, timed: bool = True, w: Weight | None = None) -> Report:
    """Run a kernel on random data at both ends of its bucket, in the mode this process has, and compare with the truth."""
    problem, device = kernel.problem, torch.device("cpu" if interpreted() else "cuda")
    block = kernel.schedule.block_n
    stored = kernel.program.tile("codes.stored").layout
    whole = not interpreted() or stored is None or problem.gradient
    rows = problem.n if whole else min(problem.n, ceil_to(OUTPUTS, block))
    layouts = [kernel.program.tile(name).layout for name in kernel.program.kept]
    # planes lie one after the other: where each starts depends on all rows
    held = problem.n if any(layout is not None and layout.high for layout in layouts) else rows
    launch, outputs = launcher(kernel, device, rows), rows * problem.outputs // problem.n
    worst, bound, equal = 0.0, 0.0, True
    for m in dict.fromkeys((problem.m[0], min(problem.m[1], MOST))):
        x, w, bias, *residual = random_call(kernel, m, held, device, w)
        results = []
        for _ in range(calls):
            y = torch.full((m, problem.outputs), torch.nan, dtype=torch_dtype(problem.y), device=device)
            launch(y, x, *w.buffers, bias, *residual, m)
            results.append(y[:, :outputs])
        equal &= all(torch.equal(results[0], each) for each in results)
        shared = [each[:, :held] for each in residual]
        added = None if bias is None else bias[:held]
        truth = reference(x, w, added, problem.activation, *shared, gradient=problem.gradient)[:, :outputs]
        least = 0.0 if problem.epilogue else typical(x, w, rows, problem.gradient)
        found, allowed = error(results[0], truth, least), limit(kernel.program, m * outputs)
        worst, bound = (found, allowed) if not found <= worst * allowed / (bound or 1) else (worst, bound)
    where = "under the interpreter" if interpreted() else f"on {torch.cuda.get_device_name()}"
    us = _time(kernel) if timed and not interpreted() else None
    return Report(worst, bound, outputs, problem.outputs, where, equal, us, calls)


def _time(kernel: Kernel) -> float:
    problem, device = kernel.problem, torch.device("cuda")
    x, w, bias, *residual = random_call(kernel, problem.m[0], problem.n, device)
    y = torch.empty(problem.m[0], problem.outputs, dtype=torch_dtype(problem.y), device=device)
    launch = launcher(kernel, device)

    def call(each: Weight) -> Callable[[], None]:
        return lambda: launch(y, x, *each.buffers, bias, *residual, problem.m[0])

    return time_calls([call(w.clone()) for _ in range(copies_for(w.nbytes, device))]).us


def main(path: str) -> int:
    """Check the rendered file at `path` (`-`: standard input); print what was found; 0 where it holds, 1 where it is wrong."""
    source = sys.stdin.read() if path == "-" else Path(path).read_text()
    try:
        if not torch.cuda.is_available() and not interpreted():
            done = without_gpu(read(source))
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            return done.returncode
        report = check(read(source))
    except W4Error as error:
        print(f"w4gen: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
