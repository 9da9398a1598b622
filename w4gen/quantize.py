"""Weights to codes, scales and zeros by rounding to nearest."""

from __future__ import annotations

import torch

from w4gen.errors import FormatError
from w4gen.ir.types import DType, Format
from w4gen.runtime import dtypes


def round_to_nearest(w: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes u8[N, K], scales [N, groups] and zeros [N, groups] (None where the format has none) of `w` float[N, K].

    The scale of a group is the smallest that brings its extremes into the range of the format's values, which a zero can shift;
    codes are the nearest values under scale and zero *as stored*. A group of zeros gives zeros. Raises `FormatError` where a
    weight is not finite or a scale or zero does not fit its type.
    """
    refuse_non_finite(w, "weight")
    n, k = w.shape
    group, groups = form.group_in(k), form.groups(k)
    padded = torch.nn.functional.pad(w.detach().float(), (0, groups * group - k)).reshape(n, groups, group)
    # the padding must not widen the range of a partial last group: it repeats that group's first weight
    filled = torch.where(torch.arange(groups * group, device=w.device).reshape(groups, group) < k, padded, padded[..., :1])
    low, high = filled.amin(-1), filled.amax(-1)
    scale, zero = _symmetric(low, high, form) if form.zero is None else _asymmetric(low, high, form)
    codes = _nearest(filled, scale.float()[..., None], None if zero is None else zero.float()[..., None], form)
    return codes.reshape(n, groups * group)[:, :k].to(torch.uint8).contiguous(), scale, zero


def _symmetric(low: torch.Tensor, high: torch.Tensor, form: Format) -> tuple[torch.Tensor, None]:
    """Scales that bring the extremes of each group to the least or the largest value."""
    least, most = min(form.values), max(form.values)
    sides = [low / least] * (least < 0) + [high / most] * (most > 0)
    need = torch.stack(sides).amax(0).clamp(min=0)  # a format without negative values clips negative weights to its least
    return _stored(need, form.scale, "scale", form), None


def _asymmetric(low: torch.Tensor, high: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales that spread the values over each group, and zeros that shift them there.

    A zero that is subtracted before scaling must leave a scale to multiply: there the range takes 0 in.
    """
    least, most = min(form.values), max(form.values)
    if not form.zero_after_scale:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _stored((high - low) / (most - least), form.scale, "scale", form)
    by = scale.float()
    zero = least * by - low if form.zero_after_scale else least - low / _not_zero(by)
    if form.zero_mode == "integer":
        zero = zero.round().clamp(least, most)
    return scale, _stored(zero, form.zero or form.scale, "zero", form)


def _nearest(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, form: Format) -> torch.Tensor:
    """The codes [N, groups, group] of the values that come nearest to w under scale and zero."""
    by, shift = _not_zero(scale), 0 if zero is None else zero
    wanted = (w + shift) / by if form.zero_after_scale else w / by + shift
    values = torch.tensor(form.values, dtype=torch.float32, device=w.device)
    order = torch.argsort(values)
    middles = (values[order][1:] + values[order][:-1]) / 2
    return order[torch.bucketize(wanted, middles)]


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    """`scale` as something to divide by: where it is 0, nothing is left to choose."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _stored(need: torch.Tensor, kind: DType, what: str, form: Format) -> torch.Tensor:
    """`need` [N, groups] rounded to the type that it is stored in."""
    stored = need.to(dtypes.torch_dtype(kind))
    if not torch.isfinite(stored).all():
        row, column = torch.nonzero(~torch.isfinite(stored))[0].tolist()
        raise FormatError(
            f"the {what} {need[row, column].item():.3g} of row {row}, group {column} does not fit {kind} "
            f"(max {kind.max:.3g}): use {form.name} with a scale of bf16 or f32, as in {form.label}_f32"
        )
    return stored


def refuse_non_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise `FormatError` naming the first NaN or infinity of a [rows, columns] tensor."""
    bad = torch.nonzero(~torch.isfinite(tensor))
    if len(bad):
        where = bad[0].tolist()
        raise FormatError(f"{what}{where} is {tensor[tuple(where)].item()}: only finite values can be quantized, mend it first")
