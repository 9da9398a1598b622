"""Random layouts, and random data for programs as NumPy arrays, with its truth from the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle
from hypothesis import strategies as st

from w4gen.ir.layout import Digit, Layout
from w4gen.ir.problem import Problem

ROUND = {"f16": np.float16, "bf16": oracle.to_bf16, "f32": np.float32}


@st.composite
def layouts(draw: st.DrawFn, widths: tuple[int, ...] = (1, 2, 4, 8)) -> Layout:
    """Any dense order of small digits of n and k, the lowest of them inside 32-bit words."""
    bits = draw(st.sampled_from(widths))
    inside, size = [], 32 // bits
    while size > 1:
        inside.append(draw(st.sampled_from([part for part in (2, 4, 8, 16, 32) if size % part == 0])))
        size //= inside[-1]
    sizes = inside + draw(st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=1, max_size=4))
    digits, stride = [], bits
    for size in sizes:
        digits.append(Digit(draw(st.sampled_from("nk")), size, stride))
        stride *= size
    return Layout((Digit("n", 1, 0), Digit("k", 1, 0), *draw(st.permutations(digits))), bits)


@dataclass(frozen=True)
class Case:
    """What a program is given (`data`), and what is true of it."""

    data: dict[str, np.ndarray]
    w: np.ndarray
    truth: np.ndarray
    typical: float
    problem: Problem

    def limit(self, roundings: int = 1) -> float:
        """The largest error that y may have."""
        return oracle.limit(self.problem.y.name, self.truth.size, roundings, self.problem.k)

    def error(self, y: np.ndarray) -> float:
        """Relative to y, or to what y would be if its sums did not happen to cancel."""
        return oracle.error(y, self.truth, self.typical)


def case(problem: Problem, values: list[float], seed: int = 0) -> Case:
    """Codes, scales, x [m, k] at the bucket's highest M, bias; bf16 stands as f32, as in the interpreter."""
    rng, form = np.random.default_rng(seed), problem.format
    codes = rng.integers(0, 2**form.bits, (problem.n, problem.k)).astype(np.uint8)
    scales = ROUND[form.scale.name](rng.uniform(0.005, 0.025, (problem.n, oracle.groups(problem.k, form.group))))
    x = ROUND[problem.x.name](rng.standard_normal((problem.m[1], problem.k)))
    data = {"codes": codes, "scale": scales, "x": x}
    zeros = oracle.random_zeros(rng, scales, values, form.zero_mode)
    if form.zero is not None:
        zeros = data["zero"] = ROUND[form.zero.name](zeros)
    if form.codebook is not None:
        data["codebook"] = np.array(values, np.float32)
    if problem.bias:
        data["bias"] = ROUND[problem.y.name](rng.standard_normal(problem.n))
    w = oracle.dequantize(codes, scales, form.group, values, zeros, form.zero_mode)
    return Case(data, w, oracle.linear(x, w, data.get("bias")), oracle.typical(x, w), problem)
