"""NVFP4 of NVIDIA ModelOpt: weight u8[N, K/2], the low half first; weight_scale e4m3[N, K/16], times weight_scale_2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from w4gen.checkpoints.compressed_tensors import nvfp4
from w4gen.checkpoints.layer import Layer, Tensors, need, refuse

NAME = "modelopt"
MARKS = (".weight_scale_2",)


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == "modelopt"


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    """Scales of activations (`input_scale`) are left: they stay in 16 bits."""
    if (said := quantization.get("quant_algo", "NVFP4")) != "NVFP4":
        refuse(name, "weight", f"quant_algo={said} is not read", "NVFP4 is")
    if "pre_quant_scale" in tensors:
        refuse(name, "pre_quant_scale", "x would have to be multiplied by it first, which is not read", "fold it when exporting")
    by = need(tensors, "weight_scale_2", name)
    if by.numel() != 1:
        refuse(name, "weight_scale_2", f"has shape {list(by.shape)}", "one number is needed: scales are multiplied by it")
    return nvfp4(tensors, "weight", by, NAME, name)
