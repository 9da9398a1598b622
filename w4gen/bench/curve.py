"""Time against M, for who chooses batch sizes: measured on the GPU here or, with none, predicted by the cost model.

A kernel's time grows in steps rather than with M: another bucket has another kernel, and in a bucket rows of x come in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch

from w4gen import ahead, knobs
from w4gen.api import parse_layer, problem_of
from w4gen.bench.facts import facts
from w4gen.bench.floors import floor
from w4gen.bench.noise import checked
from w4gen.codegen.render import Kernel
from w4gen.errors import ShapeError
from w4gen.ir.types import Format
from w4gen.layers import Layer, layers, read
from w4gen.runtime.launch import arch_of
from w4gen.runtime.tune import cold, copies_of, trial
from w4gen.schedule import arch as arches
from w4gen.schedule.arch import Arch
from w4gen.schedule.cost import predicted
from w4gen.schedule.rules import BUCKETS

ROWS = tuple(sorted({*chain(*BUCKETS[:-1]), BUCKETS[-1][0], 4, 12, 24, 48, 96, 192, 4096}))
"""The M of a curve by default: both sides of every step, and some between."""

METHODS = {
    "measured": "graph replay over rotating copies of the weights (cold L2), median, outputs checked to be written; floor_us: "
    "only reading the weight, launched the same way",
    "predicted": "the cost model's times from the data sheet, which rank schedules and are no measurement",
}

Timed: TypeAlias = Callable[[Kernel, int], float]


@dataclass(frozen=True, slots=True)
class Part:
    """Linear layers that are alike: their names, the weight's [n, k], how many there are, and microseconds of one for each M.

    floor_us: of only reading its bytes, where that was measured too.
    """

    names: tuple[str, ...]
    n: int
    k: int
    count: int
    us: tuple[float, ...]
    floor_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Microseconds against M: of each kind of layer, and of all. `source` says how they came about, `where` on which hardware.

    steps: M -> why the time may jump there: a bucket begins, or another tile of rows does. An M counts that is in `ms`.
    """

    source: str
    where: str
    format: str
    ms: tuple[int, ...]
    parts: tuple[Part, ...]
    steps: Mapping[int, str]

    @property
    def total_us(self) -> tuple[float, ...]:
        """Microseconds of all layers, for each M."""
        return tuple(sum(part.count * part.us[place] for part in self.parts) for place in range(len(self.ms)))

    def at(self, m: int) -> float:
        """Microseconds of all layers with m rows: those of the next M of the curve. Raises `ShapeError` beyond the last."""
        for known, us in zip(self.ms, self.total_us, strict=True):
            if 1 <= m <= known:
                return us
        raise ShapeError(f"M={m} is not on the curve, which is for 1 to {self.ms[-1]}: make one with a larger M")

    def facts(self) -> dict[str, Any]:
        """The curve as JSON has it, with what it was made with."""
        method = METHODS[self.source]
        steps = [{"m": m, "why": why} for m, why in self.steps.items()]
        return checked(facts("w4gen.cli") | asdict(self) | {"method": method, "total_us": self.total_us, "steps": steps})


def curve(
    asked: str | Path,
    ms: Sequence[int] = ROWS,
    format: str | Format = "int4_g128",
    *,
    arch: str = "",
    dtype: str = "float16",
    progress: bool = True,
) -> Curve:
    """Time against M for the linear layers of a model (config.json, its folder, or a preset), or of one layer, `KxN`.

    Measured where there is a GPU and no `arch` is asked for (nor W4GEN_ARCH); else predicted, which ranks and is no measurement.
    Raises `W4Error` where a layer has no kernel.
    """
    ms = tuple(sorted(set(ms)))
    named = arch or knobs.ARCH.read()
    measure = torch.cuda.is_available() and not named
    target = arch_of() if measure or not named else arches.arch(named)
    kinds, asks = layers_of(asked), dict[tuple[int, int], ahead.Ask]()
    for place, each in enumerate(kinds):
        for m in ms:
            problem = problem_of(m=m, n=each.n, k=each.k, format=format, dtype_name=dtype, bias=each.bias)
            asks[place, m] = ahead.Ask(problem, target)
    if measure:
        ahead.needed(asks.values(), progress)
    made = {ask: ask.kernel() for ask in dict.fromkeys(asks.values())}
    kernels = {at: made[ask] for at, ask in asks.items()}
    timed = on_gpu if measure else by_model(target)
    parts = []
    for place, each in enumerate(kinds):
        of = [kernels[place, m] for m in ms]
        us = tuple(round(timed(kernel, m), 3) for kernel, m in zip(of, ms, strict=True))
        parts.append(Part(each.names, each.n, each.k, each.count, us, floor_us(of) if measure else 0.0))
    cold.cache_clear()
    label = next(iter(made)).problem.format.label
    steps = steps_of(ms, [[kernels[place, m] for m in ms] for place in range(len(kinds))])
    where = torch.cuda.get_device_name() if measure else f"{target.name}, {target.board}, by its data sheet"
    return Curve("measured" if measure else "predicted", where, label, ms, tuple(parts), steps)


def layers_of(asked: str | Path) -> list[Layer]:
    """The layers of a model, or the one layer that `KxN` is."""
    if isinstance(asked, str) and (sizes := parse_layer(asked)) is not None:
        k, n = sizes
        return [Layer((asked,), n, k, False, 1)]
    return layers(read(Path(asked)))


def on_gpu(kernel: Kernel, m: int) -> float:
    """Measured microseconds: cold weights, graph replay, median; outputs are checked to be written, and equal."""
    return trial(kernel, m, torch.device("cuda", torch.cuda.current_device()))()


def floor_us(kernels: Sequence[Kernel]) -> float:
    """Measured microseconds of only reading the weight of some kernels, started early where one of them is."""
    device = torch.device("cuda", torch.cuda.current_device())
    early = any(kernel.schedule.overlap for kernel in kernels)
    return round(floor(copies_of(kernels[-1], device)[0].nbytes, device, early).us, 3)


def by_model(arch: Arch) -> Timed:
    """What predicts the microseconds of a kernel on an arch."""
    return lambda kernel, m: predicted(kernel.program, kernel.schedule, arch, m).us


def steps_of(ms: Sequence[int], kernels: Sequence[Sequence[Kernel]]) -> dict[int, str]:
    """The M at which a kind of layer has another kernel than at the M before, or more tiles of rows."""
    found: dict[int, str] = {}
    for row in kernels:
        for place in range(1, len(ms)):
            m, (last, now) = ms[place], row[place - 1 : place + 1]
            if last.problem.m != now.problem.m:
                low, high = now.problem.m
                found[m] = f"bucket {low}..{high}" if high < 2**31 - 1 else f"bucket {low} and more"
            elif tiles(last, ms[place - 1]) != tiles(now, m):
                found.setdefault(m, f"{tiles(now, m)} tiles of {now.schedule.block_m} rows")
    return dict(sorted(found.items()))


def tiles(kernel: Kernel, m: int) -> int:
    """Tiles that m rows of x come in; one where the vendor's matmul chooses its own."""
    return 1 if kernel.schedule.unit == "vendor" else -(-m // kernel.schedule.block_m)
