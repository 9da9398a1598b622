"""The one stable op, `torch.ops.w4gen.linear`, with what each part of PyTorch asks of it: CUDA, CPU, shapes, autocast, vmap.

The op takes tensors plus format and layout as strings and the version of its schema, so a graph that holds it describes itself.
On a GPU it looks up the launch of (device, dtype, bucket, weight); a miss compiles. `linear_dx`: its gradient in x.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from threading import Lock
from typing import Any

import torch

from w4gen import knobs
from w4gen.errors import ForbiddenError, ShapeError, W4Error
from w4gen.ir.layout import Layout
from w4gen.ir.problem import EVERY, Problem, outputs
from w4gen.ir.types import Format
from w4gen.pipeline import compile
from w4gen.runtime import dtypes
from w4gen.runtime.epilogue import finished
from w4gen.runtime.launch import Launch, aligned, arch_of, capturing, launcher
from w4gen.runtime.weight import Weight, dequantize, slabs
from w4gen.schedule.rules import bucket
from w4gen.schedule.stored import layout_for
from w4gen.toolchain import interpreted

log = logging.getLogger("w4gen")
library = torch.library.Library("w4gen", "DEF")
library.define(
    "linear(Tensor x, Tensor[] weight, Tensor? bias, int n, str format, str layout, "
    "bool batch_invariant, str activation, Tensor? residual, int version) -> Tensor"
)
library.define("linear_dx(Tensor dy, Tensor[] weight, int k, str format, str layout, int version) -> Tensor")
VERSION = 1
"""Of both schemas: what their arguments mean. Graphs that were saved under another are refused."""
Key = tuple[int | None, torch.dtype, tuple[int, int], int, int, str, str, bool, bool, str, bool]
LAUNCHES: dict[Key, Launch | None] = {}
"""Launches by question; None where the fallback answers."""
_MISSES = Lock()


def question(
    x: torch.Tensor, n: int, format: str, layout: str, bias: Any, batch_invariant: bool, activation: str, residual: Any
) -> Key:
    """What the launch for x [..., K] is looked up by."""
    k = x.shape[-1]
    rows = EVERY if batch_invariant else bucket(x.numel() // k)
    return x.device.index, x.dtype, rows, n, k, format, layout, False, bias is not None, activation, residual is not None


def on_gpu(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
    format: str,
    layout: str,
    batch_invariant: bool = False,
    activation: str = "",
    residual: torch.Tensor | None = None,
    version: int = VERSION,
) -> torch.Tensor:
    """x [M, K] -> y [M, N] by a generated kernel: that of M's bucket or, where rows must not depend on M, that of every M."""
    _current(version)
    refuse_mixed(x, weight, bias, format, residual)
    m = x.shape[0]
    if m == 0:
        return x.new_empty((0, outputs(n, activation)))
    key = question(x, n, format, layout, bias, batch_invariant, activation, residual)
    try:
        launch = LAUNCHES[key]
    except KeyError:
        launch = _first(key, x)
    if launch is None:
        return fallback(x, weight, bias, n, format, layout, batch_invariant, activation, residual)
    y = torch.empty((m, outputs(n, activation)), dtype=x.dtype, device=x.device)
    added = () if residual is None else (aligned(residual.to(x.dtype)),)
    launch(y, aligned(x), *weight, None if bias is None else aligned(bias.to(x.dtype)), *added, m)
    return y


def fallback(
    x: torch.Tensor,
    weight: list[torch.Tensor],
    bias: torch.Tensor | None,
    n: int,
    format: str,
    layout: str,
    batch_invariant: bool = False,
    activation: str = "",
    residual: torch.Tensor | None = None,
    version: int = VERSION,
) -> torch.Tensor:
    """x [M, K] -> y [M, N]: the whole weight dequantized, then a matmul; in f32 on a CPU, in x's type on a GPU.

    A vendor's matmul chooses its order of sums by M: where rows must not depend on it, each is multiplied alone, from memory of
    its own, as the order may depend on how that is aligned too.
    """
    _current(version)
    refuse_captured(x, "dequantizes and multiplies, as no kernel takes it", "call it outside, or with a float16 x")
    wide = torch.float32 if x.device.type == "cpu" else x.dtype
    w = dequantize(weight, _format(format), _layout(layout), n, x.shape[1], wide)
    added = None if bias is None else bias.to(x.dtype).to(wide)
    parts = [row.clone() for row in x.to(wide).split(1)] if batch_invariant and x.shape[0] else [x.to(wide)]
    sums = torch.cat([torch.nn.functional.linear(part, w, added) for part in parts])
    return finished(sums, activation, None if residual is None else residual.to(x.dtype)).to(x.dtype)


def on_cpu(*call: Any) -> torch.Tensor:
    """The fallback; under TRITON_INTERPRET=1 the generated kernel, interpreted."""
    return on_gpu(*call) if interpreted() else fallback(*call)


def dx_on_gpu(
    dy: torch.Tensor, weight: list[torch.Tensor], k: int, format: str, layout: str, version: int = VERSION
) -> torch.Tensor:
    """dy [M, N] -> dx [M, K] = dy · w by a generated kernel, that of M's bucket."""
    _current(version)
    refuse_mixed(dy, weight, None, format, None)
    m, n = dy.shape
    key = (dy.device.index, dy.dtype, bucket(m), n, k, format, layout, True, False, "", False)
    if m == 0:
        return dy.new_empty((0, k))
    try:
        launch = LAUNCHES[key]
    except KeyError:
        launch = _first(key, dy, "layer(x).backward({})")
    if launch is None:
        return dx_of_slabs(dy, weight, k, format, layout)
    dx = torch.empty((m, k), dtype=dy.dtype, device=dy.device)
    launch(dx, aligned(dy), *weight, None, m)
    return dx


def dx_of_slabs(
    dy: torch.Tensor, weight: list[torch.Tensor], k: int, format: str, layout: str, version: int = VERSION
) -> torch.Tensor:
    """dy [M, N] -> dx [M, K] = dy · w: rows of the weight dequantized and multiplied a few at a time, sums in f32 or wider."""
    _current(version)
    refuse_captured(dy, "is a gradient, which dequantizes the weight", "capture the forward pass alone")
    wide = torch.promote_types(dy.dtype, torch.float32)
    sums, first = torch.zeros((dy.shape[0], k), dtype=wide, device=dy.device), 0
    for slab in slabs(weight, _format(format), _layout(layout), dy.shape[1], k):
        some = dy[:, first : first + len(slab)]
        first += len(slab)
        if dy.device.type == "cpu" or dy.dtype == wide:
            sums.addmm_(some.to(wide), slab.to(wide))
        else:
            sums += torch.mm(some, slab.to(dy.dtype), out_dtype=wide)
    return sums.to(dy.dtype)


def dx_on_cpu(*call: Any) -> torch.Tensor:
    """Slab by slab; under TRITON_INTERPRET=1 the generated kernel, interpreted."""
    return dx_on_gpu(*call) if interpreted() else dx_of_slabs(*call)


def shape_of(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    n: int,
    format: str,
    layout: str,
    invariant: bool,
    activation: str,
    residual: Any,
    _: int,
) -> torch.Tensor:
    """The shape of y."""
    refuse_mixed(x, weight, bias, format, residual)
    return x.new_empty((x.shape[0], outputs(n, activation)))


def shape_of_dx(dy: torch.Tensor, weight: Any, k: int, *_: Any) -> torch.Tensor:
    """The shape of dx."""
    return dy.new_empty((dy.shape[0], k))


def autocast(x: torch.Tensor, weight: list[torch.Tensor], *rest: Any) -> torch.Tensor:
    """x, the bias and the residual in autocast's type, as `nn.Linear` has them; the weight as it is stored."""
    kind = torch.get_autocast_dtype(x.device.type)
    given = [each.to(kind) if isinstance(each, torch.Tensor) else each for each in rest]
    with torch.autocast(x.device.type, enabled=False):
        return torch.ops.w4gen.linear(x.to(kind), weight, *given)


def vmapped(op: Any) -> Any:
    """The rule of vmap for an op whose first operand may have another dimension: its rows are one after the other."""

    def rule(info: Any, dims: tuple[Any, ...], rows: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        if any(dim is not None for dim in torch.utils._pytree.tree_leaves(dims[1:])):
            raise ShapeError("vmap over weights, biases or residuals of w4gen layers is not there: map over x alone, or loop")
        rows = rows.movedim(dims[0], 0)
        y = op(rows.flatten(0, 1), *rest)
        return y.unflatten(0, rows.shape[:2]), 0

    return rule


def remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what the gradient needs."""
    x, weight, _, _, format, layout, _, ctx.activation, _, version = inputs
    ctx.how = format, layout, version
    ctx.k = x.shape[1]
    ctx.save_for_backward(*weight)


def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """dX = dY · W, the bias' gradient and the residual's; a weight has none. Nothing is kept to go back through an activation."""
    if ctx.activation:
        raise W4Error(f"activation={ctx.activation} in the op has no gradient: apply it after the op, as w4gen.linear does")
    weight = list(ctx.saved_tensors)
    dx = torch.ops.w4gen.linear_dx(dy, weight, ctx.k, *ctx.how) if ctx.needs_input_grad[0] else None
    db = dy.sum(0) if ctx.needs_input_grad[2] else None
    return dx, [None] * len(weight), db, *[None] * 5, dy if ctx.needs_input_grad[8] else None, None


def remember_dx(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep what the gradient of a gradient needs."""
    dy, weight, _, ctx.format, ctx.layout, ctx.version = inputs
    ctx.n = dy.shape[1]
    ctx.save_for_backward(*weight)


def backward_dx(ctx: Any, ddx: torch.Tensor) -> tuple[Any, ...]:
    """dX is linear in dY, so the gradient of that is the layer itself."""
    weight = list(ctx.saved_tensors)
    ddy = torch.ops.w4gen.linear(ddx, weight, None, ctx.n, ctx.format, ctx.layout, False, "", None, ctx.version)
    return ddy, [None] * len(weight), *[None] * 4


library.impl("linear", on_gpu, "CUDA")
library.impl("linear", on_cpu, "CPU")
library.impl("linear_dx", dx_on_gpu, "CUDA")
library.impl("linear_dx", dx_on_cpu, "CPU")
for kind in ("CUDA", "CPU"):
    library.impl("linear", autocast, f"Autocast{kind}")
for name, shape, gradient, kept in (
    ("linear", shape_of, backward, remember),
    ("linear_dx", shape_of_dx, backward_dx, remember_dx),
):
    torch.library.register_fake(f"w4gen::{name}", shape, lib=library)
    torch.library.register_autograd(f"w4gen::{name}", gradient, setup_context=kept, lib=library)
    torch.library.register_vmap(f"w4gen::{name}", vmapped(getattr(torch.ops.w4gen, name)), lib=library)


def _current(version: int) -> None:
    if version != VERSION:
        raise W4Error(f"this graph calls version {version} of w4gen.linear; this w4gen has {VERSION}: export the model again")


def refuse_mixed(
    x: torch.Tensor, weight: Iterable[torch.Tensor], bias: torch.Tensor | None, format: str, residual: torch.Tensor | None
) -> None:
    """Raise `ShapeError` with the device of each tensor where they are not all on one."""
    if {each.device for each in (x, *weight, bias, residual) if each is not None} != {x.device}:
        given = zip((*_format(format).parts(1, 1), "bias", "residual"), (*weight, bias, residual))
        places = ", ".join(f"{name} on {each.device}" for name, each in given if each is not None)
        raise ShapeError(f"x is on {x.device}, {places}: move all of them to one device")


def refuse_captured(x: torch.Tensor, what: str, instead: str) -> None:
    """Raise `W4Error`, before the stream is touched, where a CUDA graph is being captured."""
    if capturing(x.device):
        sizes = f"{list(x.shape)} of {x.dtype} on {x.device}"
        raise W4Error(f"a call with {sizes} inside the capture of a CUDA graph {what}, which a capture cannot hold: {instead}")


def _first(key: Key, x: torch.Tensor, call: str = "layer({})") -> Launch | None:
    """The launch of a first call, made by one thread and known to all from then on; `call` is how it is written, of an x."""
    warm_up = call.format(f"torch.zeros({x.shape[0]}, {x.shape[1]}, dtype={x.dtype}, device='{x.device}')")
    refuse_captured(x, "is the first of its kind and loads its kernel", f"call {warm_up} once before the capture")
    with _MISSES:
        if key not in LAUNCHES:
            LAUNCHES[key] = _launch(key, x.device)
        return LAUNCHES[key]


def _launch(key: Key, device: torch.device) -> Launch | None:
    _, x_dtype, m, n, k, format, layout, gradient, bias, activation, residual = key
    if x_dtype == torch.float32:
        why = "x is float32; kernels take float16 and bfloat16"
    else:
        x = dtypes.OURS[x_dtype]
        sizes: Any = {"m": m, "n": n, "k": k, "format": _format(format), "layout": _layout(layout)}
        problem = Problem(**sizes, x=x, y=x, bias=bias, activation=activation, residual=residual, gradient=gradient)
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
    """`w` in the layout that kernels on `device` read; a weight on a CPU stays canonical, and one without memory as it is."""
    if device.type == "meta" or (device.type == "cpu" and not interpreted()):
        return w
    return w.packed_as(layout_for(w.format, arch_of(device), w.n, w.k))
