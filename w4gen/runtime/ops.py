"""The one stable op, `torch.ops.w4gen.linear`, with its kernels for CUDA, CPU and shape inference.

The op takes tensors plus format and layout as strings, so a graph that holds it describes itself. On a GPU it looks up the
launch of (device, dtype, bucket, weight); a miss compiles. Shapes without a kernel take the fallback: dequantize, then matmul.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch

from w4gen import knobs
from w4gen.errors import ForbiddenError, ShapeError, W4Error
from w4gen.ir.layout import Layout
from w4gen.ir.problem import Problem
from w4gen.ir.types import Format
from w4gen.pipeline import compile
from w4gen.runtime import dtypes
from w4gen.runtime.launch import Launch, aligned, arch_of, launcher
from w4gen.runtime.weight import Weight, dequantize
from w4gen.schedule.rules import bucket
from w4gen.schedule.stored import layout_for
from w4gen.toolchain import interpreted

log = logging.getLogger("w4gen")
library = torch.library.Library("w4gen", "DEF")
library.define("linear(Tensor x, Tensor[] weight, Tensor? bias, int n, str format, str layout) -> Tensor")
Key = tuple[int | None, torch.dtype, tuple[int, int], int, int, str, str, bool]
LAUNCHES: dict[Key, Launch | None] = {}
"""Launches by question; None where the fallback answers."""


def on_gpu(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
    format: str,
    layout: str,
) -> torch.Tensor:
    """x [M, K] -> y [M, N] by a generated kernel."""
    m, k = x.shape
    key = (x.device.index, x.dtype, bucket(m), n, k, format, layout, bias is not None)
    try:
        launch = LAUNCHES[key]
    except KeyError:
        launch = LAUNCHES[key] = _launch(key, x.device)
    if launch is None:
        return fallback(x, weight, bias, n, format, layout)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    launch(y, aligned(x), *weight, bias, m)
    return y


def fallback(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
    format: str,
    layout: str,
) -> torch.Tensor:
    """x [M, K] -> y [M, N]: the whole weight dequantized, then a matmul; in f32 on a CPU, in x's type on a GPU."""
    wide = torch.float32 if x.device.type == "cpu" else x.dtype
    w = dequantize(weight, _format(format), _layout(layout), n, x.shape[1], wide)
    y = torch.nn.functional.linear(x.to(wide), w, None if bias is None else bias.to(wide))
    return y.to(x.dtype)


def on_cpu(*call: Any) -> torch.Tensor:
    """The fallback; under TRITON_INTERPRET=1 the generated kernel, interpreted."""
    return on_gpu(*call) if interpreted() else fallback(*call)


def fake(x: torch.Tensor, weight: Any, bias: Any, n: int, *rest: Any) -> torch.Tensor:
    """The shape of the result."""
    return x.new_empty((x.shape[0], n))


library.impl("linear", on_gpu, "CUDA")
library.impl("linear", on_cpu, "CPU")
torch.library.register_fake("w4gen::linear", fake, lib=library)


def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what the gradient needs."""
    x, weight, _, ctx.n, ctx.format, ctx.layout = inputs
    ctx.k = x.shape[1]
    ctx.save_for_backward(*weight)


def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """dX = dY · W, by the whole weight dequantized in the gradient's type, and the bias' gradient; a weight has none."""
    form, layout = _format(ctx.format), _layout(ctx.layout)
    dx = grad @ dequantize(ctx.saved_tensors, form, layout, ctx.n, ctx.k, grad.dtype) if ctx.needs_input_grad[0] else None
    return dx, [None] * len(ctx.saved_tensors), grad.sum(0) if ctx.needs_input_grad[2] else None, None, None, None


torch.library.register_autograd("w4gen::linear", backward, setup_context=remember, lib=library)


def _launch(key: Key, device: torch.device) -> Launch | None:
    _, x_dtype, m, n, k, format, layout, bias = key
    if x_dtype == torch.float32:
        why = "x is float32; kernels take float16 and bfloat16"
    else:
        x = dtypes.OURS[x_dtype]
        problem = Problem(m=m, n=n, k=k, format=_format(format), layout=_layout(layout), x=x, y=x, bias=bias)
        try:
            return launcher(compile(problem, arch_of(device)), device)
        except ForbiddenError:
            raise
        except W4Error as error:
            why = str(error)
    if knobs.STRICT.number():
        raise ShapeError(
            f"no kernel for {k} -> {n} {_format(format).label}: {why}; unset W4GEN_STRICT to dequantize and multiply"
        )
    log.warning("a layer %d -> %d in %s is dequantized and multiplied: %s", k, n, _format(format).label, why)
    return None


@lru_cache
def _format(text: str) -> Format:
    return Format.parse(text)


@lru_cache
def _layout(text: str) -> Layout:
    return Layout.parse(text)


def stored_for(w: Weight, device: torch.device) -> Weight:
    """`w` in the layout that kernels on `device` read; a weight on a CPU stays canonical."""
    if device.type == "cpu" and not interpreted():
        return w
    return w.packed_as(layout_for(w.format, arch_of(device), w.n, w.k))
