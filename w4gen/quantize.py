"""Weights to codes and scales by rounding to nearest."""

from __future__ import annotations

import torch

from w4gen.errors import FormatError
from w4gen.ir.types import Format
from w4gen.runtime import dtypes


def round_to_nearest(w: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes u8[N, K] and scales [N, groups] of `w` float[N, K].

    The scale of a group is the smallest that brings its extremes into the range of the format's values; codes are the nearest
    values under the scale *as stored*. A group of zeros has scale 0. Raises `FormatError` where a weight is not finite or a
    scale does not fit the format's scale type.
    """
    refuse_non_finite(w, "weight")
    n, k = w.shape
    group, groups = form.group_in(k), form.groups(k)
    values = torch.tensor(form.values, dtype=torch.float32, device=w.device)
    padded = torch.nn.functional.pad(w.detach().float(), (0, groups * group - k)).reshape(n, groups, group)
    low, high = values.min().item(), values.max().item()
    sides = [padded.amin(-1) / low] * (low < 0) + [padded.amax(-1) / high] * (high > 0)
    need = torch.stack(sides).amax(0).clamp(min=0)  # a format without negative values clips negative weights to its least
    scale = need.to(dtypes.torch_dtype(form.scale))
    if not torch.isfinite(scale).all():
        row, column = torch.nonzero(~torch.isfinite(scale))[0].tolist()
        raise FormatError(
            f"the scale {need[row, column].item():.3g} of row {row}, group {column} does not fit {form.scale} "
            f"(max {form.scale.max:.3g}): use {form.name} with a scale of bf16 or f32, as in {form.label}_f32"
        )
    stored = scale.float()[..., None]
    wanted = padded / torch.where(stored == 0, torch.ones_like(stored), stored)
    order = torch.argsort(values)
    middles = (values[order][1:] + values[order][:-1]) / 2
    codes = order[torch.bucketize(wanted, middles)]
    return codes.reshape(n, groups * group)[:, :k].to(torch.uint8).contiguous(), scale


def refuse_non_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise `FormatError` naming the first NaN or infinity of a [rows, columns] tensor."""
    bad = torch.nonzero(~torch.isfinite(tensor))
    if len(bad):
        where = bad[0].tolist()
        raise FormatError(f"{what}{where} is {tensor[tuple(where)].item()}: only finite values can be quantized, mend it first")
