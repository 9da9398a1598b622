"""`w4gen bench --ablate`: what each part of w4gen is worth for one shape, by taking the parts in one after the other.

portable: the values as a table that codes are looked up in, codes in rows, and the rules' choice for a GPU of which nothing is
known; one tile of outputs, k not shared out, nothing asked for ahead · layout: the same, codes in the order of the arch's matrix
fragments · decode: word operations in place of the table · schedule: the rules' choice for this arch, fast templates and all
· tuned: the stored row's schedule · overlap: the best so far, started before the kernel in front has ended.

Each is an ordinary problem and schedule, and all compute the same layer: the error to its one truth, and launches equal bit for
bit, are checked where it is timed. They take turns with each other and with cuBLAS in one run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from w4gen import ahead, pipeline
from w4gen.ahead import Ask
from w4gen.api import parse_shape, problem_of
from w4gen.bench.compare import REPEATS, sums_in_f32
from w4gen.bench.contenders import ROUNDS
from w4gen.bench.facts import facts
from w4gen.bench.floors import floor
from w4gen.bench.noise import checked
from w4gen.errors import W4Error
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.rounding import limit
from w4gen.ir.types import Format
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import arch_of, bind
from w4gen.runtime.reference import error, reference
from w4gen.runtime.timer import captured, copies_for
from w4gen.runtime.tune import Timer, rehearsed
from w4gen.runtime.weight import Weight
from w4gen.schedule.arch import Arch
from w4gen.schedule.rules import pick
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import layout_for
from w4gen.toolchain import able


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rung that ran: what times it, its error and the limit of that, and whether its launches gave the same bits."""

    timer: Timer
    error: float
    limit: float
    equal: bool


def rungs(problem: Problem, arch: Arch) -> dict[str, Ask | str]:
    """The parts in their order: how to ask for the kernel that has them so far, or why there is none for this problem."""
    n, k, form = problem.n, problem.k, problem.format
    stored = replace(problem, layout=layout_for(form, arch, n, k))
    row, chosen = pipeline.winner(lower(stored), arch), pick(lower(stored), able(arch))
    best = row.schedule if row else chosen

    def of_table(where: Arch) -> Ask:
        table = looked_up(form)
        in_rows = replace(problem, format=table, layout=layout_for(table, where, n, k))
        return Ask(in_rows, arch, plain(in_rows, arch))

    makes: dict[str, Callable[[], Ask | str]] = {
        "portable": lambda: of_table(replace(arch, fragment=None)),
        "layout": lambda: of_table(arch) if in_fragments(stored) else f"{form.label} of this shape stays in rows",
        "decode": lambda: Ask(stored, arch, plain(stored, arch)) if form.codebook is None else f"{form.label} is a table itself",
        "schedule": lambda: Ask(stored, arch, replace(chosen, overlap=0)),
        "tuned": lambda: Ask(stored, arch, replace(best, overlap=0)) if row else "no row of this GPU: w4gen tune makes one",
        "overlap": lambda: (
            Ask(stored, arch, replace(best, overlap=1)) if best.overlap else f"{best.template} waits on {arch.name}"
        ),
    }
    return {name: legal(make) for name, make in makes.items()}


def legal(make: Callable[[], Ask | str]) -> Ask | str:
    """What `make` asks for where that has a text, else why not."""
    try:
        asked = make()
        if isinstance(asked, Ask):
            asked.kernel()
    except W4Error as refused:
        return str(refused)
    return asked


def looked_up(form: Format) -> Format:
    """A format of the same values, as a table: nothing of them is known to a kernel. Codes of NaN, which no weight has, are 0."""
    if form.codebook is not None:
        return form
    mode = "float" if form.zero_mode == "integer" else form.zero_mode
    table = tuple(value if math.isfinite(value) else 0.0 for value in form.values)
    changed: Any = {"codebook": table, "step": 1.0, "origin": 0.0, "minifloat": None, "zero_mode": mode}
    return replace(form, name=f"{form.name}_table", **changed)


def plain(problem: Problem, arch: Arch) -> Schedule:
    """A schedule without what fills a GPU: that of the portable template for these codes, its loop as it is written."""
    return replace(pick(lower(problem), replace(arch, features=frozenset())), split_k=1, stages=1, overlap=0)


def in_fragments(problem: Problem) -> bool:
    """Whether codes are stored in the order of matrix fragments."""
    return problem.layout is not None and problem.layout.row_units() is None


@sums_in_f32()
def ablate(
    shapes: Sequence[str],
    formats: Sequence[str | Format] = ("int4_g128",),
    kinds: Sequence[str] = ("float16",),
    progress: Callable[[dict[str, Any]], Any] = lambda ladder: None,
) -> dict[str, Any]:
    """Time shapes `MxKxN` (tokens x inputs x outputs) part by part on the GPU present; `progress` is told each of the `ladders`.

    A ladder has a row for each part: its microseconds and `gain`, how many times faster it is than the row before, or `why` there
    is no such kernel.
    """
    ladders: list[dict[str, Any]] = []
    for kind, form, shape in itertools.product(kinds, formats, shapes):
        ladders.append(each := ladder(shape, form, kind, torch.device("cuda", torch.cuda.current_device())))
        progress(each)
        torch.cuda.empty_cache()
    method = "graph replay over rotating copies of the weights (cold L2), parts and cuBLAS in turns, median of the turns"
    return checked(facts("w4gen.cli") | {"method": method, "ladders": ladders})


def ladder(shape: str, format: str | Format, dtype: str, device: torch.device) -> dict[str, Any]:
    """The parts of one shape."""
    (m, k, n), arch = parse_shape(shape), arch_of(device)
    problem = problem_of(m=m, n=n, k=k, format=format, dtype_name=dtype)
    asked = rungs(problem, arch)
    failed = {done.ask: done.error for done in ahead.compiled(each for each in asked.values() if isinstance(each, Ask))}
    asked = {name: failed.get(each) or each for name, each in asked.items()}
    torch.manual_seed(0)
    w = Weight.from_float(torch.randn(n, k, device=device) * 0.02, problem.format)
    x = torch.randn(m, k, device=device).to(torch_dtype(problem.x))
    truth, parts = reference(x, w), {name: part for name, part in w.parts().items() if name not in problem.format.tables()}
    attempts: dict[str, Attempt] = {}
    for name, ask in asked.items():
        if isinstance(ask, Ask):
            try:
                attempts[name] = attempt(ask, Weight.from_parts(parts, ask.problem.format, ask.problem.layout), x, truth)
            except W4Error as refused:
                asked[name] = str(refused)
    timers = {"cublas": vendor(w, x)} | {name: each.timer for name, each in attempts.items()}
    turns = [{name: timer() for name, timer in timers.items()} for _ in range(ROUNDS)]
    us = {name: statistics.median(turn[name] for turn in turns) for name in timers}
    least = floor(w.nbytes, device, "dependent_launch" in arch.features).us
    return {
        "m": m, "k": k, "n": n, "format": problem.format.label, "dtype": problem.x.name, "bytes": w.nbytes,
        "cublas_us": round(us["cublas"], 3), "floor_us": round(least, 3), "rows": told(asked, attempts, us, turns),
    }  # fmt: skip


def told(
    asked: dict[str, Ask | str], attempts: dict[str, Attempt], us: dict[str, float], turns: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """A row for each part."""
    rows: list[dict[str, Any]] = []
    last = 0.0
    for name, ask in asked.items():
        if not isinstance(ask, Ask):
            rows.append({"part": name, "why": ask})
            continue
        own, taken = attempts[name], [turn[name] for turn in turns]
        rows.append({
            "part": name, "us": round(us[name], 3), "gain": round(last / us[name], 3) if last else 1.0,
            "spread": round((max(taken) - min(taken)) / 2 / us[name], 4), "error": own.error, "error_limit": own.limit,
            "equal_repeats": REPEATS if own.equal else 0, "right": own.equal and own.error <= own.limit,
            "format": ask.problem.format.label, "schedule": str(ask.schedule),
        })  # fmt: skip
        last = us[name]
    return rows


def attempt(ask: Ask, w: Weight, x: torch.Tensor, truth: torch.Tensor) -> Attempt:
    """A rung, launched: checked on x [M, K], each time into an output poisoned with NaN, and ready to be timed."""
    kernel = ask.kernel()
    timer = rehearsed(kernel, x, [w.clone() for _ in range(copies_for(w.nbytes, x.device))])
    timer()  # what it refuses is refused here
    run = bind(kernel)
    first = run(x, w)
    equal = all(torch.equal(run(x, w), first) for _ in range(REPEATS))
    return Attempt(timer, error(first, truth), limit(kernel.program, truth.numel()), equal)


def vendor(w: Weight, x: torch.Tensor) -> Timer:
    """What times cuBLAS with the weight in x's type."""
    dense = w.dequantize().to(x.dtype)
    copies = [dense.clone() for _ in range(copies_for(dense.nbytes, x.device))]
    replayed = captured([lambda each=each: torch.nn.functional.linear(x, each) for each in copies])  # type: ignore[misc]
    return lambda: replayed().us
