"""Layers of w4gen's own: slices of their tensors are slices of the weight."""

from __future__ import annotations

import pytest
import torch

import w4gen
from w4gen.checkpoints import dialects, own
from w4gen.errors import CheckpointError

N, K = 64, 256


def written(form: str) -> tuple[dict[str, torch.Tensor], dict[str, object], torch.Tensor]:
    """The tensors of a layer, what is said of it, and the weight f64[N, K] that it stands for."""
    torch.manual_seed(0)
    weight = w4gen.Weight.from_float(torch.randn(N, K), form)
    said = {"quant_method": "w4gen", "formats": {"a": str(weight.format)}}
    return own.write(weight, bias=torch.randn(N)), said, weight.dequantize(torch.float64)


def cut(tensors: dict[str, torch.Tensor], dim: int, part: int, parts: int) -> dict[str, torch.Tensor]:
    """What one of `parts` gets that share a weight: a slice of each tensor that has the dimension, by its own size."""
    found = {}
    for name, each in tensors.items():
        alone = name == "weight_shape" or each.dim() <= dim or each.shape[dim] == 1
        found[name] = each if alone else each.chunk(parts, dim)[part]
    return found


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("form", ["int4_g32", "uint4_g64_z", "nf4_g64", "uint3_g32_z", "int8_row", "nvfp4", "mxfp4"])
def test_a_slice_of_the_tensors_is_the_slice_of_the_weight(form: str, dim: int, parts: int) -> None:
    tensors, said, w = written(form)
    for part in range(parts):
        layer = dialects.read(own, cut(tensors, dim, part, parts), said, "a").linear()
        assert torch.equal(layer.weight.dequantize(torch.float64), w.chunk(parts, dim)[part])
        assert torch.equal(layer.bias, tensors["bias"].chunk(parts)[part] if dim == 0 else tensors["bias"])


BAD = {
    "more rows": ({"weight_shape": torch.tensor([N - 1, K])}, r"a.weight_packed: has shape \[64, 32\], \[63, 32\] is needed"),
    "more words": ({"weight_shape": torch.tensor([N, K - 32])}, r"a.weight_packed: has shape \[64, 32\], \[64, 28\] is needed"),
    "rows of the codes alone": ({"weight_packed": torch.zeros(8, 32, dtype=torch.int32)}, "a: its w4gen tensors do not hold"),
    "words of the codes alone": ({"weight_packed": torch.zeros(N, 16, dtype=torch.int32)}, "a: its w4gen tensors do not hold"),
}


@pytest.mark.parametrize("kind", BAD)
def test_tensors_that_are_no_slice_are_refused(kind: str) -> None:
    tensors, said, _ = written("int4_g32")
    changes, told = BAD[kind]
    with pytest.raises(CheckpointError, match=told):
        dialects.read(own, {**tensors, **changes}, said, "a").linear()
