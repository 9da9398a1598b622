"""What people call: the function and the module."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from w4gen.errors import FormatError, ShapeError, W4Error
from w4gen.formats import named
from w4gen.ir.layout import Layout
from w4gen.ir.problem import ACTIVATIONS, PAIRED, outputs
from w4gen.ir.types import Format
from w4gen.runtime import dtypes, eager, transforms
from w4gen.runtime.epilogue import finished
from w4gen.runtime.launch import stored_for
from w4gen.runtime.ops import VERSION, refuse_mixed
from w4gen.runtime.weight import Weight


def linear(
    x: torch.Tensor,
    w: Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    activation: str = "",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y[..., N] = x[..., K] · wᵀ + bias[N]`, in x's dtype (float16, bfloat16; float32 by the fallback).

    With `batch_invariant` the bits of a row of y depend on that row of x alone, not on M or the other rows: slower, as one kernel
    serves every M. An `activation` ("relu", "gelu", "gelu_tanh", "silu") is applied to the sums, and then a `residual` of y's
    shape added, before they are rounded; "silu_mul" takes rows of w in pairs, gate and up (`Weight.paired`), and gives
    y[..., N/2]. Where gradients are asked for, both come after rounding.

    Raises `ShapeError` where a tensor does not fit the weight. A weight that is not yet in the layout of x's device is packed
    anew in every call: keep `stored_for(w, device)`, as `Linear` does.
    """
    if not isinstance(w, Weight):
        raise ShapeError(f"w is a {type(w).__name__}: give a Weight, as Weight.from_float or Weight.from_codes makes one")
    _check(x, w.k, w.n, bias, activation, residual, out)
    refuse_mixed(x, w.buffers, bias, str(w.format), residual)
    w = stored_for(w, x.device)
    y = _call(x, w.buffers, bias, w.n, str(w.format), str(w.layout), batch_invariant, activation, residual)
    return y if out is None else out.copy_(y)


def _call(
    x: torch.Tensor,
    buffers: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    n: int,
    format: str,
    layout: str,
    invariant: bool,
    activation: str,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """The op, for x of any number of dimensions and rows; activation and residual come after it where gradients are asked for."""
    rows, how = x.reshape(-1, x.shape[-1]), (n, format, layout, invariant)
    if not is_dynamo_compiling() and transforms.at_work():
        y = transforms.Rows.apply(rows, bias, transforms.Held(n, x.shape[-1], format, layout, invariant), *buffers)
        return finished(y.reshape(*x.shape[:-1], n), activation, residual)
    given = [each for each in (x, bias, residual) if each is not None]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in given):
        return finished(_dual(rows, buffers, bias, how).reshape(*x.shape[:-1], n), activation, residual)
    if (activation or residual is not None) and torch.is_grad_enabled() and any(each.requires_grad for each in given):
        y = torch.ops.w4gen.linear(rows, list(buffers), bias, *how, "", None, VERSION)
        return finished(y.reshape(*x.shape[:-1], n), activation, residual)
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    y = torch.ops.w4gen.linear(rows, list(buffers), bias, *how, activation, added, VERSION)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _dual(x: torch.Tensor, buffers: tuple[torch.Tensor, ...], bias: torch.Tensor | None, how: tuple[Any, ...]) -> torch.Tensor:
    """The op under `dual_level`, of which its registration with PyTorch knows nothing: its tangent is the layer of x's."""
    if eager_transforms.JVP_NESTING > 1:  # compiled, as `transforms` takes it otherwise; tangents of tangents would be lost
        raise W4Error("forward mode within forward mode does not go through a compiled layer: call it without torch.compile")
    primal, tangent = forward_ad.unpack_dual(x)
    y = torch.ops.w4gen.linear(primal, list(buffers), None, *how, "", None, VERSION)
    if tangent is not None:
        y = forward_ad.make_dual(y, torch.ops.w4gen.linear(tangent, list(buffers), None, *how, "", None, VERSION))
    return y if bias is None else y + bias.to(y.dtype)


def _check(
    x: torch.Tensor,
    k: int,
    n: int,
    bias: torch.Tensor | None,
    activation: str,
    residual: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> None:
    """Shapes and types; whether all are on one device is for the op to see."""
    if x.dim() == 0 or x.shape[-1] != k:
        raise ShapeError(f"x has shape {list(x.shape)}; its last dimension must be K={k}, the inputs of the weight [{n}, {k}]")
    dtypes.of(x, "x")
    _check_bias(bias, n)
    if activation not in ACTIVATIONS or (activation == PAIRED and (n % 2 or residual is not None)):
        pairs = f"{PAIRED} takes an even N, here {n}, and no residual"
        raise ShapeError(f"activation={activation!r}: use one of {', '.join(ACTIVATIONS[1:])}; {pairs}")
    shape = (*x.shape[:-1], outputs(n, activation))
    if residual is not None and tuple(residual.shape) != shape:
        raise ShapeError(f"residual is {list(residual.shape)}; y is {list(shape)}")
    if out is not None and (tuple(out.shape) != shape or out.dtype != x.dtype or out.device != x.device):
        raise ShapeError(f"out is {out.dtype}{list(out.shape)} on {out.device}; y is {x.dtype}{list(shape)} on {x.device}")


def _check_bias(bias: torch.Tensor | None, n: int) -> None:
    if bias is not None and tuple(bias.shape) != (n,):
        raise ShapeError(f"bias is {list(bias.shape)}; the weight needs [{n}]")


def attribute(part: str) -> str:
    """What the buffer of a part of a weight is called in a layer."""
    return part.replace(".", "_")


def _order_problem(order: torch.Tensor, k: int) -> str:
    """Why a tensor does not say which columns of x a weight multiplies; empty where it does."""
    if order.dtype != torch.int64 or tuple(order.shape) != (k,):
        return f"order is {order.dtype}{list(order.shape)}: int64[{k}] says which column of x each of the weight multiplies"
    if order.is_meta:
        return ""
    low, high = map(int, order.aminmax())
    if low < 0 or high >= k:
        return f"order names columns {low}…{high} of x: there are 0…{k - 1}"
    named = int(torch.zeros(k, dtype=torch.bool, device=order.device).index_fill_(0, order, True).sum())
    return "" if named == k else f"order names {named} columns of x: each of {k} is multiplied once"


def _described(state: torch.Tensor) -> tuple[Format, Layout, int, int]:
    """The format, the layout and the sizes [n, k] that a layer's extra state tells. Raises `FormatError` for another text."""
    try:
        told = json.loads(bytes(state.tolist()))
        return Format.parse(told["format"]), Layout.parse(told["layout"]), told["n"], told["k"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"the extra state of a layer does not say how its weight is stored ({error}): save the model again"
        ) from error


class Linear(torch.nn.Module):
    """A linear layer over a quantized weight: `y[..., N] = x[..., K] · wᵀ + bias[N]`.

    Buffers are those of the Weight, `codes`, `scale` and so on (`scale.scale` is called `scale_scale`); the format, the layout
    and the sizes travel in the state dict beside them, in a tensor of bytes. Gradients reach x and the bias, not the weight.
    `batch_invariant` and `activation` may be set at any time, and a residual given to a call: see `linear`.
    With an `order`, int64[K], column j of the weight multiplies `x[..., order[j]]`. Raises `ShapeError` for another
    order, or a bias of another shape.
    """

    codes: torch.Tensor
    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None = None,
        batch_invariant: bool = False,
        activation: str = "",
        order: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._calls: dict[tuple[Any, ...], eager.Call] = {}
        if order is not None and (problem := _order_problem(order, weight.k)):
            raise ShapeError(problem)
        _check_bias(bias, weight.n)
        self.batch_invariant, self.activation = batch_invariant, activation
        self.in_features, self.out_features = weight.k, weight.n
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.register_buffer("order", order)
        self._hold(weight)

    @classmethod
    def from_float(cls, linear: torch.nn.Linear, format: str | Format, clip: bool = False) -> Linear:
        """Quantize an `nn.Linear` as `Weight.from_float` does; its bias is kept. Raises `ShapeError` where it is quantized."""
        if isinstance(linear, Linear):
            raise ShapeError(
                f"the layer is quantized already ({linear.format.label}): keep it, or give the layer it was made from"
            )
        return cls(Weight.from_float(linear.weight.detach(), named(format), clip), linear.bias)

    @property
    def weight(self) -> Weight:
        """The weight as it is stored now."""
        return Weight(self.format, self.out_features, self.in_features, self.layout, self._held())

    @property
    def launched(self) -> Linear:
        """The layer whose kernels a call runs: this one."""
        return self

    def _hold(self, weight: Weight) -> None:
        """Keep a weight, packed for the device that it is on."""
        self._keep(stored_for(weight, weight.codes.device))

    def _keep(self, weight: Weight) -> None:
        """Keep a weight as it is."""
        self.format, self.layout, self._format, self._layout = (
            weight.format,
            weight.layout,
            str(weight.format),
            str(weight.layout),
        )
        for name in set(self._buffers) - {"bias", "order"}:
            del self._buffers[name]
        self._names = tuple(map(attribute, weight.names))
        for name, buffer in zip(self._names, weight.buffers, strict=True):
            self.register_buffer(name, buffer)
        for name in [name for name, buffer in self._buffers.items() if buffer is None]:
            self._buffers[name] = self._buffers.pop(name)  # torch.export counts what stands before a buffer, and takes no None

    def _held(self) -> tuple[torch.Tensor, ...]:
        """The buffers of the weight, in order."""
        return tuple(self._buffers[name] for name in self._names)  # type: ignore[misc]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        short = residual is None and eager.plain(x)
        if short:
            asked = x.shape, x.dtype, x.device, self.activation, self.batch_invariant
            call = self._calls.get(asked)
            y = None if call is None else call(x, self._buffers)
            if y is not None:
                return y
        y = self._answer(x, residual)
        if short:
            self._prepare(asked, x)
        return y

    def _answer(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """y by the op."""
        _check(x, self.in_features, self.out_features, self.bias, self.activation, residual)
        x = x if self.order is None else x[..., self.order]
        how = self.out_features, self._format, self._layout, self.batch_invariant, self.activation
        return _call(x, self._held(), self.bias, *how, residual)

    def _prepare(self, asked: tuple[Any, ...], x: torch.Tensor) -> None:
        """Keep what the op found for x, that the next call of this shape may launch it at once."""
        how = self.out_features, self._format, self._layout, self.bias, self.batch_invariant, self.activation, None
        call = eager.prepared(eager.known(x, *how), x, self._buffers, self._names)
        if call is not None:
            if len(self._calls) >= eager.LIMIT:
                self._calls.clear()
            self._calls[asked] = call

    def __getstate__(self) -> dict[str, Any]:
        """A copy prepares its own calls."""
        return self.__dict__ | {"_calls": {}}

    def get_extra_state(self) -> torch.Tensor:
        """What the buffers hold, as text in bytes: a tensor, as files of tensors alone are to hold it too."""
        told = {"format": self._format, "layout": self._layout, "n": self.out_features, "k": self.in_features}
        return torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Take the buffers for what `state` says they hold, and pack them for their device."""
        self.format, self.layout, *_ = _described(state)
        if not self.codes.is_meta:
            self._hold(self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load a weight of any layout, packed first as this layer's: buffers of the same format stay where they are in memory."""
        key, errors = f"{prefix}_extra_state", rest[-1]
        if key in state_dict:
            order = state_dict.get(f"{prefix}order")
            if order is not None and (problem := _order_problem(order, self.in_features)):
                errors.append(f"{prefix}{problem}")
            if order is None or self.order is None:
                self.order = None if order is None else torch.empty_like(order, device=self.codes.device)
            given = self._given(state_dict, prefix, errors)
            if given is not None:
                state_dict.update({prefix + attribute(name): each for name, each in zip(given.names, given.buffers)})
            state_dict[key] = self.get_extra_state()  # where nothing is loaded, what is held goes on to be described
        elif any(prefix + name in state_dict for name in self._names):
            errors.append(f"{key} is missing, which says how {prefix}codes is stored: save the layer's whole state_dict()")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _given(self, state_dict: dict[str, Any], prefix: str, errors: list[str]) -> Weight | None:
        """The weight in a state dict, in this layer's layout; one of another format takes the place of the layer's own."""
        form, layout, n, k = _described(state_dict[f"{prefix}_extra_state"])
        names = [prefix + attribute(name) for name in form.parts(n, k)]
        if missing := [name for name in names if name not in state_dict]:
            if form != self.format:  # else PyTorch names what is missing
                errors.append(f"{missing[0]} is missing, which a weight in {form.label} has: save the layer's whole state_dict()")
            return None
        if (n, k) != (self.out_features, self.in_features):
            own = [self.out_features, self.in_features]
            errors.append(f"size mismatch for {prefix}codes: a weight [{n}, {k}], where the layer has {own}")
            return None
        given = Weight(form, n, k, layout, tuple(state_dict[name] for name in names))
        if form == self.format:
            return given.packed_as(self.layout)
        device = self.codes.device
        self._keep(replace(given, buffers=tuple(torch.empty_like(each, device=device) for each in given.buffers)))
        return given

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        """Move buffers, but never change what codes, scales, zeros and the codebook are: only the bias takes a new dtype."""
        empty = self.codes.is_meta
        for name, held in list(self._buffers.items()):
            if held is not None:
                moved = fn(held)
                setattr(self, name, moved if name == "bias" or moved.dtype == held.dtype else held.to(moved.device))
        if not empty and not self.codes.is_meta:
            self._hold(self.weight)
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, format={self.format.label}, bias={self.bias is not None}"
