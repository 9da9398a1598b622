"""Random data for programs, as NumPy arrays, with its truth from the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import oracle

from w4gen.ir.problem import Problem

ROUND = {"f16": np.float16, "bf16": oracle.to_bf16, "f32": np.float32}


@dataclass(frozen=True)
class Case:
    """What a program is given (`data`), and what is true of it."""

    data: dict[str, np.ndarray]
    w: np.ndarray
    truth: np.ndarray
    typical: float

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
    return Case(data, w, oracle.linear(x, w, data.get("bias")), oracle.typical(x, w))
