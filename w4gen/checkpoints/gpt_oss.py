"""gpt-oss' experts in MXFP4: `_blocks` u8[experts, N, K / 32, 16] and `_scales` u8[experts, N, K / 32], `_bias` [experts, N].

A byte holds two neighbours, the first in its low half; a scale byte is the exponent of a power of two, plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w4gen.checkpoints.layer import Layer, Tensors, expect, need, refuse
from w4gen.formats import named

NAME = "mxfp4"
MARKS = ("_blocks",)


def claims(quantization: Mapping[str, Any]) -> bool:
    return quantization.get("quant_method") == NAME


def read(tensors: Tensors, quantization: Mapping[str, Any], name: str) -> Layer:
    """One expert, of its slices of the tensors: blocks u8[N, K / 32, 16] and so on."""
    blocks = need(tensors, "blocks", name, 3)
    if blocks.shape[-1] != 16:
        refuse(name, "blocks", f"has shape {list(blocks.shape)}, [N, K / 32, 16] is needed", "the file may be damaged")
    scales = expect(need(tensors, "scales", name), tuple(blocks.shape[:2]), "scales", name, "the file may be damaged")
    codes = torch.stack([blocks & 15, blocks >> 4], -1).reshape(len(blocks), -1)
    return Layer(name, NAME, named("mxfp4"), {"codes": codes, "scale": scales}, tensors.get("bias"))
