"""The short way of an eager call: a launch prepared for x of one shape, over a weight that is as it was in the call before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._dynamo import guards
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from w4gen.runtime import launch as launches
from w4gen.runtime import ops
from w4gen.runtime.launch import Launch, Start

Buffers: TypeAlias = Mapping[str, torch.Tensor | None]
Call: TypeAlias = Callable[[torch.Tensor, Buffers], "torch.Tensor | None"]
EMPTY = {"cuda": guards._empty_strided_cuda, "cpu": guards._empty_strided_cpu}
"""Memory from PyTorch's allocator for (sizes, strides, dtype), past its dispatcher."""
LIMIT = 64
"""Calls that a layer keeps prepared."""


def plain(x: torch.Tensor) -> bool:
    """Whether a call with x is a launch and nothing else: no gradient, no autocast, and nothing that traces or transforms it."""
    return not (
        is_dynamo_compiling()  # first: it goes no further
        or type(x) is not Tensor
        or (x.requires_grad and is_grad_enabled())
        or _is_any_autocast_enabled()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _are_functorch_transforms_active()
        or _get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def known(*asked: Any) -> Launch | None:
    """The launch that a call found (see `ops.question`); None where there was none yet, or the fallback answers."""
    return ops.LAUNCHES.get(ops.question(*asked))


def prepared(launch: Launch | None, x: torch.Tensor, buffers: Buffers, names: tuple[str, ...]) -> Call | None:
    """The call of a layer for x of just this shape, `names` being its weight's buffers; None where there is no short way.

    It holds addresses, so it answers only while every buffer is the same tensor, lies where it lay and was not written to, and
    gives None from then on; also where x must be copied, or is on a GPU that is not the current one. The op answers then.
    """
    held = {name: each for name in (*names, "bias") if (each := buffers.get(name)) is not None}
    if launch is None or buffers.get("order") is not None or not _fixed(launch, x, held):
        return None
    early = True in launch.ways and not any(each.is_inference() for each in held.values())  # nothing counts writes to those
    m = x.numel() // x.shape[-1]
    rest = [each.data_ptr() for each in held.values()] + [m]
    shape = (*x.shape[:-1], launch.kernel.problem.outputs)
    return _call(launch.ways[early][0], launch.grid(m)[0], rest, held, torch.empty(shape, dtype=x.dtype, device="meta"), x.device)


def _fixed(launch: Launch, x: torch.Tensor, held: Mapping[str, torch.Tensor]) -> bool:
    """Whether a launch is one function of (y, x, what is held, m) that takes its tensors as they are."""
    (start, *more), (places, *_), bias = launch.ways[False], launch.places, held.get("bias")
    return (
        type(start) is Start
        and not (more or launch.makes)
        and places[:2] == (0, 1)
        and list(places) == sorted(places)
        and len(places) == len(held) + 3
        and all(type(each) is torch.Tensor for each in held.values())
        and (bias is None or (bias.dtype == x.dtype and bias.data_ptr() % 16 == 0))
    )


def _call(
    start: Start, grid: tuple[int, int, int], rest: list[int], held: Mapping[str, torch.Tensor], y: torch.Tensor, on: torch.device
) -> Call:
    """The call, with all that it needs in variables of its own; `y` is an output without memory, `rest` follows y and x."""
    begin, flags, index, empty = start.start, start.flags, on.index, EMPTY[on.type]
    sizes, strides, dtype, biased = tuple(y.shape), y.stride(), y.dtype, "bias" in held
    noted = [(name, ref(each), each.data_ptr(), None if each.is_inference() else each._version) for name, each in held.items()]
    device, stream = launches.current_device, launches.current_stream

    def call(x: torch.Tensor, buffers: Buffers) -> torch.Tensor | None:
        at = x.data_ptr()
        if at % 16 or not x.is_contiguous() or device() != index or buffers.get("order") is not None:
            return None
        for name, known, place, version in noted:
            each = buffers.get(name)
            if each is not known() or each is None or each.data_ptr() != place:
                return None
            if version is not None and each._version != version:
                return None
        bias = buffers.get("bias", x)  # that of a layer without one is None; a Parameter in its place is no buffer
        if (bias is not None) != biased or (biased and bias.requires_grad and is_grad_enabled()):
            return None
        y = empty(sizes, strides, dtype)
        begin(*grid, stream(index), *flags, y.data_ptr(), at, *rest)
        return y

    return call
