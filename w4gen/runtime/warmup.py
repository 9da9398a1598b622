"""Everything that a model will ask for, compiled before it does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from w4gen import ahead, knobs
from w4gen.errors import ArchError
from w4gen.ir.problem import EVERY, PAIRED, Problem
from w4gen.ir.types import DType
from w4gen.runtime import dtypes
from w4gen.runtime.launch import arch_of
from w4gen.runtime.linear import Linear
from w4gen.schedule.arch import Arch
from w4gen.schedule.arch import arch as named
from w4gen.schedule.rules import bucket
from w4gen.schedule.stored import layout_for

log = logging.getLogger("w4gen")


@dataclass(frozen=True, slots=True)
class Warmed:
    """What `warmup` did: kernels compiled now, those that were there, seconds, and why some layers have none (they fall back)."""

    compiled: int
    found: int
    seconds: float
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.compiled} kernels compiled, {self.found} found, in {self.seconds:.1f} s"]
        return "\n".join([*lines, *(f"no kernel: {why}" for why in self.refused)])


def warmup(
    model: torch.nn.Module,
    ms: int | Iterable[int] = (1, 16, 256),
    *,
    dtype: torch.dtype | None = None,
    arch: str = "",
    workers: int = 0,
    progress: bool = True,
    gradients: bool = False,
    residuals: bool = False,
) -> Warmed:
    """Compile what the layers of `model` need for calls with `ms` rows, each kernel once, side by side in processes.

    Every M shares its kernel with the others of its bucket. dtype: of x (default: that of the model's parameters) · arch: what to
    compile for, with no GPU, in place of the GPU that the layers are on · gradients, residuals: what the backward pass needs too,
    and calls with a residual. Raises `ArchError` where neither is there.
    """
    start, x = time.perf_counter(), dtypes.of(torch.empty(0, dtype=dtype or of_model(model)), "x")
    asks = [
        ahead.Ask(problem, target)
        for layer in model.modules()
        if isinstance(layer, Linear)
        for target in (target_of(layer, arch),)
        for m in ([ms] if isinstance(ms, int) else ms)
        for problem in problems(layer, m, x, target, gradients, residuals)
    ]
    if not asks:
        log.warning("nothing is compiled: no layer of the model is w4gen's (w4gen.convert makes them), or no M was given")
    done = list(ahead.every(asks, workers, progress))
    made = [each for each in done if not each.error]
    found = sum(each.cached for each in made)
    return Warmed(len(made) - found, found, time.perf_counter() - start, tuple(each.error for each in done if each.error))


def problems(layer: Linear, m: int, x: DType, arch: Arch, gradients: bool, residuals: bool) -> Iterator[Problem]:
    """What calls of a layer with m rows ask: together with the layers that it is launched with, but for a residual.

    Where gradients are asked for, an activation comes after the op.
    """
    rows, activation = EVERY if layer.batch_invariant else bucket(m), layer.activation

    def of(held: Linear, rows: tuple[int, int], **more: Any) -> Problem:
        n, k = held.out_features, held.in_features
        layout = held.layout if held.codes.is_cuda else layout_for(held.format, arch, n, k)
        return Problem(m=rows, n=n, k=k, format=held.format, layout=layout, x=x, y=x, **more)

    yield of(layer.launched, rows, bias=layer.bias is not None, activation=activation)
    if residuals and activation != PAIRED:
        yield of(layer, rows, bias=layer.bias is not None, activation=activation, residual=True)
    if gradients:
        yield of(layer.launched, rows, bias=layer.bias is not None)
        yield of(layer.launched, bucket(m), gradient=True)


def of_model(model: torch.nn.Module) -> torch.dtype:
    """The 16-bit type that a model computes in: that of its parameters or biases, else float16."""
    biases = (each.bias for each in model.modules() if isinstance(each, Linear) and each.bias is not None)
    kinds = [each.dtype for each in (*model.parameters(), *biases)]
    return next((kind for kind in kinds if kind in (torch.float16, torch.bfloat16)), torch.float16)


def target_of(layer: Linear, arch: str) -> Arch:
    """The arch to compile a layer for."""
    if arch or knobs.ARCH.read():
        return named(arch or knobs.ARCH.read())
    if not layer.codes.is_cuda:
        raise ArchError('the model is on no GPU: move it to one, or name what to compile for, as in warmup(model, arch="sm_90")')
    return arch_of(layer.codes.device)
