"""`w4gen bench`: w4gen against cuBLAS fp16 over shapes, formats and M, in one interleaved run, as JSON.

Every row is checked where it is timed: the error to the f64 truth on fresh data, and 40 launches equal bit for bit into
poisoned outputs.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from w4gen import ahead
from w4gen.api import parse_shape, problem_of
from w4gen.bench.facts import facts
from w4gen.bench.floors import floor
from w4gen.ir.rounding import limit
from w4gen.ir.types import Format
from w4gen.ir.types import dtype as named_dtype
from w4gen.runtime.dtypes import OURS, TORCH
from w4gen.runtime.launch import arch_of, bind, stored_for
from w4gen.runtime.linear import linear
from w4gen.runtime.reference import error, reference
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.weight import Weight
from w4gen.schedule.stored import layout_for

LAYERS = (
    (8192, 28672), (28672, 8192), (8192, 8192), (4096, 14336), (14336, 4096), (4096, 4096),
    (1536, 8960), (8960, 1536), (1536, 1536), (1536, 256),
)  # fmt: skip
"""(K, N) of the layers that are measured: of Llama 3.1 70B and 8B, and of Qwen2.5 1.5B."""
REPEATS = 40
ROUNDS = 3


def random_layers(count: int) -> tuple[str, ...]:
    """Layers whose sizes are spread evenly over the powers of two, always the same."""
    draw = random.Random(0)
    return tuple("x".join(str(8 * round(2 ** draw.uniform(3, 12))) for _ in range(2)) for _ in range(count))


def random_weight(n: int, k: int, format: str | Format, device: torch.device) -> Weight:
    """A weight quantized from normal data, in the layout of the device."""
    return stored_for(Weight.from_float(torch.randn(n, k, device=device) * 0.02, format), device)


def asked(m: int, k: int, n: int, format: str | Format, dtype: str) -> ahead.Ask:
    """The kernel of a row."""
    arch, problem = arch_of(torch.device("cuda")), problem_of(m=m, n=n, k=k, format=format, dtype_name=dtype)
    return ahead.Ask(replace(problem, layout=layout_for(problem.format, arch, n, k)), arch)


def measure(m: int, k: int, n: int, format: str | Format, dtype: str) -> dict[str, Any]:
    """One row: microseconds of w4gen, cuBLAS and the floor, the error, the repeats."""
    device, kind = torch.device("cuda"), TORCH[named_dtype(dtype)]
    w = random_weight(n, k, format, device)
    x = torch.randn(m, k, device=device).to(kind)
    kernel = asked(m, k, n, format, dtype).kernel()
    run = bind(kernel)  # into an output poisoned with NaN, each time
    first = run(x, w)
    equal = all(torch.equal(run(x, w), first) for _ in range(REPEATS))
    ours = [lambda each=each: linear(x, each) for each in (w.clone() for _ in range(copies_for(w.nbytes, device)))]
    dense = torch.randn(n, k, device=device).to(kind)
    copies = [dense.clone() for _ in range(copies_for(dense.nbytes, device))]
    plain = [lambda each=each: torch.nn.functional.linear(x, each) for each in copies]
    turns = [(time_calls(ours), time_calls(plain)) for _ in range(ROUNDS)]
    us, cublas = (statistics.median(turn[i].us for turn in turns) for i in (0, 1))
    least = floor(w.nbytes, device, bool(kernel.schedule.overlap)).us
    return {
        "m": m,
        "k": k,
        "n": n,
        "format": w.format.label,
        "dtype": OURS[kind].name,
        "schedule": str(kernel.schedule),
        "us": round(us, 3),
        "cublas_us": round(cublas, 3),
        "floor_us": round(least, 3),
        "spread": round(max(turn[i].spread for turn in turns for i in (0, 1)), 4),
        "bytes": w.nbytes,
        "error": error(first, reference(x, w)),
        "error_limit": limit(kernel.program, m * n),
        "equal_repeats": REPEATS if equal else 0,
    }


def told(shape: str, row: dict[str, Any]) -> str:
    """A row as one line."""
    us, cublas, least = row["us"], row["cublas_us"], row["floor_us"]
    against = f"cuBLAS {cublas:8.2f} ({cublas / us:.2f} x)  floor {least:7.2f} ({least / us:.0%})"
    return f"{shape:>14} {row['format']:10} {us:8.2f} us  {against}  error {row['error']:.2e}  equal {row['equal_repeats']}"


@contextmanager
def sums_in_f32() -> Iterator[None]:
    """cuBLAS adds up f16 products in f32 throughout, as our kernels do; the switch is the process's, and is set back."""
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = allowed


@sums_in_f32()
def compare(
    layers: Sequence[str] = (),
    count: int = 0,
    tokens: Sequence[int] = (1, 8),
    formats: Sequence[str | Format] = ("int4_g128",),
    kinds: Sequence[str] = ("float16",),
    progress: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Compare with cuBLAS on the GPU present: for each layer `KxN`, M, format and type of x a row; `progress` is told each.

    With no layers, `count` random ones, or those of known models. Raises `W4Error` where a shape has no kernel.
    """
    chosen = layers or random_layers(count) or tuple(f"{k}x{n}" for k, n in LAYERS)
    asks = itertools.product(kinds, formats, chosen, tokens)
    shapes = [(*parse_shape(f"{m}x{layer}"), form, kind) for kind, form, layer, m in asks]
    ahead.needed(asked(*shape) for shape in shapes)  # side by side, before anything is timed
    rows = []
    for shape in shapes:
        rows.append(row := measure(*shape))
        progress(told("x".join(map(str, shape[:3])), row))
        torch.cuda.empty_cache()
    method = "graph replay over rotating copies of the weights (cold L2), median of medians, interleaved with cuBLAS"
    return facts("w4gen.cli") | {"method": method, "rows": rows}
