"""`python -m w4gen.bench.invariant`: what batch-invariant calls cost, beside ordinary ones in one interleaved run, as JSON.

Every row is checked where it is timed: the error to the f64 truth, and that rows called alone have the same bits as together.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import click
import torch

from w4gen.api import parse_shape
from w4gen.bench.compare import random_weight
from w4gen.bench.contenders import ROUNDS
from w4gen.bench.facts import facts
from w4gen.bench.results import write
from w4gen.ir.types import dtype as named_dtype
from w4gen.runtime.dtypes import OURS, TORCH
from w4gen.runtime.linear import linear
from w4gen.runtime.reference import error, reference
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.weight import Weight

LAYERS = ("1536x1536", "4096x14336", "14336x4096", "8192x8192")


def alike(x: torch.Tensor, w: Weight, y: torch.Tensor) -> bool:
    """Whether the first, the middle and the last row of x, called alone and by halves, have the bits that they have in y."""
    m = x.shape[0]
    parts = [slice(at, at + 1) for at in (0, m // 2, m - 1)] + [slice(0, -(-m // 2)), slice(m // 2, m)]
    return all(torch.equal(linear(x[each], w, batch_invariant=True), y[each]) for each in parts)


def measure(m: int, k: int, n: int, form: str, kind: torch.dtype, device: torch.device) -> dict[str, Any]:
    """One row: microseconds of an ordinary call and of a batch-invariant one, in turns, and what the latter gives."""
    w, x = random_weight(n, k, form, device), torch.randn(m, k, device=device).to(kind)
    y = linear(x, w, batch_invariant=True)
    copies = [w.clone() for _ in range(copies_for(w.nbytes, device))]
    ways = [[lambda each=each, way=way: linear(x, each, batch_invariant=way) for each in copies] for way in (False, True)]
    turns = [[time_calls(calls) for calls in ways] for _ in range(ROUNDS)]
    us, invariant_us = (statistics.median(turn[way].us for turn in turns) for way in (0, 1))
    return {
        "m": m,
        "k": k,
        "n": n,
        "format": w.format.label,
        "dtype": OURS[kind].name,
        "us": round(us, 3),
        "invariant_us": round(invariant_us, 3),
        "cost": round(invariant_us / us, 3),
        "spread": round(max(each.spread for turn in turns for each in turn), 4),
        "error": error(y, reference(x, w)),
        "alike": alike(x, w, y),
    }


def told(row: dict[str, Any]) -> str:
    """A row as one line."""
    asked = f"{row['m']}x{row['k']}x{row['n']} {row['format']} {row['dtype']}"
    bits = "rows alike" if row["alike"] else "ROWS DIFFER"
    return f"{asked}: {row['us']:.2f} us, batch-invariant {row['invariant_us']:.2f} ({row['cost']:.2f} x), {bits}"


@click.command()
@click.option("--layer", "layers", multiple=True, default=LAYERS, show_default=True, help="KxN (inputs x outputs), repeatable")
@click.option("--m", "tokens", multiple=True, type=int, default=(1, 8, 16, 64, 256, 1024), show_default=True, help="repeatable")
@click.option("--format", "forms", multiple=True, default=("int4_g128",), show_default=True, help="repeatable")
@click.option("--dtype", "kinds", multiple=True, default=("float16",), show_default=True, help="of x and y, repeatable")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write")
def main(layers: tuple[str, ...], tokens: tuple[int, ...], forms: tuple[str, ...], kinds: tuple[str, ...], out: Path) -> None:
    """Measure what batch invariance costs on the GPU here, and write what was measured."""
    if not torch.cuda.is_available():
        raise click.ClickException("times come from GPUs only and there is none here: run this on a machine with one")
    rows, device = [], torch.device("cuda", torch.cuda.current_device())
    for form, kind, layer, m in itertools.product(forms, kinds, layers, tokens):
        rows.append(row := measure(*parse_shape(f"{m}x{layer}"), form, TORCH[named_dtype(kind)], device))
        click.echo(told(row))
    method = "graph replay over rotating copies of the weights (cold L2), median of medians, both kinds of call in turns"
    write(out, facts("w4gen.bench.invariant") | {"title": "What batch invariance costs", "method": method, "invariant": rows})


if __name__ == "__main__":
    main()
