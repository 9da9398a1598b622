"""What is handed over as a weight: the tensors that its format names, each checked before anything is packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4gen import quantize
from w4gen.errors import FormatError, ShapeError
from w4gen.ir.types import DType, Format
from w4gen.runtime import dtypes

SMALL = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu}
"""Small floats that torch has a type for: their bits are their codes."""


def check_parts(parts: Mapping[str, torch.Tensor], form: Format) -> dict[str, torch.Tensor]:
    """The parts in the types that they are packed from. Raises `FormatError` or `ShapeError` that names the first misfit."""
    codes = parts["codes"]
    if codes.dim() != 2 or codes.is_floating_point() or codes.dtype == torch.bool or 0 in codes.shape:
        raise ShapeError(f"codes are integers [N, K], not {codes.dtype}{list(codes.shape)}")
    n, k = codes.shape
    wanted = form.parts(n, k)
    _check_names(parts, form, wanted)
    found = {name: _check(parts[name], name, kind, shape, form, codes) for name, (kind, shape) in wanted.items()}
    if form.zero_mode == "integer" and isinstance(form.zero, DType) and not form.zero.small:
        _check_integer(parts["zero"], form)
    return found


def _check_names(parts: Mapping[str, torch.Tensor], form: Format, wanted: Mapping[str, object]) -> None:
    if ("zero" in parts) != (form.zero is not None):
        raise FormatError(
            f"{form.label} has no zero points: leave zeros out"
            if form.zero is None
            else f"{form.label} has a zero for each group: give zeros of the shape of scales, {list(parts['scale'].shape)}"
        )
    for name in (*wanted, *parts):
        if (name in wanted) != (name in parts):
            way = "it has no such part, leave it out" if name in parts else f"give it in more={{{name!r}: tensor}}"
            raise FormatError(f"{form.label} is made of {', '.join(wanted)}; {name}: {way}")


def _check(
    tensor: torch.Tensor, name: str, kind: DType | Format, shape: tuple[int, ...], form: Format, codes: torch.Tensor
) -> torch.Tensor:
    """One part, of its shape, on the device of the codes, in the type that it is packed from."""
    what = name.removesuffix("s") if name == "codes" else name
    if tuple(tensor.shape) != shape:
        n, k = codes.shape
        rest = f", one per group of {form.group_in(k)}" if name in ("scale", "zero") and not form.flat else ""
        raise ShapeError(f"{what}s have shape {list(tensor.shape)}; {form.label} codes [{n}, {k}] need {list(shape)}{rest}")
    if tensor.device != codes.device:
        raise ShapeError(f"codes are on {codes.device}, {what}s on {tensor.device}: move one to the other")
    if isinstance(kind, Format):
        return _codes(tensor, "code" if name == "codes" else f"{what} code", kind)
    if not (tensor.is_floating_point() or (name == "zero" and form.zero_mode == "integer")):
        raise ShapeError(f"{what}s are {tensor.dtype}: give them as {kind}")
    quantize.refuse_non_finite(tensor.reshape(-1, tensor.shape[-1]), what)
    stored = tensor.to(dtypes.torch_dtype(kind))
    if not torch.isfinite(stored).all():
        raise FormatError(f"a {what} of {tensor.abs().max().item():.3g} does not fit {kind}: use {form.label}_f32")
    return stored


def _codes(tensor: torch.Tensor, what: str, kind: Format) -> torch.Tensor:
    """Codes of a format as u8, in its range; of a small float also its own bits."""
    if kind.minifloat is not None and tensor.dtype == SMALL.get(kind.minifloat.name):
        return tensor.view(torch.uint8)
    if tensor.is_floating_point():
        raise ShapeError(f"{what}s are {tensor.dtype}: {kind.label} has codes, u8 in 0…{2**kind.bits - 1}")
    low, high = tensor.aminmax()
    if low < 0 or high > 2**kind.bits - 1:
        at = torch.nonzero((tensor < 0) | (tensor > 2**kind.bits - 1))[0].tolist()
        raise FormatError(f"{what}{at} is {tensor[tuple(at)].item()}: {kind.label} has codes 0…{2**kind.bits - 1}")
    return tensor.to(torch.uint8)


def _check_integer(zeros: torch.Tensor, form: Format) -> None:
    """Integer zeros are whole and among the format's values."""
    low, high = min(form.values), max(form.values)
    outside = torch.nonzero((zeros < low) | (zeros > high) | (zeros != zeros.round() if zeros.is_floating_point() else False))
    if len(outside):
        at = outside[0].tolist()
        raise FormatError(f"zero{at} is {zeros[tuple(at)].item():g}: {form.label} has integer zeros {low:g}…{high:g}")
