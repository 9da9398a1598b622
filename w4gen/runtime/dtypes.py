"""Machine types as torch dtypes, and back."""

from __future__ import annotations

import torch

from w4gen.errors import ShapeError
from w4gen.ir.types import BF16, F16, F32, I32, U8, DType, Format

TORCH = {F16: torch.float16, BF16: torch.bfloat16, F32: torch.float32, I32: torch.int32, U8: torch.uint8}
OURS = {theirs: ours for ours, theirs in TORCH.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    return TORCH[dtype]


def stored_as(kind: DType | Format) -> torch.dtype:
    """What a tensor of a weight is handed over in: codes, those of scales too, are u8."""
    return torch.uint8 if isinstance(kind, Format) else TORCH[kind]


def of(tensor: torch.Tensor, what: str) -> DType:
    """The machine type of an activation. Raises `ShapeError` where it is no float type w4gen computes in."""
    found = OURS.get(tensor.dtype)
    if found is None or found.kind != "float":
        raise ShapeError(f"{what} is {tensor.dtype}: use float16, bfloat16 or float32")
    return found
