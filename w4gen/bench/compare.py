"""`w4gen bench`: w4gen against cuBLAS, against dequantizing first, and against peers, in one interleaved run, as JSON.

Every row is checked where it is timed: the error to the f64 truth on fresh data, and 40 launches equal bit for bit into
poisoned outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from w4gen import ahead
from w4gen.api import problem_of
from w4gen.bench.contenders import Contender, answering, contender, host_us, once_us, rows, timed
from w4gen.bench.facts import facts, here
from w4gen.bench.floors import floor
from w4gen.bench.noise import checked, too_fast
from w4gen.bench.peers import PEERS, Given, Peer, chosen
from w4gen.ir.rounding import limit
from w4gen.ir.types import Format
from w4gen.ir.types import dtype as named_dtype
from w4gen.layers import shapes
from w4gen.runtime.dtypes import OURS, TORCH
from w4gen.runtime.launch import arch_of, bind, launcher, stored_for
from w4gen.runtime.linear import Linear
from w4gen.runtime.reference import error, reference
from w4gen.runtime.timer import copies_for
from w4gen.runtime.weight import Weight
from w4gen.schedule.rules import BUCKETS
from w4gen.schedule.stored import layout_for

REPEATS = 40
LARGEST = BUCKETS[-1][0]
"""Rows of x whose kernel dequantizes the weight and multiplies it."""
METHOD = (
    "us: graph replay over rotating copies of the weights (cold L2), median of medians, all in turns; host_us: of an eager call, "
    "medians of turns; first_s: packing and the first call, with what is compiled and tuned for it; compile_s: what of it "
    "w4gen's compiler took beforehand, in a process beside others, none where the cache had the kernel (w4gen tunes in no call); "
    "error: to f64"
)


def random_weight(n: int, k: int, format: str | Format, device: torch.device) -> Weight:
    """A weight quantized from normal data, in the layout of the device."""
    return stored_for(Weight.from_float(torch.randn(n, k, device=device) * 0.02, format), device)


def asked(m: int, k: int, n: int, format: str | Format, dtype: str) -> ahead.Ask:
    """The kernel of a row."""
    arch, problem = arch_of(torch.device("cuda")), problem_of(m=m, n=n, k=k, format=format, dtype_name=dtype)
    return ahead.Ask(replace(problem, layout=layout_for(problem.format, arch, n, k)), arch)


def dequantized(w: Weight, dtype: str) -> Callable[[torch.Tensor, Weight], torch.Tensor]:
    """Dequantize and multiply, whatever the M, what is stored as `w` is: what the kernel for the largest M does."""
    launch = launcher(asked(LARGEST, w.k, w.n, w.format, dtype).kernel(), w.codes.device)

    def call(x: torch.Tensor, each: Weight) -> torch.Tensor:
        y = torch.empty(x.shape[0], each.n, dtype=x.dtype, device=x.device)
        launch(y, x, *each.buffers, None, x.shape[0])
        return y

    return call


def measure(
    m: int,
    k: int,
    n: int,
    format: str | Format,
    dtype: str,
    device: torch.device,
    peers: Sequence[Peer] = PEERS,
    compile_s: float | None = None,
) -> dict[str, Any]:
    """One row: microseconds of w4gen, cuBLAS, the others and the floor, the errors, the repeats.

    compile_s: what compiling the kernel took, where it was not there before.
    """
    kind = TORCH[named_dtype(dtype)]
    w = random_weight(n, k, format, device)
    x = torch.randn(m, k, device=device).to(kind)
    kernel, truth = asked(m, k, n, format, dtype).kernel(), reference(x, w)
    run = bind(kernel)  # into an output poisoned with NaN, each time
    first = run(x, w)
    equal = all(torch.equal(run(x, w), first) for _ in range(REPEATS))
    given = Given.of(w)
    dense = given.dense.to(kind)
    few = copies_for(w.nbytes, device)
    ours = contender("w4gen", partial(packed, x, w.parts(), w.format), few, truth, partial(over, x, w))
    cublas = contender("cuBLAS", partial(dense_over, x, dense), copies_for(dense.nbytes, device), truth)
    name, multiply = "dequantize, matmul", dequantized(w, dtype)
    others: dict[str, Contender | str] = {name: contender(name, lambda: partial(multiply, x, w.clone()), few, truth)}
    others |= answering(peers, given, x, truth, w.nbytes, once_us(cublas.calls[0]))
    there = [ours, cublas, *(each for each in others.values() if isinstance(each, Contender))]
    times, spent = timed(there), host_us(there, m)
    least, dense_least = floor(w.nbytes, device, bool(kernel.schedule.overlap)), floor(dense.nbytes, device, False)
    return {
        "m": m,
        "k": k,
        "n": n,
        "format": w.format.label,
        "dtype": OURS[kind].name,
        "schedule": str(kernel.schedule),
        "us": round(times["w4gen"].us, 3),
        "cublas_us": round(times["cuBLAS"].us, 3),
        "floor_us": round(least.us, 3),
        "dense_floor_us": round(dense_least.us, 3),
        "spread": round(max(times[name].spread for name in ("w4gen", "cuBLAS")), 4),
        "floor_spread": round(least.spread, 4),
        "bytes": w.nbytes,
        "error": error(first, truth),
        "error_limit": limit(kernel.program, m * n),
        "equal_repeats": REPEATS if equal else 0,
        "first_s": round(ours.first_s + (compile_s or 0.0), 3),
        "compile_s": compile_s,
        "host_us": spent.get("w4gen"),
        "cublas_host_us": spent.get("cuBLAS"),
        "others": rows(others, times, spent),
    }


def packed(x: torch.Tensor, parts: Mapping[str, torch.Tensor], format: Format) -> Callable[[], torch.Tensor]:
    """A call of w4gen over a weight that is packed for it."""
    layer = Linear(stored_for(Weight.from_parts(parts, format), x.device))
    return lambda: layer(x)


def over(x: torch.Tensor, w: Weight) -> Callable[[], torch.Tensor]:
    """A call of w4gen over a copy of a weight."""
    layer = Linear(w.clone())
    return lambda: layer(x)


def dense_over(x: torch.Tensor, dense: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A call of cuBLAS over a copy of a weight."""
    layer = torch.nn.Linear(*reversed(dense.shape), bias=False, device="meta")
    layer.weight = torch.nn.Parameter(dense.clone(), requires_grad=False)
    return lambda: layer(x)


def told(shape: str, row: dict[str, Any]) -> str:
    """A row as one line, and one for each of the others."""
    us, cublas, least = row["us"], row["cublas_us"], row["floor_us"]
    against = f"cuBLAS {cublas:8.2f} ({cublas / us:.2f} x)  floor {least:7.2f} ({least / us:.0%})"
    lines = [f"{shape:>14} {row['format']:10} {us:8.2f} us  {against}  error {row['error']:.2e}  equal {row['equal_repeats']}"]
    for each in row["others"]:
        figures = each.get("why") or f"{each['us']:8.2f} us ({cublas / each['us']:.2f} x cuBLAS)  error {each['error']:.2e}"
        lines.append(f"{'':>14} {each['name']:18} {figures}")
    return "\n".join([*lines, *(f"{'':>14} {each}" for each in too_fast({"rows": [row]}))])


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
    peers: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Compare with others on the GPU present: for each layer `KxN`, M, format and type of x a row; `progress` is told each.

    With no layers, `count` random ones, or those of known models; peers by name, all with None. Ctrl-C ends it with the rows
    that there are. Raises `W4Error` where a shape has no kernel.
    """
    them = chosen(peers)
    asks = [(*shape, form, kind) for kind, form, shape in itertools.product(kinds, formats, shapes(layers, count, tokens))]
    made = ahead.needed(asked(rows, *ask[1:]) for ask in asks for rows in (ask[0], LARGEST))  # before times are taken
    found = []
    device = here()
    try:
        for ask in asks:
            done = made[asked(*ask)]
            found.append(row := measure(*ask, device, them, None if done.cached else round(done.seconds, 3)))
            progress(told("x".join(map(str, ask[:3])), row))
            torch.cuda.empty_cache()
    except KeyboardInterrupt:
        progress(f"stopped: {len(found)} of {len(asks)} rows are kept")
    return checked(facts("w4gen.cli") | {"method": METHOD, "rows": found})
