"""Random weights and inputs for torch, with their truth from the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
import torch

from w4gen import Format, Weight
from w4gen.codegen.render import Kernel
from w4gen.formats import named
from w4gen.ir.types import F16

NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
TORCH = {name: kind for kind, name in NAMES.items()}
CUBES = Format("cubes", bits=4, codebook=tuple((code - 8.0) ** 3 for code in range(16)), group=32)
UINT8 = Format("uint8", bits=8, group=64, zero=F16, zero_mode="quantized")
UINT2 = Format("uint2", bits=2, group=64)
SIGNS = Format("int1", bits=1, step=2.0, origin=-1.0, group=64)
FLOATS = [Format(name, bits=8, minifloat=name, group=64) for name in ("e4m3", "e5m2", "e6m1")]
SPLIT = [
    Format("int3", bits=3, origin=-4.0, group=64),
    Format("uint5", bits=5, group=32, zero=F16),
    Format("roots", bits=6, codebook=tuple((code / 32 - 1) ** 3 for code in range(64)), group=64),
    Format("e3m3", bits=7, minifloat="e3m3", group=64),
]
"""Codes of widths that do not fill a word."""
EVENS = Format("evens", bits=1, step=2.0, origin=-2.0, group=256)
OWN = {
    "cubes": [(code - 8.0) ** 3 for code in range(16)],
    "uint8": [float(code) for code in range(256)],
    "uint2": [0.0, 1.0, 2.0, 3.0],
    "int1": [-1.0, 1.0],
    "int3": [code - 4.0 for code in range(8)],
    "uint5": [float(code) for code in range(32)],
    "roots": [(code / 32 - 1) ** 3 for code in range(64)],
    "e3m3": oracle.small_float(3, 3),
    **{form.name: oracle.small_float(int(form.name[1]), int(form.name[3])) for form in FLOATS},
    "evens": [-2.0, 0.0],
}
ZEROS = ["uint4_g128_z", "uint4_g32_m", "uint4_g64_zf", "uint4_row_z_bf16", "uint4_g50_m_f32", "int8_g64_z", "nf4_g64_m"]
"""Formats with zeros: every mode, every type of scale, groups that do and do not divide."""


def ids(form: str | Format) -> str:
    """What a test of `form` is called."""
    return form if isinstance(form, str) else form.name


@dataclass(frozen=True)
class Call:
    """One call: x [M, K], w, bias, and what is true of them."""

    x: torch.Tensor
    w: Weight
    bias: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    true_w: np.ndarray

    def truth(self, x: torch.Tensor | None = None) -> np.ndarray:
        """y [M, N] in f64 for `x` (default: the case's own)."""
        rows = (self.x if x is None else x).reshape(-1, self.w.k).double().numpy()
        return oracle.linear(rows, self.true_w, None if self.bias is None else self.bias.double().numpy())

    def limit(self, kernel: Kernel | None = None, outputs: int = 0) -> float:
        """The largest error that y [M, N] may have, from a kernel or (None) where only y is rounded."""
        roundings = 1 if kernel is None else rounded(kernel)
        return oracle.limit(NAMES[self.x.dtype], outputs or self.x.shape[0] * self.w.n, roundings, self.w.k)

    def error(self, y: torch.Tensor, x: torch.Tensor | None = None) -> float:
        """Relative Frobenius error of y [..., N] to the truth, or to what it would be if its sums did not happen to cancel."""
        rows = (self.x if x is None else x).reshape(-1, self.w.k).double().numpy()
        return oracle.error(y.reshape(-1, self.w.n).double().numpy(), self.truth(x), oracle.typical(rows, self.true_w))


def call(
    form: str | Format, m: int, n: int, k: int, kind: torch.dtype = torch.float16, bias: bool = False, seed: int = 0
) -> Call:
    """Random codes of finite values, positive scales, normal x."""
    form, rng = named(form), np.random.default_rng(seed)
    values = {**oracle.VALUES, **OWN}[form.name]
    numbers = np.flatnonzero(np.isfinite(values))
    codes = torch.from_numpy(rng.choice(numbers, (n, k)).astype(np.uint8))
    scales = torch.from_numpy(rng.uniform(0.005, 0.025, (n, oracle.groups(k, form.group)))).to(TORCH[form.scale.name])
    x = torch.from_numpy(rng.standard_normal((m, k))).to(kind)
    added = torch.from_numpy(rng.standard_normal(n)).to(kind) if bias else None
    zeros = oracle.random_zeros(rng, scales.double().numpy(), values, form.zero_mode)
    zeros = None if zeros is None else torch.from_numpy(zeros).to(TORCH[form.zero.name])
    wide = None if zeros is None else zeros.double().numpy()
    true_w = oracle.dequantize(codes.numpy(), scales.double().numpy(), form.group, values, wide, form.zero_mode)
    return Call(x, Weight.from_codes(codes, scales, zeros, form), added, codes, scales, zeros, true_w)


def rounded(kernel: Kernel) -> int:
    """Roundings to 16 bits: of y, and on matrix cores of a weight that is scaled, shifted by a fraction, or a fraction itself."""
    form, schedule = kernel.problem.format, kernel.schedule
    values = np.array({**oracle.VALUES, **OWN}[form.name])
    held = values.astype(np.float16) if kernel.problem.x.name == "f16" else oracle.to_bf16(values)
    exact = (held == values).all() and form.zero_mode != "float" and schedule.scale_at == "accumulator"
    return 1 if schedule.unit in ("lanes", "halves") or exact else 2
