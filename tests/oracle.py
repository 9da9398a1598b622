"""The truth, by separate and dumb loops: shares no code with w4gen and does not import it. Everything in float64 NumPy."""

from __future__ import annotations

import math

import numpy as np

INT4 = [code - 8.0 for code in range(16)]
# Dettmers et al., QLoRA (2023), appendix E
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
# OCP Microscaling Formats (2023), table of FP4 values: sign, two exponent bits with bias 1, one mantissa bit
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
UINT4 = [float(code) for code in range(16)]
INT8 = [code - 128.0 for code in range(256)]
VALUES = {"int4": INT4, "uint4": UINT4, "int8": INT8, "nf4": NF4, "e2m1": E2M1}

HALF_UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24}
"""The largest relative error of one rounding."""


def limit(kind: str, outputs: int, roundings: int = 1, k: int = 1) -> float:
    """The relative Frobenius error to the truth that y may have, with sums of k terms in f32.

    One rounding: an even error of at most half a unit, 1 / sqrt(3) of that in the root mean square where mantissas are 1, and
    0.7355 of this on average. A weight that is rounded too adds in quadrature. Of n outputs the estimate has the relative
    standard deviation sqrt(0.6 / n); five of them may lie between it and the average. y alone is never off by more than half
    a unit.
    """
    one = HALF_UNIT[kind] * max(1, 0.7355 * (1 + 5 * math.sqrt(0.6 / outputs))) / math.sqrt(3)
    of_y, of_w, of_sums = min(one, HALF_UNIT[kind]), one * math.sqrt(roundings - 1), HALF_UNIT["f32"] * math.sqrt(k / 3)
    return math.sqrt(of_y**2 + of_w**2 + of_sums**2)


def groups(k: int, group: int) -> int:
    """Scales of a row of k weights; -1 is one for the whole row; the last group may be partial."""
    return 1 if group == -1 else math.ceil(k / group)


def dequantize(
    codes: np.ndarray,
    scales: np.ndarray,
    group: int,
    values: list[float],
    zeros: np.ndarray | None = None,
    mode: str | None = None,
) -> np.ndarray:
    """w[n, k] = scales[n, k // group] * values[codes[n, k]]; a zero is taken off before scaling, in the mode minimum after."""
    n, k = codes.shape
    length = k if group == -1 else group
    w = np.zeros((n, k), np.float64)
    for row in range(n):
        for number, start in enumerate(range(0, k, length)):
            some = [values[int(code)] for code in codes[row, start : start + length]]
            scale, zero = float(scales[row, number]), 0.0 if zeros is None else float(zeros[row, number])
            if mode == "minimum":
                w[row, start : start + length] = [scale * value - zero for value in some]
            else:
                w[row, start : start + length] = [scale * (value - zero) for value in some]
    return w


def random_zeros(rng: np.random.Generator, scales: np.ndarray, values: list[float], mode: str | None) -> np.ndarray | None:
    """Zeros [n, groups] that shift the values to around 0, the extremes among them; None without a mode."""
    if mode is None:
        return None
    low, high = min(values), max(values)
    zeros = rng.uniform(low, high, scales.shape)
    zeros.flat[0], zeros.flat[-1] = low, high
    return np.rint(zeros) if mode == "integer" else zeros * scales if mode == "minimum" else zeros


def linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """y[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n]."""
    y = np.zeros((x.shape[0], w.shape[0]), np.float64)
    for row in range(x.shape[0]):
        for output in range(w.shape[0]):
            with np.errstate(invalid="ignore", over="ignore"):
                y[row, output] = np.sum(x[row].astype(np.float64) * w[output])
            if bias is not None:
                y[row, output] += float(bias[output])
    return y


def pack_rows(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """u32[n, words]: in blocks of `run` words, code i of word v is number `run * i + v` of its block; rows are whole quads."""
    n, k = codes.shape
    per_word = 32 // bits
    in_block, in_quads = run * per_word, max(run, 4) * per_word
    words = np.zeros((n, math.ceil(k / in_quads) * in_quads // per_word), np.uint32)
    for row in range(n):
        for column in range(k):
            block, rest = divmod(column, in_block)
            position, word = divmod(rest, run)
            words[row, block * run + word] |= np.uint32(int(codes[row, column]) << (position * bits))
    return words


def to_bf16(array: np.ndarray) -> np.ndarray:
    """The nearest numbers with 8 significant bits (ties to even), as float32."""
    mantissa, exponent = np.frexp(np.asarray(array, np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)


def half_place(kind: str, array: np.ndarray) -> np.ndarray:
    """What one rounding may change: half a unit of each number's last place, which does not shrink below the least normal one."""
    least = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126}[kind]
    return HALF_UNIT[kind] * 2.0 ** np.floor(np.log2(np.maximum(np.abs(array), least)))


def error(y: np.ndarray, truth: np.ndarray, least: float = 0.0) -> float:
    """Relative Frobenius error; NaN where y holds one. `least` bounds the denominator from below, for sums that cancel."""
    difference = np.asarray(y, np.float64) - truth
    return float(np.sqrt(np.sum(difference**2)) / max(np.sqrt(np.sum(truth**2)), least, 1e-300))


def typical(x: np.ndarray, w: np.ndarray) -> float:
    """The Frobenius norm that y would have if the signs in its sums were random: what few outputs are compared with."""
    return float(np.sqrt(np.sum((x.astype(np.float64) ** 2) @ (w**2).T)))
