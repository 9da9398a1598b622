"""The slow truth: f64 throughout, no rounding on the way."""

from __future__ import annotations

import torch

from w4gen.runtime.epilogue import finished
from w4gen.runtime.weight import Weight


def reference(
    x: torch.Tensor,
    w: Weight,
    bias: torch.Tensor | None = None,
    activation: str = "",
    residual: torch.Tensor | None = None,
    gradient: bool = False,
) -> torch.Tensor:
    """`y[..., N]` in f64: unrounded scale * value in f64, times x in f64, plus bias; then the activation, plus residual.

    With `gradient` x is dY [..., N] and y is dX [..., K].
    """
    dense = w.dequantize(torch.float64)
    y = x.double() @ (dense if gradient else dense.T)
    return finished(y if bias is None else y + bias.double(), activation, residual)


def typical(x: torch.Tensor, w: Weight, rows: int, gradient: bool = False) -> float:
    """The Frobenius norm of y [..., rows] if the signs in its sums were random: few outputs may happen to cancel."""
    dense = w.dequantize(torch.float64)
    return float((x.double() ** 2 @ (dense if gradient else dense[:rows].T) ** 2).sum().sqrt())


def error(y: torch.Tensor, truth: torch.Tensor, least: float = 0.0) -> float:
    """Relative Frobenius error, to a norm of at least `least`; NaN where either holds one (a poisoned output never passes)."""
    return float((y.double() - truth).norm() / truth.norm().clamp(min=max(least, 1e-300)))
