"""A quantized weight: packed codes, scales, zeros, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from w4gen import quantize
from w4gen.errors import FormatError, ShapeError
from w4gen.formats import named
from w4gen.ir import layout as layouts
from w4gen.ir.interpret import offline
from w4gen.ir.layout import Layout
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import DType, Format
from w4gen.runtime import dtypes
from w4gen.schedule.rewrite import pack

BUFFERS = ("codes", "scale", "zero", "codebook")
"""The tensors of a weight, in the order in which the op and every kernel take them; the last two may be None."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """`w[n, k]` of codes, scales and zeros, one of each per group, as the format says; stored.

    codes: i32[words] as `layout` says · scale: [N, groups] in the format's scale type (rows and groups padded as the layout is)
    · zero: alike, in the format's zero type, or None · codebook: f32[2**bits] or None. All are on one device.
    """

    format: Format
    n: int
    k: int
    layout: Layout
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    codebook: torch.Tensor | None = None

    @classmethod
    def from_float(cls, w: torch.Tensor, format: str | Format) -> Weight:
        """Round `w` float[N, K] to the nearest values of a format. Raises `FormatError` on NaN and infinity."""
        form = named(format)
        if w.dim() != 2 or not w.is_floating_point():
            raise ShapeError(f"a weight is a float tensor [N, K], not {w.dtype}{list(w.shape)}")
        return cls.from_codes(*quantize.round_to_nearest(w, form), form)

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        format: str | Format,
        layout: Layout | None = None,
    ) -> Weight:
        """Pack `codes` int[N, K] in 0…2**bits-1 with `scales` and, where the format has them, `zeros` [N, ceil(K / group)].

        An integer zero is one of the format's values, 0…2**bits-1 for unsigned codes, and may come in an integer tensor. Raises
        `FormatError` or `ShapeError` that names the first thing that does not fit.
        """
        form = named(format)
        _check(codes, scales, zeros, form)
        n, k = codes.shape
        layout = layout or layouts.dense(n, k, form.bits)
        problem = Problem(m=(1, 1), n=n, k=k, format=form, layout=layout)
        data = {"codes": codes.to(torch.uint8), "scale": scales.to(dtypes.torch_dtype(form.scale))}
        if zeros is not None and form.zero is not None:
            data["zero"] = zeros.to(dtypes.torch_dtype(form.zero))
        if form.codebook is not None:
            data["codebook"] = torch.tensor(form.codebook, dtype=torch.float32, device=codes.device)
        stored = offline(pack(lower(problem), layout), data, torch)
        scale, zero = (stored[f"{name}.stored"].contiguous() if name in data else None for name in ("scale", "zero"))
        return cls(form, n, k, layout, stored["codes.stored"].reshape(-1).contiguous(), scale, zero, stored.get("codebook"))

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The tensors called `BUFFERS`."""
        return self.codes, self.scale, self.zero, self.codebook

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The codes u8[N, K], scales [N, groups] and zeros [N, groups] (None where there are none) that were packed."""
        codes = layouts.unpack(self.layout, self.codes, torch)[: self.n, : self.k]
        scale, zero = (each if each is None else each[: self.n, : self.format.groups(self.k)] for each in (self.scale, self.zero))
        return codes, scale, zero

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K]: the exact product of scale and value, rounded once to `dtype` (exact in float64)."""
        return dequantize(*self.buffers, self.format, self.layout, self.n, self.k, dtype)

    def packed_as(self, layout: Layout) -> Weight:
        """The same weight in another layout."""
        return self if layout == self.layout else Weight.from_codes(*self.unpack(), self.format, layout)

    def to(self, device: torch.device | str) -> Weight:
        return self._with(lambda held: held.to(device))

    def clone(self) -> Weight:
        """The same weight in buffers of its own."""
        return self._with(torch.clone)

    def _with(self, make: Callable[[torch.Tensor], torch.Tensor]) -> Weight:
        """The same weight, each buffer being what `make` makes of it."""
        codes, scale, zero, codebook = (None if held is None else make(held) for held in self.buffers)
        return replace(self, codes=codes, scale=scale, zero=zero, codebook=codebook)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(each.nbytes for each in self.buffers if each is not None)

    def __repr__(self) -> str:
        return f"Weight({self.format.label}, [{self.n}, {self.k}], {self.nbytes} bytes on {self.codes.device})"


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    codebook: torch.Tensor | None,
    form: Format,
    layout: Layout,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight [N, K] from its buffers, in f32 (products of 16-bit scales and small codes are exact there), or in f64."""

    def spread(each: torch.Tensor) -> torch.Tensor:
        return each[:n, : form.groups(k)].to(wide).repeat_interleave(form.group_in(k), 1)[:, :k]

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    index = layouts.unpack(layout, codes, torch)[:n, :k].long()
    values = codebook if codebook is not None else torch.tensor(form.values, device=codes.device)
    table = values.to(wide) if dtype != torch.float64 else torch.tensor(form.values, dtype=wide, device=codes.device)
    if zero is None:
        return (table[index] * spread(scale)).to(dtype)
    if form.zero_after_scale:
        return (table[index] * spread(scale) - spread(zero)).to(dtype)
    return ((table[index] - spread(zero)) * spread(scale)).to(dtype)


def _check(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: Format) -> None:
    if codes.dim() != 2 or codes.is_floating_point() or codes.dtype == torch.bool or 0 in codes.shape:
        raise ShapeError(f"codes are integers [N, K], not {codes.dtype}{list(codes.shape)}")
    if (zeros is None) != (form.zero is None):
        raise FormatError(
            f"{form.label} has no zero points: leave zeros out"
            if form.zero is None
            else f"{form.label} has a zero for each group: give zeros of the shape of scales, {list(scales.shape)}"
        )
    _check_grouped(codes, scales, "scale", form, form.scale)
    outside = torch.nonzero((codes < 0) | (codes > 2**form.bits - 1))
    if len(outside):
        at = outside[0].tolist()
        raise FormatError(f"code{at} is {codes[tuple(at)].item()}: {form.label} has codes 0…{2**form.bits - 1}")
    if zeros is not None and form.zero is not None:
        _check_grouped(codes, zeros, "zero", form, form.zero)
        if form.zero_mode == "integer":
            _check_integer(zeros, form)


def _check_grouped(codes: torch.Tensor, tensor: torch.Tensor, what: str, form: Format, kind: DType) -> None:
    """A tensor with one finite `what` for each group, which fits its type `kind`."""
    n, k = codes.shape
    if tuple(tensor.shape) != (n, form.groups(k)):
        raise ShapeError(
            f"{what}s have shape {list(tensor.shape)}; {form.label} codes [{n}, {k}] need [{n}, {form.groups(k)}], "
            f"one per group of {form.group_in(k)}"
        )
    if tensor.device != codes.device:
        raise ShapeError(f"codes are on {codes.device}, {what}s on {tensor.device}: move one to the other")
    if not (tensor.is_floating_point() or (what == "zero" and form.zero_mode == "integer")):
        raise ShapeError(f"{what}s are {tensor.dtype}: give them as {kind}")
    quantize.refuse_non_finite(tensor, what)
    if not torch.isfinite(tensor.to(dtypes.torch_dtype(kind))).all():
        raise FormatError(f"a {what} of {tensor.abs().max().item():.3g} does not fit {kind}: use {form.label}_f32")


def _check_integer(zeros: torch.Tensor, form: Format) -> None:
    """Integer zeros are whole and among the format's values."""
    low, high = min(form.values), max(form.values)
    outside = torch.nonzero((zeros < low) | (zeros > high) | (zeros != zeros.round() if zeros.is_floating_point() else False))
    if len(outside):
        at = outside[0].tolist()
        raise FormatError(f"zero{at} is {zeros[tuple(at)].item():g}: {form.label} has integer zeros {low:g}…{high:g}")
