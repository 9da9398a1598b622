"""What is done to sums before they are rounded, in torch: for the fallback, the vendor's matmul, and the truth."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

ACTIVATED = {
    "": lambda sums: sums,
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_tanh": lambda sums: gelu(sums, approximate="tanh"),
    "silu": silu,
    "silu_mul": lambda sums: silu(sums[..., 0::2]) * sums[..., 1::2],
}
"""Activations of sums [..., N], as `Problem` names them."""


def finished(sums: torch.Tensor, activation: str, residual: torch.Tensor | None) -> torch.Tensor:
    """Activation and residual applied to sums [..., N], in their type."""
    sums = ACTIVATED[activation](sums)
    return sums if residual is None else sums + residual.to(sums.dtype)
