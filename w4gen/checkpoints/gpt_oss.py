"""gpt-oss' experts in MXFP4: one weight for each expert, of tensors that hold all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w4gen.errors import CheckpointError
from w4gen.quantize import Parts

FORMAT = "mxfp4"


def experts(blocks: torch.Tensor, scales: torch.Tensor) -> Iterator[Parts]:
    """The parts of each expert's weight [N, K], of blocks u8[experts, N, K / 32, 16] and scales u8[experts, N, K / 32].

    A byte holds two neighbours, the first in its low half; a scale byte is the exponent of a power of two, plus 127.
    """
    if blocks.dim() != 4 or blocks.shape[-1] != 16 or tuple(scales.shape) != tuple(blocks.shape[:3]):
        given = f"blocks {list(blocks.shape)} and scales {list(scales.shape)}"
        raise CheckpointError(f"{given} are not [experts, N, K / 32, 16] and [experts, N, K / 32]: the file is damaged")
    for stored, scale in zip(blocks, scales, strict=True):
        yield {"codes": torch.stack([stored & 15, stored >> 4], -1).reshape(len(stored), -1), "scale": scale}
