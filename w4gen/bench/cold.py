"""`w4gen bench --cold`: what a layer costs before its first answer, and after how many calls that is made up for.

Each shape is measured in two processes of its own, one after the other: the first finds empty caches, the second what that left.
A process is `python -m w4gen.bench.cold MxKxN FORMAT DTYPE`, which prints its stages as JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from w4gen import knobs, processes, toolchain
from w4gen.api import parse_shape, problem_of
from w4gen.bench.compare import dense_over, over, sums_in_f32
from w4gen.bench.facts import facts, here
from w4gen.errors import ToolchainError
from w4gen.ir.types import Format
from w4gen.pipeline import compile
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import arch_of, launcher, stored_for
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.weight import Weight

STAGES = ("repack_s", "render_s", "compile_s", "load_s", "first_call_s")
METHOD = (
    "each stage once, by the clock of a process of its own, the GPU waited for: repack (rows to the order that kernels read), "
    "render (the problem to a text), compile (the text to a binary), load (the binary, and Triton's launcher), the first call "
    "after that; first: with empty caches, again: with what the first process left; us and cuBLAS: graph replay, cold copies, "
    "median; calls: after so many the time saved over cuBLAS has paid for all stages"
)


def timed(stage: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a stage, the GPU waited for, and what it gave."""
    start = time.perf_counter()
    found = stage()
    torch.cuda.synchronize()
    return round(time.perf_counter() - start, 4), found


@sums_in_f32()
def stages(shape: str, format: str, dtype: str) -> dict[str, Any]:
    """What this process spends on a layer before its first answer, in seconds, and what a call takes, in microseconds."""
    (m, k, n), device = parse_shape(shape), here()
    problem = problem_of(m=m, n=n, k=k, format=Format.parse(format), dtype_name=dtype)
    w = Weight.from_float(torch.randn(n, k, device=device) * 0.02, problem.format)
    x = torch.randn(m, k, device=device).to(torch_dtype(problem.x))
    stored_for(w.clone(), device)  # what PyTorch loads for it once is no repacking
    repack_s, packed = timed(lambda: stored_for(w, device))
    render_s, kernel = timed(lambda: compile(problem, arch_of(device)))
    compile_s, _ = timed(lambda: toolchain.build(kernel, arch_of(device)))
    load_s, _ = timed(lambda: launcher(kernel, device))
    first_call_s, _ = timed(over(x, packed))
    spent = dict(zip(STAGES, (repack_s, render_s, compile_s, load_s, first_call_s), strict=True))
    dense = w.dequantize(x.dtype)
    ours = time_calls([over(x, packed) for _ in range(copies_for(w.nbytes, device))])
    plain = time_calls([dense_over(x, dense) for _ in range(copies_for(dense.nbytes, device))])
    return spent | {"us": round(ours.us, 3), "cublas_us": round(plain.us, 3), "format": problem.format.label}


def started(shape: str, format: str | Format, dtype: str, cache: str) -> dict[str, Any]:
    """The stages in a process of its own, whose caches are in the folder `cache`. Raises `ToolchainError` where it fails."""
    form = str(problem_of(m=1, n=1, k=1, format=format).format)
    environment = processes.environment(**{knobs.CACHE.name: cache, "TRITON_CACHE_DIR": f"{cache}/triton"})
    command = processes.module("w4gen.bench.cold", shape, form, dtype)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = next(iter(reversed(done.stderr.strip().splitlines())), "")
        raise ToolchainError(f"{shape} in {form} was not measured, as its process ended with {done.returncode}: {last[:200]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def amortized(first: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """How many calls make up for the stages of the two processes; None where a call saves nothing."""
    saved = again["cublas_us"] - again["us"]
    spent = {name: sum(each[stage] for stage in STAGES) for name, each in (("first", first), ("again", again))}
    calls = {f"break_even_{name}": math.ceil(seconds * 1e6 / saved) if saved > 0 else None for name, seconds in spent.items()}
    return {"saved_us": round(saved, 3), **{f"{name}_s": round(seconds, 3) for name, seconds in spent.items()}, **calls}


def cold(
    shapes: Sequence[str],
    formats: Sequence[str | Format] = ("int4_g128",),
    kinds: Sequence[str] = ("float16",),
    progress: Callable[[dict[str, Any]], Any] = lambda row: None,
) -> dict[str, Any]:
    """What shapes `MxKxN` cost before their first answer on the GPU present, and when it has paid; `progress` is told each."""
    rows: list[dict[str, Any]] = []
    for kind, form, shape in itertools.product(kinds, formats, shapes):
        (m, k, n) = parse_shape(shape)
        with tempfile.TemporaryDirectory(prefix="w4gen-cold-") as cache:
            first, again = (started(shape, form, kind, cache) for _ in range(2))
        asked = {"m": m, "k": k, "n": n, "format": again["format"], "dtype": kind}
        rows.append(asked | {"first": first, "again": again} | amortized(first, again))
        progress(rows[-1])
    return facts("w4gen.cli") | {"method": METHOD, "amortized": rows}


if __name__ == "__main__":
    print(json.dumps(stages(*sys.argv[1:])))
