"""Where the time of a decoder goes, linear layer by linear layer, prefill apart from decode.

Two clocks: *events* around every linear layer inside the model, and *replay* of each kind of layer alone over cold copies, which
is what floors are compared with. Events measure the layer and not the host: before each the GPU is kept busy for long enough that
the layer's kernels wait in its queue. An interval around nothing is subtracted.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from w4gen.bench.decoder import Decoder, built
from w4gen.bench.facts import facts, here
from w4gen.bench.floors import floor
from w4gen.bench.noise import checked
from w4gen.bench.quantizers import known
from w4gen.bench.replay import captured, kernels
from w4gen.formats import named
from w4gen.ir.types import Format
from w4gen.ir.types import dtype as named_dtype
from w4gen.patterns import kind_of
from w4gen.runtime.dtypes import torch_dtype
from w4gen.runtime.launch import arch_of
from w4gen.runtime.linear import Linear
from w4gen.runtime.timer import copies_for, time_calls
from w4gen.runtime.warmup import warmup

STEPS, NEW = 7, 40
"""Times that a phase is watched, and new tokens that the cache has room for."""
BUSY_CYCLES = 400_000
"""Cycles that the GPU is kept busy before a layer: some 200 us, several times what the host needs to launch one."""
METHOD = (
    "us: graph replay of one layer of the kind over cold copies, median; event_us: CUDA events around each layer in the model, "
    "median of steps, the GPU kept busy before so that the host is not measured, an empty interval subtracted; host_us: from the "
    "layer's call to its return; dense_us: nn.Linear in the same type, as us; floor_us: only reading the layer's bytes; step_us: "
    "the phase in one CUDA graph; kernels: of that graph, by the profiler"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """Linear layers of a kind in one phase, `count` of them, each with m rows; times in microseconds of one of them.

    tax: its time over that of nn.Linear in 16 bits · share: of the step, all of them · gain: how many times faster the step would
    be if they took what it takes to read their bytes.
    """

    name: str
    count: int
    m: int
    k: int
    n: int
    stored: str
    bytes: int
    us: float
    spread: float
    event_us: float
    host_us: float
    dense_us: float
    floor_us: float
    share: float
    gain: float

    @property
    def tax(self) -> float:
        return self.us / self.dense_us


@dataclass(frozen=True, slots=True)
class Seen:
    """A linear layer of a model as a phase calls it: with how many rows."""

    layer: torch.nn.Module
    m: int

    @property
    def stored(self) -> str:
        """How its weight is stored."""
        if isinstance(self.layer, Linear):
            return self.layer.format.label
        plain = type(self.layer) is torch.nn.Linear
        return str(self.layer.weight.dtype).removeprefix("torch.") if plain else type(self.layer).__name__

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that it holds."""
        return sum(each.nbytes for name, each in self.layer.state_dict().items() if name != "_extra_state")


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The linear layers of a model by name, whoever quantized them."""
    return {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear | Linear)}


@contextmanager
def watched(
    layers: Mapping[str, torch.nn.Module], before: Callable[[str, torch.Tensor], Any], after: Callable[[str], Any]
) -> Iterator[None]:
    """Call `before` with its name and x, and `after` with its name, around each call of a layer."""
    held = []
    for name, layer in layers.items():
        held.append(layer.register_forward_pre_hook(lambda _, given, name=name: before(name, given[0])))  # type: ignore[misc]
        held.append(layer.register_forward_hook(lambda *_, name=name: after(name)))  # type: ignore[misc]
    try:
        yield
    finally:
        for each in held:
            each.remove()


def seen(layers: Mapping[str, torch.nn.Module], run: Callable[[], object]) -> dict[str, Seen]:
    """The layers that a phase calls, with the rows that it calls them with."""
    found: dict[str, Seen] = {}

    def before(name: str, x: torch.Tensor) -> None:
        found[name] = Seen(layers[name], x.numel() // x.shape[-1])

    with watched(layers, before, lambda name: None):
        run()
    return found


def host_us(layers: Mapping[str, torch.nn.Module], run: Callable[[], object]) -> dict[str, float]:
    """Microseconds that the host spends in each layer: the median of several runs."""
    started: dict[str, float] = {}
    spent: dict[str, list[float]] = defaultdict(list)

    def before(name: str, _: torch.Tensor) -> None:
        started[name] = time.perf_counter()

    def after(name: str) -> None:
        spent[name].append((time.perf_counter() - started[name]) * 1e6)

    with watched(layers, before, after):
        for _ in range(STEPS):
            run()
    return {name: statistics.median(times) for name, times in spent.items()}


def event_us(layers: Mapping[str, torch.nn.Module], run: Callable[[], object]) -> dict[str, float]:
    """Microseconds that the GPU spends on each layer inside the model: the median of several runs, less an empty interval."""
    intervals: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    def before(name: str, _: torch.Tensor | None = None) -> None:
        torch.cuda._sleep(BUSY_CYCLES)
        intervals[name].append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        intervals[name][-1][0].record()

    def after(name: str) -> None:
        intervals[name][-1][1].record()

    for _ in range(32):
        before("")
        after("")
    with watched(layers, before, after):
        for _ in range(STEPS):
            run()
    torch.cuda.synchronize()
    times = {name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs) for name, pairs in intervals.items()}
    empty = times.pop("")
    return {name: max(0.0, us - empty) for name, us in times.items()}


def alone(layer: torch.nn.Module, m: int, nbytes: int, x: torch.Tensor) -> tuple[float, float]:
    """Microseconds of a layer for x [m, K], by replay over cold copies of it, and the half range of the replays as a share."""
    copies = [layer, *(copy.deepcopy(layer) for _ in range(copies_for(nbytes, x.device) - 1))]
    timing = time_calls([lambda each=each: each(x) for each in copies])  # type: ignore[misc]
    return timing.us, timing.spread


def dense_us(like: Seen, x: torch.Tensor) -> float:
    """Microseconds of nn.Linear in x's type with as many inputs and outputs, by replay over cold copies."""
    k, n = like.layer.in_features, like.layer.out_features
    plain = torch.nn.Linear(k, n, bias=like.layer.bias is not None, dtype=x.dtype, device=x.device).requires_grad_(False)
    return alone(plain, like.m, plain.weight.nbytes, x)[0]


def layers_of(
    found: Mapping[str, Seen], events: Mapping[str, float], host: Mapping[str, float], like: torch.Tensor, step_us: float
) -> list[Layer]:
    """The kinds of layers of a phase, those that pay most for being quantized first; x is of the type and device of `like`."""
    alike: dict[tuple[str, int, str, int], list[str]] = defaultdict(list)
    for name, each in found.items():
        alike[kind_of(name), each.m, each.stored, each.bytes].append(name)
    made = []
    for (name, m, stored, nbytes), names in alike.items():
        one, count = found[names[0]], len(names)
        k, n, device = one.layer.in_features, one.layer.out_features, like.device
        x = torch.randn(m, k, device=device).to(like.dtype)
        us, spread = alone(one.layer, m, nbytes, x)
        plain = us if type(one.layer) is torch.nn.Linear else dense_us(one, x)
        early = isinstance(one.layer, Linear) and "dependent_launch" in arch_of(device).features
        least = floor(nbytes, device, early).us
        saved = count * max(0.0, us - least)
        made.append(
            Layer(
                name, count, m, k, n, stored, nbytes, round(us, 3), round(spread, 4),
                round(statistics.median(events[each] for each in names), 3),
                round(statistics.median(host[each] for each in names), 3), round(plain, 3), round(least, 3),
                round(count * us / step_us, 4), round(step_us / max(step_us - saved, 1e-9), 4),
            )
        )  # fmt: skip
    return sorted(made, key=lambda each: -each.tax)


def in_graph(decoder: Decoder, call: Callable[[], object], calls: int) -> tuple[float, Callable[[], object]]:
    """Microseconds of a phase in one CUDA graph, `calls` of it after the prompt, and what replays it."""
    decoder.again()
    replay, times = captured(call), []
    for _ in range(4):
        decoder.again()
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            replay()
        wait()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:]), replay


def wait() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What w4gen says meanwhile of layers that it has no kernel for."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("w4gen")
    log.addHandler(handler)
    try:
        yield told
    finally:
        log.removeHandler(handler)


def phase(decoder: Decoder, call: Callable[[], object], calls: int, dense_step_us: float) -> dict[str, Any]:
    """One phase of an answer: its step, and its layers."""
    layers, like = linears(decoder.model), decoder.cache.keys[0]

    def once() -> None:
        decoder.again()
        call()

    once()
    found = seen(layers, once)
    events, host = event_us(layers, once), host_us(layers, once)
    step_us, replay = in_graph(decoder, call, calls)
    decoder.again()
    counted = kernels(replay)
    kinds = layers_of(found, events, host, like, step_us)
    rest = {name: counted.get(name) for name in ("kernels", "linears_us", "rest_us")}
    step = {"step_us": round(step_us, 2), "dense_step_us": round(dense_step_us, 2)} | rest
    return step | {"layers": [asdict(each) | {"tax": round(each.tax, 4)} for each in kinds]}


@torch.no_grad()
def profile(
    about: Mapping[str, Any],
    format: str | Format = "int4_g128",
    dtype: str = "float16",
    quantizer: str = "w4gen",
    prompt: int = 512,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Where the time of a decoder goes on the GPU here: a model of a config.json, of random weights or a folder's, quantized.

    Its linear layers by kind, for a prompt of `prompt` tokens and for one token after it. quantizer: w4gen, bitsandbytes or none.
    Raises `W4Error` where it, or Transformers, is not there, and where the folder's weights are quantized.
    """
    device, start = here(), time.perf_counter()
    quantize, kind = known(quantizer), torch_dtype(named_dtype(dtype))
    model = built(about, kind, device, prompt + NEW, folder)
    plain = Decoder.started(model, 1, prompt, NEW)
    calls = {"decode": ("step", NEW - 8), "prefill": ("prefill", 1)}
    dense = {name: in_graph(plain, getattr(plain, call), count)[0] for name, (call, count) in calls.items()}
    with warnings() as told:
        skipped = quantize.convert(model, format)
        warmup(model, (1, prompt), dtype=kind, progress=False)
        decoder = Decoder.started(model, 1, prompt, NEW)
        phases = {name: phase(decoder, getattr(decoder, call), count, dense[name]) for name, (call, count) in calls.items()}
    asked = {"about": dict(about), "format": quantize.only or named(format).label, "quantizer": quantizer, "dtype": dtype}
    asked |= {"weights": "random" if folder is None else str(folder)}
    end = {"skipped": skipped, "fallbacks": list(dict.fromkeys(told)), "took_s": round(time.perf_counter() - start, 1)}
    return checked(facts("w4gen.cli") | asked | {"prompt": prompt, "method": METHOD, "phases": phases} | end)
