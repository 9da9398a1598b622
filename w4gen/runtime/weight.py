"""A quantized weight: packed codes, scales, and how to read them."""

from __future__ import annotations

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
from w4gen.ir.types import Format
from w4gen.runtime import dtypes
from w4gen.schedule.rewrite import pack


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """`w[n, k] = scale[n, k // group] * value(code[n, k])`, stored.

    codes: i32[words] as `layout` says · scale: [N, groups] in the format's scale type (rows and groups padded as the layout is)
    · codebook: f32[2**bits] or None. All three are on one device.
    """

    format: Format
    n: int
    k: int
    layout: Layout
    codes: torch.Tensor
    scale: torch.Tensor
    codebook: torch.Tensor | None = None

    @classmethod
    def from_float(cls, w: torch.Tensor, format: str | Format) -> Weight:
        """Round `w` float[N, K] to the nearest values of a format. Raises `FormatError` on NaN and infinity."""
        form = named(format)
        if w.dim() != 2 or not w.is_floating_point():
            raise ShapeError(f"a weight is a float tensor [N, K], not {w.dtype}{list(w.shape)}")
        codes, scale = quantize.round_to_nearest(w, form)
        return cls.from_codes(codes, scale, None, form)

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        format: str | Format,
        layout: Layout | None = None,
    ) -> Weight:
        """Pack `codes` int[N, K] in 0…2**bits-1 with `scales` [N, ceil(K / group)]; `zeros` only where the format has them.

        Raises `FormatError` or `ShapeError` that names the first thing that does not fit.
        """
        form = named(format)
        _check(codes, scales, zeros, form)
        n, k = codes.shape
        layout = layout or layouts.rows(n, k, form.bits)
        problem = Problem(m=(1, 1), n=n, k=k, format=form, layout=layout)
        data = {"codes": codes.to(torch.uint8), "scale": scales.to(dtypes.torch_dtype(form.scale))}
        if form.codebook is not None:
            data["codebook"] = torch.tensor(form.codebook, dtype=torch.float32, device=codes.device)
        stored = offline(pack(lower(problem), layout), data, torch)
        scale = stored["scale.stored"].contiguous()
        return cls(form, n, k, layout, stored["codes.stored"].reshape(-1).contiguous(), scale, stored.get("codebook"))

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes u8[N, K] and scales [N, groups] that were packed."""
        codes = layouts.unpack(self.layout, self.codes, torch)[: self.n, : self.k]
        return codes, self.scale[: self.n, : self.format.groups(self.k)]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [N, K]: the exact product of scale and value, rounded once to `dtype` (exact in float64)."""
        return dequantize(self.codes, self.scale, self.codebook, self.format, self.layout, self.n, self.k, dtype)

    def packed_as(self, layout: Layout) -> Weight:
        """The same weight in another layout."""
        return self if layout == self.layout else Weight.from_codes(*self.unpack(), None, self.format, layout)

    def to(self, device: torch.device | str) -> Weight:
        moved = {name: getattr(self, name).to(device) for name in ("codes", "scale")}
        return replace(self, **moved, codebook=None if self.codebook is None else self.codebook.to(device))

    def clone(self) -> Weight:
        """The same weight in buffers of its own."""
        return replace(self, codes=self.codes.clone(), scale=self.scale.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(each.nbytes for each in (self.codes, self.scale, self.codebook) if each is not None)

    def __repr__(self) -> str:
        return f"Weight({self.format.label}, [{self.n}, {self.k}], {self.nbytes} bytes on {self.codes.device})"


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    codebook: torch.Tensor | None,
    form: Format,
    layout: Layout,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weight [N, K] from its buffers. Products are formed in f32 (exact for 16-bit scales and small codes), or in f64."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    index = layouts.unpack(layout, codes, torch)[:n, :k].long()
    values = codebook if codebook is not None else torch.tensor(form.values, device=codes.device)
    table = values.to(wide) if dtype != torch.float64 else torch.tensor(form.values, dtype=wide, device=codes.device)
    spread = scale[:n, : form.groups(k)].to(wide).repeat_interleave(form.group_in(k), 1)[:, :k]
    return (table[index] * spread).to(dtype)


def _check(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: Format) -> None:
    if codes.dim() != 2 or codes.is_floating_point() or codes.dtype == torch.bool or 0 in codes.shape:
        raise ShapeError(f"codes are integers [N, K], not {codes.dtype}{list(codes.shape)}")
    n, k = codes.shape
    if zeros is not None:
        raise FormatError(f"{form.label} has no zero points: leave zeros out")
    if tuple(scales.shape) != (n, form.groups(k)):
        raise ShapeError(
            f"scales have shape {list(scales.shape)}; {form.label} codes [{n}, {k}] need [{n}, {form.groups(k)}], "
            f"one per group of {form.group_in(k)}"
        )
    if scales.device != codes.device:
        raise ShapeError(f"codes are on {codes.device}, scales on {scales.device}: move one to the other")
    if not scales.is_floating_point():
        raise ShapeError(f"scales are {scales.dtype}: give them as {form.scale}")
    outside = torch.nonzero((codes < 0) | (codes > 2**form.bits - 1))
    if len(outside):
        at = outside[0].tolist()
        raise FormatError(f"code{at} is {codes[tuple(at)].item()}: {form.label} has codes 0…{2**form.bits - 1}")
    quantize.refuse_non_finite(scales, "scale")
    if not torch.isfinite(scales.to(dtypes.torch_dtype(form.scale))).all():
        raise FormatError(f"a scale of {scales.abs().max().item():.3g} does not fit {form.scale}: use {form.label}_f32")
