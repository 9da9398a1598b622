"""Random layouts, and random data for programs as NumPy arrays, with its truth from the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import oracle
from hypothesis import strategies as st

from w4gen.ir.layout import Digit, Layout, dense, rows
from w4gen.ir.problem import Problem
from w4gen.ir.types import DType

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


@st.composite
def wide_layouts(draw: st.DrawFn) -> Layout:
    """Codes of any width as units hold them: with a gap, across words, or in planes of any widths and orders."""
    n, k, bits = draw(st.integers(1, 4)), draw(st.integers(1, 300)), draw(st.integers(1, 8))
    way = draw(st.sampled_from(["rows", "dense", "planes"]))
    if way == "dense":
        return dense(n, k, bits)
    if way == "rows":
        return rows(n, k, bits, draw(st.sampled_from([1, 4, 16])))
    parts = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=2, max_size=4).filter(lambda parts: sum(parts) <= 8))
    block, split = 16 * 32, None
    for part in parts:
        plane = rows(n, -(-k // block) * block, part, draw(st.sampled_from([1, 4, 8, 16])))
        split = replace(plane, high=split)
    return split


@st.composite
def row_layouts(draw: st.DrawFn, bits: int) -> Layout:
    """Rows of neighbouring words, one and odd numbers of them too, with the codes of a row in any order of digits."""
    words = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (8,), (16,), (4, 4), (3, 4), (16, 3), (2, 2, 4)]))
    inside = 32 // bits
    first = draw(st.sampled_from([part for part in (1, 2, 4) if inside % part == 0]))
    digits, stride = [], bits
    for size in (first, inside // first, *words):
        digits.append(Digit("k", size, stride))
        stride *= size
    n = draw(st.integers(1, 20))
    return Layout((Digit("n", n, stride), *draw(st.permutations(digits))), bits)


@dataclass(frozen=True, repr=False)
class Case:
    """What a program is given (`data`), and what is true of it."""

    problem: Problem
    data: dict[str, np.ndarray]
    values: list[float]
    w: np.ndarray
    truth: np.ndarray

    def limit(self, roundings: int = 1) -> float:
        """The largest error that y may have."""
        return oracle.limit(self.problem.y.name, self.truth.size, roundings, self.problem.k)

    def error(self, y: np.ndarray) -> float:
        """Relative to y, or to what y would be if its sums did not happen to cancel."""
        return oracle.error(y, self.truth, oracle.typical(self.data["x"], self.w))

    def misses(self, y: np.ndarray, roundings: int) -> list[tuple[int, int]]:
        """Where y is further from the truth than its roundings can take it, element by element; beyond the type's range is inf.

        Sums are f32, of terms as large as the largest value under each scale: an origin or a zero may be applied to them. So may
        a zero that comes after the scale, and then the weight is rounded without it; or even without the scale, where a last
        place is worth up to twice as much. What is below the least normal f32 may be taken for 0.
        """
        problem, x = self.problem, np.abs(self.data["x"].astype(np.float64))
        group = np.arange(problem.k) // problem.format.group_in(problem.k)
        grouped = (self.data["scale"], self.data.get("zero", 0 * self.data["scale"]))
        scale, zero = (np.abs(each.astype(np.float64))[:, group] for each in grouped)
        most = max(map(abs, self.values))
        largest = scale * most + (zero if problem.format.zero_after_scale else zero * scale)
        off = x @ largest.T * (problem.k + 8) * 2.0**-23 + np.abs(self.truth) * 2.0**-22
        off += 2.0**-126 * (1 + x.sum(1, keepdims=True) * (1 + most))
        if roundings > 1:
            values = np.abs(np.array(self.values)[self.data["codes"]]) * scale * problem.format.zero_after_scale
            off += 2 * x @ oracle.half_place(problem.x.name, np.maximum(np.abs(self.w), values)).T
        off += oracle.half_place(problem.y.name, np.abs(self.truth) + off)
        with np.errstate(invalid="ignore"):
            near = np.abs(y.astype(np.float64) - self.truth) <= off
        beyond = np.isinf(y) & (np.sign(y) * self.truth + off >= problem.y.max)
        return [tuple(map(int, place)) for place in np.argwhere(~(near | beyond))]


def case(problem: Problem, values: list[float], seed: int = 0) -> Case:
    """Codes, scales, x [m, k] at the bucket's highest M, bias; bf16 stands as f32, as in the interpreter."""
    rng, form = np.random.default_rng(seed), problem.format
    codes = rng.integers(0, 2**form.bits, (problem.n, problem.k)).astype(np.uint8)
    scales = ROUND[form.scale.name](rng.uniform(0.005, 0.025, (problem.n, oracle.groups(problem.k, form.group))))
    zeros = oracle.random_zeros(rng, scales, values, form.zero_mode)
    x = rng.standard_normal((problem.m[1], problem.k))
    return given(problem, values, codes, scales, zeros, x, rng.standard_normal(problem.n))


def given(
    problem: Problem,
    values: list[float],
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    x: np.ndarray,
    bias: np.ndarray,
) -> Case:
    """A case of numbers in any precision, which are rounded to what the problem stores."""
    form = problem.format
    data = {"codes": codes, "scale": ROUND[form.scale.name](scales), "x": ROUND[problem.x.name](x)}
    if form.zero is not None:
        data["zero"] = ROUND[form.zero.name](zeros)
    if form.codebook is not None:
        data["codebook"] = np.array(values, np.float32)
    if problem.bias:
        data["bias"] = ROUND[problem.y.name](bias)
    w = oracle.dequantize(codes, data["scale"], form.group, values, data.get("zero"), form.zero_mode)
    return Case(problem, data, values, w, oracle.linear(data["x"], w, data.get("bias")))


SCALES = ("ordinary", "zero", "least", "tiny", "large", "a power of two")
CODES = ("any", "lowest", "highest", "all alike", "nothing")
ROWS = ("ordinary", "zero", "tiny", "large", "one outlier")


@st.composite
def extremes(draw: st.DrawFn, problem: Problem, values: list[float]) -> Case:
    """A case in which every group has a scale and codes, and every row of x numbers, of a kind that is drawn.

    Scales: none, the least number of their type, 2**-110 where the type has it, as large as lets the weight fit into x's type.
    Codes: a group of one value, of the extremes, of what means 0 (the zero where there is one).
    """
    kinds = {name: draw(st.lists(st.sampled_from(of), min_size=1, unique=True)) for name, of in LISTS.items()}
    rng, form = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), problem.format
    n, k, count = problem.n, problem.k, oracle.groups(problem.k, form.group)
    group, most = np.arange(k) // form.group_in(k), max(map(abs, values))

    fits = min(problem.x.max, 2.0**60, form.zero.max if form.zero else math.inf) / most / 4
    scales = _scales(rng, kinds["scales"], (n, count), form.scale, fits)
    zeros = oracle.random_zeros(rng, scales, values, form.zero_mode)
    codes, of_group = rng.integers(0, 2**form.bits, (n, k)), rng.choice(kinds["codes"], (n, count))
    alike = rng.integers(0, 2**form.bits, (n, count))
    nothing = np.full((n, count), np.abs(values).argmin())
    if form.zero_mode == "integer":
        nothing = zeros - min(values)
    order = np.argsort(values)
    for kind, there in (("lowest", order[0]), ("highest", order[-1]), ("all alike", alike), ("nothing", nothing)):
        each = np.broadcast_to(there, (n, count))
        codes = np.where(of_group[:, group] == kind, each[:, group], codes)

    x, of_row = rng.standard_normal((problem.m[1], k)), rng.choice(kinds["rows"], (problem.m[1], 1))
    large = min(problem.x.max, 2.0**60) / 8
    sizes = {"zero": 0.0, "tiny": 2.0**-14, "large": large}
    x *= np.vectorize(lambda kind: sizes.get(kind, 1.0))(of_row)
    x = np.clip(x, -problem.x.max, problem.x.max)
    x[:, rng.integers(k)] += (of_row[:, 0] == "one outlier") * large
    return given(problem, values, codes.astype(np.uint8), scales, zeros, x, rng.standard_normal(n))


LISTS = {"scales": SCALES, "codes": CODES, "rows": ROWS}


def _scales(rng: np.random.Generator, kinds: list[str], shape: tuple[int, int], kind: DType, large: float) -> np.ndarray:
    """Scales of the kinds asked for, in any order."""
    each = {
        "ordinary": rng.uniform(0.005, 0.025, shape),
        "zero": np.zeros(shape),
        "least": np.full(shape, {"f16": 2.0**-24, "bf16": 2.0**-133, "f32": 2.0**-126}[kind.name]),
        "tiny": np.full(shape, {"f16": 2.0**-14, "bf16": 2.0**-110, "f32": 2.0**-110}[kind.name]),
        "large": rng.uniform(large / 2, large, shape).clip(max=kind.max / 2),
        "a power of two": 2.0 ** rng.integers(-8, 0, shape),
    }
    chosen = rng.choice(kinds, shape)
    return ROUND[kind.name](np.select([chosen == name for name in each], list(each.values()))).astype(np.float64)
