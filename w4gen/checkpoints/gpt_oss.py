"""gpt-oss' experts in MXFP4: one layer for each expert, of tensors that hold all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w4gen.checkpoints.layer import Layer, expect, refuse
from w4gen.formats import named

NAME = "gpt-oss"


def experts(name: str, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> Iterator[Layer]:
    """The layer of each expert, of `name_blocks` u8[experts, N, K / 32, 16], `name_scales` u8[experts, N, K / 32] and
    `name_bias` [experts, N].

    A byte holds two neighbours, the first in its low half; a scale byte is the exponent of a power of two, plus 127.
    """
    if blocks.dim() != 4 or blocks.shape[-1] != 16:
        refuse(name, "blocks", f"has shape {list(blocks.shape)}, [experts, N, K / 32, 16] is needed", "the file may be damaged")
    expect(scales, tuple(blocks.shape[:3]), "scales", name, "the file may be damaged")
    for expert, (stored, scale) in enumerate(zip(blocks, scales, strict=True)):
        codes = torch.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1)
        parts = {"codes": codes, "scale": scale}
        yield Layer(f"{name}.{expert}", NAME, named("mxfp4"), parts, None if bias is None else bias[expert])
