"""Random layers on a GPU, with their truth in f64, worked out by torch with no help of w4gen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cases
import oracle
import torch

import w4gen
from w4gen.codegen.render import Kernel
from w4gen.formats import named
from w4gen.ir.problem import Problem
from w4gen.pipeline import compile
from w4gen.runtime.dtypes import OURS
from w4gen.runtime.launch import arch_of
from w4gen.schedule.rules import bucket

KINDS = [torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    x: torch.Tensor
    layer: w4gen.Linear
    w: torch.Tensor
    bias: torch.Tensor | None

    def error(self, y: torch.Tensor, x: torch.Tensor | None = None) -> float:
        """Relative Frobenius error of y to the truth, or to what that would be if no sum cancelled; NaN where y holds one."""
        x = (self.x if x is None else x).double()
        truth = x @ self.w.T
        truth = truth if self.bias is None else truth + self.bias.double()
        typical = (x**2 @ self.w.T**2).sum().sqrt()
        return float((y.double() - truth).norm() / torch.maximum(truth.norm(), typical))

    def limit(self, m: int = 0, kernel: Kernel | None = None, outputs: int = 0) -> float:
        """The largest error that y may have, with `m` rows (default: all of x) by `kernel` (default: that of the layer)."""
        m, weight = m or self.x.shape[0], self.layer.weight
        if kernel is None:
            x = OURS[self.x.dtype]
            asked = Problem(m=bucket(m), n=weight.n, k=weight.k, format=weight.format, layout=weight.layout, x=x, y=x)
            kernel = compile(replace(asked, bias=self.bias is not None), arch_of(self.x.device))
        halves = kernel.schedule.unit == "halves"
        return oracle.limit(cases.NAMES[self.x.dtype], outputs or m * weight.n, cases.rounded(kernel), weight.k, halves)


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


def name_of(kind: torch.dtype) -> str:
    """What the command line calls a type of x."""
    return "float16" if kind == torch.float16 else "bfloat16"
