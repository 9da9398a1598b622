"""One linear layer of a checkpoint, and what the dialects that hold it have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch

from w4gen.errors import CheckpointError, ShapeError, W4Error
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.types import Format
from w4gen.runtime import dtypes
from w4gen.runtime.linear import Linear
from w4gen.runtime.weight import Weight

UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, re.error)
"""What code that trusts a file raises where its values, of whatever type, are not what is written there by rights."""
Tensors = Mapping[str, torch.Tensor]
"""The tensors of one layer, by what follows the layer's name and its dot: `qweight`, `weight.absmax`, `bias`."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A linear layer as it was read: what `Weight.from_parts` takes, with codes u8[N, K].

    `order` is int64[K] where the stored columns are not in the order of x: column j multiplies `x[..., order[j]]`. `notes` are
    warnings about what the file holds, each naming the layer.
    """

    name: str
    dialect: str
    format: Format
    parts: Tensors
    bias: torch.Tensor | None = None
    order: torch.Tensor | None = None
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, (N, K)."""
        n, k = self.parts["codes"].shape
        return n, k

    @property
    def weight(self) -> Weight:
        """The weight, packed; columns in the stored order."""
        try:
            return Weight.from_parts(self.parts, self.format)
        except W4Error as error:
            raise CheckpointError(f"{self.name}: its {self.dialect} tensors do not hold a weight: {error}") from error

    def linear(self) -> Linear:
        try:
            return Linear(self.weight, self.bias, order=self.order)
        except ShapeError as error:
            raise CheckpointError(f"{self.name}: {error}: the file may be damaged") from error


class Dialect(Protocol):
    """A way to store a quantized linear layer; each is a module of this package with these names.

    A layer is there where a tensor's name is the layer's and one of `MARKS` (".qweight"): no other tensor may end so. A mark that
    begins with an underscore is of a stack of layers, called NAME.0, NAME.1 and so on: their tensors are slices of NAME_….
    """

    NAME: str
    MARKS: tuple[str, ...]

    def claims(self, quantization: Mapping[str, Any]) -> bool:
        """Whether the `quantization_config` of a checkpoint says that it is of this dialect."""

    def read(self, tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
        """The layer called `name`. Raises `CheckpointError` where its tensors and what is said of them do not agree."""


def refuse(name: str, tensor: str, problem: str, cause: str) -> NoReturn:
    """Raise the error of a layer that contradicts itself."""
    raise CheckpointError(f"{name}.{tensor}: {problem}; {cause}")


def need(tensors: Tensors, tensor: str, name: str, dims: int | None = None, kind: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of a layer, with as many dimensions as it must have, of the type that its bits are read by."""
    if tensor not in tensors:
        refuse(name, tensor, f"missing, there are {', '.join(sorted(tensors))}", "a shard may be missing, or the dialect another")
    found = tensors[tensor]
    if dims is not None and found.dim() != dims:
        refuse(name, tensor, f"has shape {list(found.shape)}, {dims} dimensions are needed", "the dialect may be another")
    if kind is not None and found.dtype != kind:
        refuse(name, tensor, f"is {found.dtype}, {kind} is needed", "the file may be damaged, or the dialect another")
    return found


def expect(found: torch.Tensor, shape: tuple[int, ...], tensor: str, name: str, cause: str) -> torch.Tensor:
    """`found`, which must be of a shape."""
    if tuple(found.shape) != shape:
        refuse(name, tensor, f"has shape {list(found.shape)}, {list(shape)} is needed", cause)
    return found


def bitstream(words: torch.Tensor, bits: int, axis: int, count: int) -> torch.Tensor:
    """`count` fields u8 of a dense stream along an axis of i32 words [., .], lowest bits first: 32 fields in `bits` words."""
    rows = words.movedim(axis, -1)
    layout = layouts.dense(rows.shape[0], count, bits)
    filled = torch.nn.functional.pad(rows, (0, layout.length // rows.shape[0] - rows.shape[1]))
    return layouts.unpack(layout, filled.reshape(-1), torch)[:, :count].movedim(-1, axis)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """The codes u8[N, 2·bytes] of bytes u8[N, bytes]: the low half of each byte first."""
    return torch.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1)


def integers(
    codes: torch.Tensor, bits: int, group: int, scales: torch.Tensor, zeros: torch.Tensor | None
) -> tuple[Format, dict[str, torch.Tensor]]:
    """The format and parts of codes u8[N, K] under scales and zeros u8 [N, groups]; zeros in the middle need not be kept."""
    kind = dtypes.of(scales, "scale")
    middle = zeros is None or bool((zeros == 2 ** (bits - 1)).all())
    form = named(f"int{bits}" if middle and bits > 1 else f"uint{bits}_z")
    form = replace(form, group=-1 if group == codes.shape[1] else group, scale=kind, zero=form.zero and kind)
    parts = {"codes": codes.contiguous(), "scale": scales.contiguous()}
    if form.zero is not None:
        zeros = torch.full(scales.shape, 2 ** (bits - 1), device=scales.device) if zeros is None else zeros
        parts["zero"] = zeros.to(scales.dtype).contiguous()
    return form, parts


def by_group(
    index: torch.Tensor, group: int, groups: int, name: str, tensor: str
) -> tuple[torch.Tensor | None, int, torch.Tensor | None]:
    """The order of columns in which groups follow each other, the group of that order, and which stored group each is.

    `index` i32[K] says each column's group. The order is None where columns are in it already, the third None where groups are
    just 0, 1, …. Groups of unequal length, as slices for tensor parallelism have, are cut into ones of their common divisor.
    """
    k = len(index)
    index = index.long()
    if int(index.min()) < 0 or int(index.max()) >= groups:
        refuse(name, tensor, f"names groups {int(index.min())}…{int(index.max())} of {groups}", "the file may be damaged")
    if torch.equal(index, torch.arange(k, device=index.device) // group):
        return None, group, None
    held, order = torch.sort(index, stable=True)
    counts = torch.bincount(held, minlength=groups)
    equal = group if bool((counts[:-1] == group).all()) and 0 < int(counts[-1]) <= group else math.gcd(*counts.tolist())
    sorted_already = torch.equal(order, torch.arange(k, device=index.device))
    picked = held[::equal]
    same = torch.equal(picked, torch.arange(groups, device=index.device))
    return None if sorted_already else order, equal, None if same else picked
