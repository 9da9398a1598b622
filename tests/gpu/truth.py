"""Random layers on a GPU, with their truth in f64, worked out by torch with no help of w4gen."""

from __future__ import annotations

from dataclasses import dataclass

import oracle
import torch

import w4gen
from w4gen.formats import named
from w4gen.runtime.launch import arch_of

LIMIT = {torch.float16: oracle.LIMIT["f16"], torch.bfloat16: oracle.LIMIT["bf16"]}


@dataclass(frozen=True)
class Case:
    x: torch.Tensor
    layer: w4gen.Linear
    w: torch.Tensor
    bias: torch.Tensor | None

    def error(self, y: torch.Tensor, x: torch.Tensor | None = None) -> float:
        """Relative Frobenius error of y to the truth; NaN where y holds one."""
        truth = (self.x if x is None else x).double() @ self.w.T
        truth = truth if self.bias is None else truth + self.bias.double()
        return float((y.double() - truth).norm() / truth.norm())


def case(form: str, m: int, n: int, k: int, kind: torch.dtype = torch.float16, bias: bool = False) -> Case:
    """Random codes, scales and zeros; the true weight is worked out in f64."""
    torch.manual_seed(0)
    format = named(form)
    group = k if format.group == -1 else format.group
    codes = torch.randint(0, 2**format.bits, (n, k), device="cuda", dtype=torch.uint8)
    scales = (torch.rand(n, -(-k // group), device="cuda") * 0.02 + 0.005).half()
    values = torch.tensor(oracle.VALUES[format.name], dtype=torch.float64, device="cuda")
    zeros = None if format.zero_mode is None else torch.rand_like(scales) * (values.max() - values.min()).item() + values.min()
    match format.zero_mode:
        case "integer":
            zeros = zeros.round().half()
        case "float":
            zeros = zeros.half()
        case "minimum":
            zeros = (zeros * scales).half()

    def spread(each: torch.Tensor) -> torch.Tensor:
        return each.double().repeat_interleave(group, 1)[:, :k]

    w = values[codes.int()]
    if format.zero_mode in ("integer", "float"):
        w = w - spread(zeros)
    w = w * spread(scales)
    if format.zero_mode == "minimum":
        w = w - spread(zeros)
    x = torch.randn(m, k, device="cuda").to(kind)
    added = torch.randn(n, device="cuda").to(kind) if bias else None
    return Case(x, w4gen.Linear(w4gen.Weight.from_codes(codes, scales, zeros, form), added), w, added)


def limit_of(form: str, m: int, kind: torch.dtype, n: int, k: int) -> float:
    """What the kernel that answers may have: twice the limit where products are added up in halves inside 64 k."""
    name = w4gen.compile(f"{m}x{k}x{n}", form, dtype=name_of(kind), arch=arch_of(torch.device("cuda")).name).name
    return 6e-4 if name == "gemv_half" else LIMIT[kind]


def name_of(kind: torch.dtype) -> str:
    """What the command line calls a type of x."""
    return "float16" if kind == torch.float16 else "bfloat16"
