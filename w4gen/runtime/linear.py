"""What people call: the function and the module."""

from __future__ import annotations

from typing import Any

import torch

from w4gen.errors import ShapeError
from w4gen.formats import named
from w4gen.ir.layout import Layout
from w4gen.ir.types import Format
from w4gen.runtime import dtypes
from w4gen.runtime.ops import stored_for
from w4gen.runtime.weight import Weight


def linear(x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """`y[..., N] = x[..., K] · wᵀ + bias[N]`, in x's dtype (float16, bfloat16; float32 by the fallback).

    Raises `ShapeError` where x, bias or out do not fit the weight. A weight that is not yet in the layout of x's device is
    packed anew in every call: keep `stored_for(w, device)`, as `Linear` does.
    """
    _check(x, w.k, w.n, w.codes.device, bias, out)
    w = stored_for(w, x.device)
    y = _call(x, w.buffers, bias, w.n, str(w.format), str(w.layout))
    return y if out is None else out.copy_(y)


def _call(
    x: torch.Tensor, buffers: tuple[torch.Tensor, ...], bias: torch.Tensor | None, n: int, format: str, layout: str
) -> torch.Tensor:
    """The op, for x of any number of dimensions and rows."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], n))
    bias = bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)
    return torch.ops.w4gen.linear(rows, list(buffers), bias, n, format, layout).reshape(*x.shape[:-1], n)


def _check(
    x: torch.Tensor, k: int, n: int, device: torch.device, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> None:
    if x.dim() == 0 or x.shape[-1] != k:
        raise ShapeError(f"x has shape {list(x.shape)}; its last dimension must be K={k}, the inputs of the weight [{n}, {k}]")
    dtypes.of(x, "x")
    if x.device != device:
        raise ShapeError(f"x is on {x.device}, the weight on {device}: move one to the other")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.device != device):
        raise ShapeError(f"bias is {list(bias.shape)} on {bias.device}; the weight needs [{n}] on {device}")
    if out is not None and (tuple(out.shape) != (*x.shape[:-1], n) or out.dtype != x.dtype or out.device != x.device):
        raise ShapeError(f"out is {out.dtype}{list(out.shape)} on {out.device}; y is {x.dtype}{[*x.shape[:-1], n]} on {x.device}")


class Linear(torch.nn.Module):
    """A linear layer over a quantized weight: `y[..., N] = x[..., K] · wᵀ + bias[N]`.

    Buffers are those of the Weight, `codes`, `scale` and so on (`scale.scale` is called `scale_scale`); the format and the layout
    travel in the state dict beside them. Gradients reach x and the bias, not the weight. With an `order`, int64[K], column j of
    the weight multiplies `x[..., order[j]]`.
    """

    codes: torch.Tensor
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(self, weight: Weight, bias: torch.Tensor | None = None, order: torch.Tensor | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = weight.k, weight.n, weight.format
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.register_buffer("order", order)
        self._hold(weight)

    @classmethod
    def from_float(cls, linear: torch.nn.Linear, format: str | Format) -> Linear:
        """Quantize an `nn.Linear` by rounding to nearest; its bias is kept as it is."""
        return cls(Weight.from_float(linear.weight.detach(), named(format)), linear.bias)

    @property
    def weight(self) -> Weight:
        """The weight as it is stored now."""
        return Weight(self.format, self.out_features, self.in_features, self.layout, self._held())

    def _hold(self, weight: Weight) -> None:
        """Keep a weight, packed for the device that it is on."""
        weight = stored_for(weight, weight.codes.device)
        self.layout, self._format, self._layout = weight.layout, str(weight.format), str(weight.layout)
        for name in set(self._buffers) - {"bias", "order"}:
            del self._buffers[name]
        self._names = tuple(name.replace(".", "_") for name in weight.names)
        for name, buffer in zip(self._names, weight.buffers, strict=True):
            self.register_buffer(name, buffer)

    def _held(self) -> tuple[torch.Tensor, ...]:
        """The buffers of the weight, in order."""
        return tuple(self._buffers[name] for name in self._names)  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check(x, self.in_features, self.out_features, self.codes.device, self.bias)
        x = x if self.order is None else x[..., self.order]
        return _call(x, self._held(), self.bias, self.out_features, self._format, self._layout)

    def get_extra_state(self) -> dict[str, str]:
        return {"format": self._format, "layout": self._layout}

    def set_extra_state(self, state: dict[str, str]) -> None:
        """Read what the loaded buffers are, and pack them for the device."""
        self.format, self.layout = Format.parse(state["format"]), Layout.parse(state["layout"])
        self._hold(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take buffers of any layout: the layout comes with them, and the next call packs for its device."""
        extra = state_dict.get(f"{prefix}_extra_state")
        form = Format.parse(extra["format"]) if extra else self.format
        names = tuple(name.replace(".", "_") for name in form.parts(1, 1))
        if all(prefix + name in state_dict for name in names):
            for name in set(self._names) - set(names):
                del self._buffers[name]
            for name in names:
                given, held = state_dict[prefix + name], self._buffers.get(name)
                if held is None or (given.shape, given.dtype) != (held.shape, held.dtype):
                    self.register_buffer(name, torch.empty_like(given, device=self.codes.device))
            self._names, order = names, state_dict.get(f"{prefix}order")
            self.order = None if order is None else torch.empty_like(order, device=self.codes.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        """Move buffers, but never change what codes, scales, zeros and the codebook are: only the bias takes a new dtype."""
        for name, held in list(self._buffers.items()):
            if held is not None:
                moved = fn(held)
                setattr(self, name, moved if name == "bias" or moved.dtype == held.dtype else held.to(moved.device))
        if not self.codes.is_meta:
            self._hold(self.weight)
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, format={self.format.label}, bias={self.bias is not None}"
