"""Derivatives under the transforms of `torch.func`, which may be nested, for functions whose context is apart: not an op's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active, _functorch
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from w4gen.runtime.ops import VERSION

KINDS = (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def at_work() -> bool:
    """Whether a transform that differentiates is."""
    return _are_functorch_transforms_active() and any(each.key() in KINDS for each in _functorch.get_interpreter_stack())


@dataclass(frozen=True, slots=True)
class Held:
    """What the buffers of a weight hold, and whether rows of y must not depend on M: one value, as no transform looks into it."""

    n: int
    k: int
    format: str
    layout: str
    invariant: bool


class Rows(torch.autograd.Function):
    """The op `linear`: y [M, N] of x [M, K]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor | None, held: Held, *weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        how = held.n, held.format, held.layout, held.invariant
        return torch.ops.w4gen.linear(x, list(weight), bias, *how, "", None, VERSION)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, _, ctx.held, *weight = inputs
        ctx.save_for_backward(*weight)
        ctx.save_for_forward(*weight)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        weight = ctx.saved_tensors
        dx = Columns.apply(dy, ctx.held, *weight) if ctx.needs_input_grad[0] else None
        return dx, dy.sum(0) if ctx.needs_input_grad[1] else None, None, *[None] * len(weight)

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:  # type: ignore[override]
        with _set_fwd_grad_enabled(True):  # PyTorch turns it off here, and a tangent may have a tangent
            y = Rows.apply(x, None, ctx.held, *ctx.saved_tensors)
            return y if bias is None else y + bias.to(y.dtype)


class Columns(torch.autograd.Function):
    """The op `linear_dx`: dx [M, K] of dy [M, N], which is linear too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy: torch.Tensor, held: Held, *weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.ops.w4gen.linear_dx(dy, list(weight), held.k, held.format, held.layout, VERSION)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.held, *weight = inputs
        ctx.save_for_backward(*weight)
        ctx.save_for_forward(*weight)

    @staticmethod
    def backward(ctx: Any, ddx: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        weight = ctx.saved_tensors
        return Rows.apply(ddx, None, ctx.held, *weight), None, *[None] * len(weight)

    @staticmethod
    def jvp(ctx: Any, dy: torch.Tensor, *_: Any) -> torch.Tensor:  # type: ignore[override]
        with _set_fwd_grad_enabled(True):
            return Columns.apply(dy, ctx.held, *ctx.saved_tensors)
