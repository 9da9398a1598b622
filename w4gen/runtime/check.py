"""What a rendered file does when it is run: check itself against the truth, and on a GPU time itself.

Without a GPU the kernel runs under Triton's interpreter, in a process of its own, as that mode must be chosen before triton
is imported; of a large grid the first programs run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from w4gen import toolchain
from w4gen.codegen.render import Kernel, read
from w4gen.errors import W4Error
from w4gen.ir.types import DType
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import ARGUMENTS, bind
from w4gen.runtime.reference import error, reference
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.weight import Weight
from w4gen.toolchain import interpreted

OUTPUTS = 32
"""Outputs that the interpreter computes at least, in whole programs."""

CALLS = 3


def limit(y: DType) -> float:
    """The relative Frobenius error to the truth that a kernel with f32 sums may have: its output's rounding, and little more."""
    return 3e-4 if y.name == "f16" else 3e-3


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
        error = f"error {self.error:.2e} (limit {self.limit:.0e}) on {self.outputs} of {self.of} outputs"
        return f"{verdict} {self.where}: {error}, {repeats}{time}"


def random_call(kernel: Kernel, m: int, device: torch.device) -> tuple[torch.Tensor, Weight, torch.Tensor | None]:
    """Fresh x [m, K], weight and bias for a kernel."""
    problem = kernel.problem
    form, kind = problem.format, torch_dtype(problem.x)
    codes = torch.randint(0, 2**form.bits, (problem.n, problem.k), device=device, dtype=torch.uint8)
    scales = torch.rand(problem.n, form.groups(problem.k), device=device) * 0.02 + 0.005
    layout = kernel.program.tile("codes.stored").layout
    w = Weight.from_codes(codes, scales.to(torch_dtype(form.scale)), None, form, layout)
    x = torch.randn(m, problem.k, device=device).to(kind)
    return x, w, torch.randn(problem.n, device=device).to(kind) if problem.bias else None


def check(kernel: Kernel) -> Report:
    """Run a kernel on random data at both ends of its bucket, in the mode this process has, and compare with the truth."""
    device = torch.device("cpu" if interpreted() else "cuda")
    rows = min(kernel.problem.n, _programs(kernel) * kernel.schedule.block_n) if interpreted() else kernel.problem.n
    worst, equal = 0.0, True
    for m in dict.fromkeys(kernel.problem.m):
        x, w, bias = random_call(kernel, m, device)
        run = _first_programs(kernel) if interpreted() else bind(kernel)
        results = [run(x, w, bias)[:, :rows] for _ in range(CALLS)]
        equal &= all(torch.equal(results[0], each) for each in results)
        truth = reference(x, w, bias)[:, :rows]
        worst = max(worst, error(results[0], truth)) if not results[0].isnan().any() else float("nan")
    where = "under the interpreter" if interpreted() else f"on {torch.cuda.get_device_name()}"
    us = None if interpreted() else _time(kernel)
    return Report(worst, limit(kernel.problem.y), rows, kernel.problem.n, where, equal, us)


def _programs(kernel: Kernel) -> int:
    return min(kernel.grid, max(2, -(-OUTPUTS // kernel.schedule.block_n)))


def _first_programs(kernel: Kernel):  # type: ignore[no-untyped-def]
    """The kernel over the first programs of its grid only."""
    launch = toolchain.function(kernel)[(_programs(kernel),)]

    def run(x: torch.Tensor, w: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        y = torch.full((x.shape[0], kernel.problem.n), torch.nan, dtype=torch_dtype(kernel.problem.y))
        given = dict(zip(ARGUMENTS, (y, x, w.codes, w.scale, w.codebook, bias, x.shape[0]), strict=True))
        launch(*[given[name] for name in kernel.arguments])
        return y

    return run


def _time(kernel: Kernel) -> float:
    x, w, bias = random_call(kernel, kernel.problem.m[0], torch.device("cuda"))
    copies = [w.clone() for _ in range(copies_for(w.nbytes, x.device))]
    run = bind(kernel)
    return time_calls([lambda each=each: run(x, each, bias) for each in copies]).us  # type: ignore[misc]


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
