"""`python -m w4gen.bench.host`: host time of eager calls, w4gen.Linear against nn.Linear in one interleaved run, as JSON.

What is timed is what Python and the driver do for a call. Nothing waits for the GPU but a synchronization after each turn of a
hundred calls, so its queue never fills.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from w4gen.api import parse_shape
from w4gen.bench.facts import facts
from w4gen.bench.results import write
from w4gen.ir.types import dtype as named_dtype
from w4gen.runtime import eager, launch
from w4gen.runtime.dtypes import TORCH
from w4gen.runtime.linear import Linear
from w4gen.runtime.ops import VERSION

LAYERS = ("1536x256", "1536x8960", "4096x4096", "4096x14336")
TURN = 100
"""Calls between two synchronizations."""


def turns(calls: Mapping[str, Callable[[], object]], rounds: int, wait: Callable[[], object]) -> dict[str, float]:
    """Microseconds of the host for each call: medians of `rounds` turns, in each of which all of `calls` have theirs."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(rounds + 1), calls.items()):
        wait()
        start = time.perf_counter()
        for _ in range(TURN):
            call()
        taken[name].append((time.perf_counter() - start) / TURN * 1e6)
    wait()
    return {name: round(statistics.median(times[1:]), 3) for name, times in taken.items()}


def measure(m: int, k: int, n: int, form: str, kind: torch.dtype, device: torch.device, rounds: int = 15) -> dict[str, Any]:
    """One row: what a call costs the host by each door, and what the short way spends where, if there is one."""
    plain = torch.nn.Linear(k, n, bias=False, dtype=kind, device=device)
    layer, x = Linear.from_float(plain, form), torch.randn(m, k, device=device).to(kind)
    how = n, str(layer.format), str(layer.layout)
    weight, rest = list(layer.weight.buffers), (*how, False, "", None, VERSION)
    with torch.inference_mode():
        expected = [layer(x), layer(x)]  # the first by the op
        found = eager.known(x, *how, None, False, "", None)
        if found is None:
            raise click.ClickException(f"{m}x{k}x{n} in {form} has no kernel: w4gen explain says why")
        bound, w = launch.bind(found.kernel), layer.weight
        doors = {
            "nn.Linear": lambda: plain(x),
            "w4gen.Linear": lambda: layer(x),
            "op": lambda: torch.ops.w4gen.linear(x, weight, None, *rest),
            "bound kernel": lambda: bound(x, w),
        }
        wait = torch.cuda.synchronize if device.type == "cuda" else time.perf_counter
        spent = turns({**doors, **(parts(layer, x, found) if layer._calls else {})}, rounds, wait)
        equal = torch.equal(*expected) and torch.equal(layer(x), doors["op"]())
    us = {name: spent.pop(name) for name in doors}
    share = round(us["w4gen.Linear"] / us["nn.Linear"], 3)
    asked = {"m": m, "k": k, "n": n, "format": layer.format.label, "dtype": str(kind).removeprefix("torch.")}
    return asked | {"us": us, "share": share, "spent_us": spent, "equal": equal}


def parts(layer: Linear, x: torch.Tensor, found: launch.Launch) -> dict[str, Callable[[], object]]:
    """What a short call is made of, each part alone."""
    identity, (call,), m = torch.nn.Identity(), layer._calls.values(), x.shape[0]
    y, device = torch.empty(m, layer.out_features, dtype=x.dtype, device=x.device), x.device
    start, grid = found.ways[True in found.ways][0], found.grid(m)[0]
    given = y.data_ptr(), x.data_ptr(), *(each.data_ptr() for each in layer.weight.buffers), m
    flags, empty, sizes = start.flags, eager.EMPTY[device.type], tuple(y.shape)
    return {
        "a module's call": lambda: identity(x),
        "eager.plain": lambda: eager.plain(x),
        "look-up": lambda: layer._calls.get((x.shape, x.dtype, x.device, layer.activation, layer.batch_invariant)),
        "prepared call": lambda: call(x, layer._buffers),
        "of which y": lambda: empty(sizes, y.stride(), y.dtype),
        "of which the stream": lambda: launch.current_stream(launch.current_device()),
        "of which the launch": lambda: start.start(*grid, launch.current_stream(device.index), *flags, *given),
    }


def told(row: dict[str, Any]) -> str:
    """A row in two lines."""
    times = [" ".join(f"{name} {us:.2f}" for name, us in row[each].items()) for each in ("us", "spent_us")]
    return f"{row['m']}x{row['k']}x{row['n']} {row['format']} {row['dtype']}: {times[0]} us, {row['share']} x\n    {times[1]}"


@click.command()
@click.option("--layer", "layers", multiple=True, default=LAYERS, show_default=True, help="KxN (inputs x outputs), repeatable")
@click.option("--m", "tokens", multiple=True, type=int, default=(1, 8), show_default=True, help="rows of x, repeatable")
@click.option("--format", "forms", multiple=True, default=("int4_g128",), show_default=True)
@click.option("--dtype", "kinds", multiple=True, default=("float16", "bfloat16"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write")
def main(layers: tuple[str, ...], tokens: tuple[int, ...], forms: tuple[str, ...], kinds: tuple[str, ...], out: Path) -> None:
    """Measure the host's time on the machine with a GPU that this is, and write what was measured."""
    if not torch.cuda.is_available():
        raise click.ClickException("a call costs what it costs with a GPU, and there is none here: run this where there is one")
    rows, device = [], torch.device("cuda", torch.cuda.current_device())
    for kind, form, layer, m in itertools.product(kinds, forms, layers, tokens):
        rows.append(row := measure(*parse_shape(f"{m}x{layer}"), form, TORCH[named_dtype(kind)], device))
        click.echo(told(row))
        method = f"median of turns of {TURN} calls, all doors in each round, a synchronization between turns"
        write(out, facts("w4gen.bench.host") | {"method": method, "rows": rows})


if __name__ == "__main__":
    main()
