"""`python -m w4gen.bench.first`: how long first calls take, with an empty cache and with a full one, and compiles ahead, as JSON.

First calls are timed in processes that have imported torch and triton and used the GPU: from the call until the GPU is done, and
apart from it what importing w4gen and making the layer took. The first process finds an empty cache, the second a full one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from w4gen import ahead, knobs, processes
from w4gen.api import parse_shape, problem_of
from w4gen.bench.facts import facts
from w4gen.bench.results import write
from w4gen.errors import ToolchainError
from w4gen.layers import layers, read
from w4gen.runtime.launch import arch_of
from w4gen.runtime.linear import Linear
from w4gen.schedule.arch import arch as named

SHAPES = ("1x1536x1536", "16x1536x1536", "64x4096x4096", "300x4096x4096", "1x8192x8192")
MODEL, ROWS = "Llama-3.1-8B", (1, 8, 16, 32, 64, 128, 256)
"""Four layers but for the head, each in seven buckets: 28 kernels."""

FIRST = """import sys, time, torch, triton
torch.zeros(8, device=sys.argv[1]).sum().item()
start = time.perf_counter()
import w4gen
w4gen.Linear
seconds = time.perf_counter() - start
from w4gen.bench import first
first.tell(seconds, *sys.argv[1:])
"""
WARM = """import sys
from w4gen.bench import first
first.tell_warmed(*sys.argv[1:])
"""


def tell(import_s: float, device: str, form: str, *shapes: str) -> None:
    """Print, as JSON, what the first calls of some shapes take, in this process."""
    wait = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    rows = []
    for shape in shapes:
        m, k, n = parse_shape(shape)
        x = torch.randn(m, k, device=device).half()
        plain = torch.nn.Linear(k, n, bias=False, device=device, dtype=torch.float16)
        times = [time.perf_counter()]
        layer = Linear.from_float(plain, form)
        wait()
        times.append(time.perf_counter())
        for _ in range(2):
            layer(x)
            wait()
            times.append(time.perf_counter())
        made, first, second = (round(1e3 * (after - before), 3) for before, after in itertools.pairwise(times))
        rows.append({"shape": shape, "format": form, "make_ms": made, "first_ms": first, "second_ms": second})
    print(json.dumps({"import_ms": round(1e3 * import_s, 2), "rows": rows}))


def process(cache: str, program: str, *arguments: str) -> dict[str, Any]:
    """What a program tells in a new process that keeps its kernels in `cache`. Raises `ToolchainError` where it fails."""
    environment = processes.environment(**{knobs.CACHE.name: cache})
    command = processes.program(program, *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{' '.join(arguments)}: {(done.stderr.strip() or 'no word why').splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def first_calls(form: str, shapes: Sequence[str], device: str) -> dict[str, Any]:
    """The first calls of some layers in one process with an empty cache, and in another with what that one has left."""
    with tempfile.TemporaryDirectory(prefix="w4gen-") as cache:
        cold, warm = (process(cache, FIRST, device, form, *shapes) for _ in range(2))
    rows = [
        {"shape": a["shape"], "format": form, "cold_s": round(a["first_ms"] / 1e3, 6), "warm_ms": b["first_ms"]}
        | {"second_ms": b["second_ms"], "make_ms": b["make_ms"]}
        for a, b in zip(cold["rows"], warm["rows"], strict=True)
    ]
    return {"import_ms": warm["import_ms"], "rows": rows}


def tell_warmed(arch: str, form: str, workers: str) -> None:
    """Print, as JSON, how long the kernels of a model take that are compiled side by side."""
    sizes = {(each.n, each.k) for each in layers(read(Path(MODEL))) if "lm_head" not in each.names}
    asks = [ahead.Ask(problem_of(m=m, n=n, k=k, format=form), named(arch)) for n, k in sorted(sizes) for m in ROWS]
    start = time.perf_counter()
    done = list(ahead.every(asks, int(workers), progress=False))
    seconds = time.perf_counter() - start
    failed = [each.error or "it was there before" for each in done if each.error or each.cached]
    spent = {"seconds": round(seconds, 2), "compiling_s": round(sum(each.seconds for each in done), 2), "failed": failed}
    print(json.dumps({"model": MODEL, "format": form, "arch": arch, "kernels": len(done), "workers": int(workers)} | spent))


def warmed(arch: str, form: str, workers: int) -> dict[str, Any]:
    """How long the kernels of a model take with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="w4gen-") as cache:
        return process(cache, WARM, arch, form, str(workers))


def told(row: dict[str, Any]) -> str:
    """A first call as one line."""
    return f"{row['shape']} {row['format']}: cold {row['cold_s']} s, warm {row['warm_ms']} ms, then {row['second_ms']} ms"


@click.command()
@click.option("--shape", "shapes", multiple=True, default=SHAPES, show_default=True, help="MxKxN, repeatable")
@click.option("--format", "forms", multiple=True, default=("int4_g128", "nf4_g64"), show_default=True, help="repeatable")
@click.option("--workers", default=8, show_default=True, help="processes that compile a model's kernels")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON file to write")
def main(shapes: tuple[str, ...], forms: tuple[str, ...], workers: int, out: Path) -> None:
    """Time first calls, and compiles ahead, on the machine with a GPU that this is, and write what was measured."""
    if not torch.cuda.is_available():
        raise click.ClickException("a first call loads its kernel on a GPU and there is none here: run this where one is")
    calls = [first_calls(form, shapes, "cuda") for form in forms]
    rows = [row for each in calls for row in each["rows"]]
    for row in rows:
        click.echo(told(row))
    ahead_of_calls = warmed(arch_of(torch.device("cuda")).name, forms[0], workers)
    click.echo("{kernels} kernels of {model} in {seconds} s by {workers} processes".format(**ahead_of_calls))
    about = {"title": "First calls", "first_calls": rows, "import_ms": calls[0]["import_ms"], "warmed": ahead_of_calls}
    write(out, facts("w4gen.bench.first") | about)


if __name__ == "__main__":
    main()
