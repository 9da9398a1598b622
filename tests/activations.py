"""Activations as their papers write them, a number at a time, with no help of torch or w4gen."""

from __future__ import annotations

import math

import numpy as np

ONE = {
    "": lambda a: a,
    "relu": lambda a: max(a, 0.0),
    "gelu": lambda a: a * 0.5 * math.erfc(-a / math.sqrt(2)),
    "gelu_tanh": lambda a: a * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
    "silu": lambda a: a / (1 + math.exp(-a)),
}
PAIRED = "silu_mul"
ALL = [*ONE, PAIRED]


def activated(sums: np.ndarray, kind: str) -> np.ndarray:
    """An activation of sums f64[M, N]; of pairs, f64[M, N/2]."""
    if kind == PAIRED:
        return activated(sums[:, ::2], "silu") * sums[:, 1::2]
    return np.array([[ONE[kind](float(a)) for a in row] for row in sums])
