"""Random weights and inputs for torch, with their truth from the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
import torch

from w4gen import Format, Weight
from w4gen.formats import named

NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
TORCH = {name: kind for kind, name in NAMES.items()}
E2M1 = Format("e2m1", bits=4, codebook=(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), group=32)
INT8 = Format("int8", bits=8, origin=-128.0, group=64)
UINT2 = Format("uint2", bits=2, group=64)
OWN = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
    "int8": [code - 128.0 for code in range(256)],
    "uint2": [0.0, 1.0, 2.0, 3.0],
}


@dataclass(frozen=True)
class Call:
    """One call: x [M, K], w, bias, and what is true of them."""

    x: torch.Tensor
    w: Weight
    bias: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor
    true_w: np.ndarray

    def truth(self, x: torch.Tensor | None = None) -> np.ndarray:
        """y [M, N] in f64 for `x` (default: the case's own)."""
        rows = (self.x if x is None else x).reshape(-1, self.w.k).double().numpy()
        return oracle.linear(rows, self.true_w, None if self.bias is None else self.bias.double().numpy())

    @property
    def limit(self) -> float:
        """The largest error that y [M, N] may have."""
        return limit(self.x.dtype, self.x.shape[0] * self.w.n)

    def error(self, y: torch.Tensor, x: torch.Tensor | None = None) -> float:
        """Relative Frobenius error of y [..., N] to the truth."""
        return oracle.error(y.reshape(-1, self.w.n).double().numpy(), self.truth(x))


def call(
    form: str | Format, m: int, n: int, k: int, kind: torch.dtype = torch.float16, bias: bool = False, seed: int = 0
) -> Call:
    """Random codes in 0…2**bits-1, positive scales, normal x."""
    form, rng = named(form), np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 2**form.bits, (n, k)).astype(np.uint8))
    scales = torch.from_numpy(rng.uniform(0.005, 0.025, (n, oracle.groups(k, form.group)))).to(TORCH[form.scale.name])
    x = torch.from_numpy(rng.standard_normal((m, k))).to(kind)
    added = torch.from_numpy(rng.standard_normal(n)).to(kind) if bias else None
    values = {**oracle.VALUES, **OWN}[form.name]
    true_w = oracle.dequantize(codes.numpy(), scales.double().numpy(), form.group, values)
    return Call(x, Weight.from_codes(codes, scales, None, form), added, codes, scales, true_w)


def limit(kind: torch.dtype, outputs: int) -> float:
    """What issue 2 allows; where there are few outputs, one and a half rounding of y, as nothing averages it."""
    name = NAMES[kind]
    return oracle.LIMIT[name] if outputs >= 200 else 1.5 * oracle.HALF_UNIT[name]
