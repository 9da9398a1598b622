"""`python -m w4gen.bench.backward`: the gradient dX = dY W from the stored weight against torch.mm in 16 bits, as JSON.

Every row is checked where it is timed: the error to the f64 truth, 40 launches equal bit for bit into poisoned outputs, and the
memory that a call takes beyond its inputs and its output.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from w4gen.api import parse_shape
from w4gen.bench.compare import REPEATS, random_weight, sums_in_f32
from w4gen.bench.contenders import ROUNDS
from w4gen.bench.facts import facts
from w4gen.bench.floors import floor
from w4gen.bench.results import write
from w4gen.codegen.render import Kernel
from w4gen.errors import W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.rounding import limit
from w4gen.ir.types import dtype as named_dtype
from w4gen.layers import LAYERS
from w4gen.pipeline import made
from w4gen.runtime.dtypes import OURS, TORCH
from w4gen.runtime.launch import arch_of, launcher
from w4gen.runtime.reference import error, reference
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.weight import Weight
from w4gen.schedule.rules import bucket, pick
from w4gen.schedule.schedule import Schedule
from w4gen.toolchain import able


def asked(w: Weight, m: int, kind: torch.dtype, changes: str) -> Kernel:
    """The kernel of a row: the rules' choice with `changes` to its schedule, as in `block_n=64,warps=4`."""
    arch, x = arch_of(w.codes.device), OURS[kind]
    program = lower(Problem(m=bucket(m), n=w.n, k=w.k, format=w.format, layout=w.layout, x=x, y=x, gradient=True))
    return made(program, Schedule.parse(f"{pick(program, able(arch))} {changes.replace(',', ' ')}"), arch)


def extra_bytes(call: Callable[[], torch.Tensor]) -> int:
    """Bytes that a call has in use at its peak beyond what was there and what it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - out.nbytes)


def measure(w: Weight, m: int, kind: torch.dtype, changes: str) -> dict[str, Any]:
    """One row: microseconds of w4gen and of torch.mm, in turns, the error, the repeats, the memory."""
    device, kernel = w.codes.device, asked(w, m, kind, changes)
    launch, dy = launcher(kernel, device), torch.randn(m, w.n, device=device).to(kind)

    def run(each: Weight, poison: bool = False) -> torch.Tensor:
        dx = torch.empty(m, w.k, dtype=kind, device=device)
        dx = dx.fill_(torch.nan) if poison else dx
        launch(dx, dy, *each.buffers, None, m)
        return dx

    first = run(w, poison=True)
    equal = all(torch.equal(run(w, poison=True), first) for _ in range(REPEATS))
    ours = [lambda each=each: run(each) for each in (w.clone() for _ in range(copies_for(w.nbytes, device)))]
    dense = w.dequantize(kind)
    copies = [dense.clone() for _ in range(copies_for(dense.nbytes, device))]
    plain = [lambda each=each: torch.mm(dy, each) for each in copies]
    turns = [(time_calls(ours), time_calls(plain)) for _ in range(ROUNDS)]
    us, cublas = (statistics.median(turn[i].us for turn in turns) for i in (0, 1))
    return {
        "m": m,
        "k": w.k,
        "n": w.n,
        "format": w.format.label,
        "dtype": OURS[kind].name,
        "gradient": True,
        "schedule": str(kernel.schedule),
        "us": round(us, 3),
        "cublas_us": round(cublas, 3),
        "floor_us": round(floor(w.nbytes, device, False).us, 3),
        "ratio": round(us / cublas, 3),
        "spread": round(max(turn[i].spread for turn in turns for i in (0, 1)), 4),
        "extra_bytes": extra_bytes(lambda: run(w)),
        "dense_bytes": dense.nbytes,
        "error": error(first, reference(dy, w, gradient=True)),
        "error_limit": limit(kernel.program, m * w.k),
        "equal_repeats": REPEATS if equal else 0,
    }


def told(row: dict[str, Any]) -> str:
    """A row as one line."""
    shape, checks = f"{row['m']}x{row['n']}x{row['k']}", f"error {row['error']:.2e} (limit {row['error_limit']:.2e})"
    against = f"torch.mm {row['cublas_us']:8.2f} ({row['ratio']:.2f} x its time)"
    memory = f"extra {row['extra_bytes'] / row['dense_bytes']:.1%}"
    return f"{shape:>16} {row['format']:10} {row['us']:8.2f} us  {against}  {checks}  equal {row['equal_repeats']}  {memory}"


@click.command()
@click.option("--layer", "layers", multiple=True, help="KxN (inputs x outputs), repeatable; layers of known models by default")
@click.option("--m", "tokens", multiple=True, type=int, default=(512,), show_default=True, help="rows of dY, repeatable")
@click.option("--format", "formats", multiple=True, default=("int4_g128",), show_default=True)
@click.option("--dtype", "kinds", multiple=True, default=("float16",), show_default=True)
@click.option("--schedule", "changes", multiple=True, default=("",), help="changes to the rules' choice, as block_n=64,warps=4")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write")
@sums_in_f32()
def main(
    layers: tuple[str, ...],
    tokens: tuple[int, ...],
    formats: tuple[str, ...],
    kinds: tuple[str, ...],
    changes: tuple[str, ...],
    out: Path,
) -> None:
    """Time gradients on the GPU present, and write what was measured."""
    if not torch.cuda.is_available():
        raise click.ClickException("times come from GPUs only and there is none here: run this on a machine with one")
    rows = []
    for layer, form in itertools.product(layers or tuple(f"{k}x{n}" for k, n in LAYERS), formats):
        _, k, n = parse_shape(f"1x{layer}")
        w = random_weight(n, k, form, torch.device("cuda", torch.cuda.current_device()))
        for m, kind, change in itertools.product(tokens, kinds, changes):
            try:
                rows.append(measure(w, m, TORCH[named_dtype(kind)], change))
            except W4Error as refused:
                click.echo(f"{m}x{n}x{k} {form} {change}: {refused}")
                continue
            click.echo(told(rows[-1]) + f"  {change}")
        torch.cuda.empty_cache()
    about = {
        "title": "Backward: dX [M, K] = dY [M, N] · w, beside torch.mm",
        "method": "graph replay over rotating copies of the weights (cold L2), median of medians, interleaved with torch.mm",
    }
    write(out, facts("w4gen.bench.backward") | about | {"rows": rows})


if __name__ == "__main__":
    main()
