"""What a rendered file does when it is run: check itself against the truth, and on a GPU time itself.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own, as that mode must be chosen before triton
is imported; of a large grid the first programs run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from w4gen.codegen.render import Kernel, read
from w4gen.errors import W4Error
from w4gen.ir.rounding import limit
from w4gen.ir.types import Format
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import launcher
from w4gen.runtime.reference import error, reference, typical
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.weight import Weight
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

    @property
    def passed(self) -> bool:
        return self.error <= self.limit and self.equal

    def __str__(self) -> str:
        verdict = "checked" if self.passed else "WRONG"
        repeats = f"{CALLS} calls {'equal' if self.equal else 'DIFFERENT'} bit for bit"
        time = "" if self.us is None else f", {self.us:.2f} us a call (cold L2, graph)"
        error = f"error {self.error:.1e} (limit {self.limit:.1e}) on {self.outputs} of {self.of} outputs"
        return f"{verdict} {self.where}: {error}, {repeats}{time}"


def random_call(kernel: Kernel, m: int, rows: int, device: torch.device) -> tuple[torch.Tensor, Weight, torch.Tensor | None]:
    """Fresh x [m, K], and the first `rows` rows of a weight and a bias, stored as the kernel reads them."""
    problem, stored = kernel.problem, kernel.program.tile("codes.stored").layout
    form, kind = problem.format, torch_dtype(problem.x)
    codes = torch.randint(0, 2**form.bits, (rows, problem.k), device=device, dtype=torch.uint8)
    scales = torch.rand(rows, form.groups(problem.k), device=device) * 0.02 + 0.005
    if stored is not None and rows < problem.n:
        stored = replace(stored, digits=tuple(replace(d, size=rows) if d.axis == "n" else d for d in stored.digits))
    w = Weight.from_codes(codes, scales.to(torch_dtype(form.scale)), random_zeros(form, scales), form, stored)
    x = torch.randn(m, problem.k, device=device).to(kind)
    return x, w, torch.randn(rows, device=device).to(kind) if problem.bias else None


def random_zeros(form: Format, scales: torch.Tensor) -> torch.Tensor | None:
    """Zeros [rows, groups] as real weights have them: within the range of the values."""
    if form.zero is None:
        return None
    low, high = min(form.values), max(form.values)
    zeros = torch.rand_like(scales) * (high - low) + low
    zeros = zeros.round() if form.zero_mode == "integer" else zeros * scales if form.zero_after_scale else zeros
    return zeros.to(torch_dtype(form.zero))


def check(kernel: Kernel) -> Report:
    """Run a kernel on random data at both ends of its bucket, in the mode this process has, and compare with the truth."""
    problem, device = kernel.problem, torch.device("cpu" if interpreted() else "cuda")
    block = kernel.schedule.block_n
    stored = kernel.program.tile("codes.stored").layout
    whole = not interpreted() or stored is None or stored.row_units() is None
    rows = problem.n if whole else min(problem.n, -(-OUTPUTS // block) * block)
    launch = launcher(kernel, device, rows)
    worst, bound, equal = 0.0, 0.0, True
    for m in dict.fromkeys((problem.m[0], min(problem.m[1], MOST))):
        x, w, bias = random_call(kernel, m, rows, device)
        results = []
        for _ in range(CALLS):
            y = torch.full((m, problem.n), torch.nan, dtype=torch_dtype(problem.y), device=device)
            launch(y, x, *w.buffers, bias, m)
            results.append(y[:, :rows])
        equal &= all(torch.equal(results[0], each) for each in results)
        found = error(results[0], reference(x, w, bias), typical(x, w))
        allowed = limit(kernel.program, m * rows)
        worst, bound = (found, allowed) if not found <= worst * allowed / (bound or 1) else (worst, bound)
    where = "under the interpreter" if interpreted() else f"on {torch.cuda.get_device_name()}"
    us = None if interpreted() else _time(kernel)
    return Report(worst, bound, rows, problem.n, where, equal, us)


def _time(kernel: Kernel) -> float:
    problem, device = kernel.problem, torch.device("cuda")
    x, w, bias = random_call(kernel, problem.m[0], problem.n, device)
    y = torch.empty(problem.m[0], problem.n, dtype=torch_dtype(problem.y), device=device)
    launch = launcher(kernel, device)

    def call(each: Weight) -> Callable[[], None]:
        return lambda: launch(y, x, *each.buffers, bias, problem.m[0])

    return time_calls([call(w.clone()) for _ in range(copies_for(w.nbytes, device))]).us


def main(path: str) -> int:
    """Check the rendered file at `path` (`-`: standard input); print what was found; 0 where it holds, 1 where it is wrong."""
    source = sys.stdin.read() if path == "-" else Path(path).read_text()
    if not torch.cuda.is_available() and not interpreted():
        command = [sys.executable, "-m", "w4gen.runtime.check", "-"]
        return subprocess.run(
            command, input=source, env={**os.environ, "TRITON_INTERPRET": "1"}, text=True, check=False
        ).returncode
    try:
        report = check(read(source))
    except W4Error as error:
        print(f"w4gen: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
