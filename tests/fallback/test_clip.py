"""Clipping before rounding: what each group keeps is the best of the shares, found here by trying them on one group at a time."""

from __future__ import annotations

import pytest
import torch

from w4gen import Weight, quantize
from w4gen.formats import named

FORMATS = (
    "int4_g32",
    "uint4_g32_m",
    "uint4_g32_z",
    "nf4_g64",
    "mxfp4",
    "int3_g64",
    "int2_g32",
    "int4_g40",
    "int4_row",
    "int4_tensor",
)


def weights(n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(n, k, generator=generator) * 0.05
    drawn[:, ::29] *= 4
    return drawn


def squared(w: torch.Tensor, made: torch.Tensor, form) -> torch.Tensor:
    """The squared error of each group, by slices."""
    wrong = (Weight.from_float(made, form).dequantize() - w) ** 2
    wrong = wrong.reshape(1, -1) if form.flat else wrong
    return torch.stack([part.sum(1) for part in wrong.split(form.group_in(wrong.shape[1]), 1)], 1)


@pytest.mark.parametrize("name", FORMATS)
def test_every_group_has_the_best_of_the_shares(name):
    form, w = named(name), weights(6, 96)
    tried = []
    lines = w.reshape(1, -1) if form.flat else w
    for share in quantize.SHARES:
        parts = lines.split(form.group_in(lines.shape[1]), 1)
        cut = [part.clamp(-share * part.abs().amax(1, True), share * part.abs().amax(1, True)) for part in parts]
        tried.append(squared(w, torch.cat(cut, 1).reshape(w.shape), form))
    best = torch.stack(tried).amin(0)
    torch.testing.assert_close(squared(w, quantize.clipped(w, form), form), best, rtol=1e-5, atol=0)
    assert bool((best <= tried[0]).all())


def test_clipping_gains_where_few_weights_are_large():
    w, form = weights(64, 256), named("int3_g64")
    assert squared(w, quantize.clipped(w, form), form).sum() < 0.8 * squared(w, w, form).sum()


def test_what_a_format_holds_exactly_stays():
    w = Weight.from_float(weights(8, 64), "int4_g32").dequantize()
    assert torch.equal(quantize.clipped(w, named("int4_g32")), w)
