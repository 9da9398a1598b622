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


def small_float(exponent: int, fraction: int) -> list[float]:
    """The value of every code of a float with a sign, read off its bits written out; e4m3 and e5m2 as OCP's FP8 has them."""
    values = []
    for code in range(2 ** (1 + exponent + fraction)):
        bits = format(code, f"0{1 + exponent + fraction}b")
        sign, power, rest = bits[0], bits[1 : 1 + exponent], bits[1 + exponent :]
        size = sum(2.0 ** -(place + 1) for place, bit in enumerate(rest) if bit == "1")
        if "1" in power:
            size = (1 + size) * 2.0 ** (int(power, 2) - (2 ** (exponent - 1) - 1))
        else:
            size = size * 2.0 ** (1 - (2 ** (exponent - 1) - 1))
        if (exponent, fraction) == (4, 3) and "0" not in power + rest:
            size = math.nan
        if (exponent, fraction) == (5, 2) and "0" not in power:
            size = math.nan if "1" in rest else math.inf
        values.append(-size if sign == "1" else size)
    return values


# bitsandbytes, csrc/kernels.cu, dDequantizeFP4Tree: twelfths
FP4 = [0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 0.5, 2 / 12, 0.25, -0.0, -0.0625 / 12, -8 / 12, -1, -4 / 12, -0.5, -2 / 12, -0.25]
# ggml-common.h, kvalues_iq4nl
IQ4_NL = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
E8M0 = [2.0 ** (code - 127) for code in range(255)] + [math.nan]


def unsigned(bits: int) -> list[float]:
    """0, 1, …"""
    return [float(code) for code in range(2**bits)]


def signed(bits: int) -> list[float]:
    """As many below zero as not."""
    return [float(code - 2 ** (bits - 1)) for code in range(2**bits)]


VALUES = {"int4": INT4, "uint4": UINT4, "int8": INT8, "nf4": NF4, "e2m1": E2M1, "int1": [-1.0, 1.0], "fp4": FP4, "iq4_nl": IQ4_NL}
VALUES |= {f"int{bits}": signed(bits) for bits in range(2, 9)} | {f"uint{bits}": unsigned(bits) for bits in range(1, 9)}
VALUES |= {"fp8_e4m3": small_float(4, 3), "fp8_e5m2": small_float(5, 2), "mxfp4": E2M1, "mxfp8": small_float(4, 3), "nvfp4": E2M1}
VALUES |= {"mxfp6_e2m3": small_float(2, 3), "mxfp6_e3m2": small_float(3, 2), "nf4_dq": NF4}
VALUES |= {"q2_k": unsigned(2), "q3_k": signed(3), "q4_k": unsigned(4), "q5_k": unsigned(5), "q6_k": signed(6)}
"""What each built-in family's codes are worth."""

TREES = {
    "mxfp4_g32_e8m0": {"values": E2M1, "group": 32, "scale": {"values": E8M0}},
    "mxfp8_g32_e8m0": {"values": small_float(4, 3), "group": 32, "scale": {"values": E8M0}},
    "int4_g32_e8m0": {"values": INT4, "group": 32, "scale": {"values": E8M0}},
    "uint4_g64_z_e4m3": {
        "values": UINT4, "group": 64, "mode": "integer",
        "scale": {"values": small_float(4, 3)}, "zero": {"values": small_float(4, 3)},
    },
    "nvfp4": {"values": E2M1, "group": 16, "scale": {"values": small_float(4, 3), "group": "tensor", "scale": "f32"}},
    "fp8_e4m3_tensor": {"values": small_float(4, 3), "group": "tensor", "scale": "f32"},
    "fp8_e5m2_row": {"values": small_float(5, 2), "group": "row", "scale": "f32"},
    "int3_tensor": {"values": signed(3), "group": "tensor", "scale": "f16"},
    "uint6_flat32_zf": {"values": unsigned(6), "group": 32, "flat": True, "scale": "f16", "zero": "f16", "mode": "float"},
    "nf4_dq": {
        "values": NF4, "group": 64,
        "scale": {"values": None, "bits": 8, "group": 256, "flat": True, "scale": "f32", "zero": "f32", "mode": "minimum"},
    },
    "q2_k": {
        "values": unsigned(2), "group": 16, "mode": "minimum",
        "scale": {"values": unsigned(4), "group": 16, "scale": "f16"},
        "zero": {"values": unsigned(4), "group": 16, "scale": "f16"},
    },
    "q3_k": {"values": signed(3), "group": 16, "scale": {"values": signed(6), "group": 16, "scale": "f16"}},
    "q4_k": {
        "values": unsigned(4), "group": 32, "mode": "minimum",
        "scale": {"values": unsigned(6), "group": 8, "scale": "f16"}, "zero": {"values": unsigned(6), "group": 8, "scale": "f16"},
    },
    "q6_k": {"values": signed(6), "group": 16, "scale": {"values": signed(8), "group": 16, "scale": "f16"}},
    # HQQ's zeros in 8 bits, one scale and one zero for all of them
    "hqq(bits=4,group=64,zero=u8(bits=8,group=-1,flat=True,zero=f16,zero_mode=float),zero_mode=float)": {
        "values": UINT4, "group": 64, "scale": "f16", "mode": "float",
        "zero": {"values": unsigned(8), "group": "tensor", "scale": "f16", "zero": "f16", "mode": "float"},
    },
    # three floors: codes under codes under codes
    "deep(bits=3,origin=-4,group=8,scale=a(bits=5,group=4,scale=b(bits=2,origin=1,group=2,scale=bf16)))": {
        "values": signed(3), "group": 8,
        "scale": {"values": unsigned(5), "group": 4, "scale": {"values": [1.0, 2.0, 3.0, 4.0], "group": 2, "scale": "bf16"}},
    },
    "learned(bits=4,codebook=tensor,group=32)": {"values": None, "bits": 4, "group": 32, "scale": "f16"},
}  # fmt: skip
"""Formats whose scales are codes, or that are not in rows, or learned: their values and how scales are made."""


def shape(tree: dict, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the scales of [rows, columns] values: flat groups, and one for the tensor, are in one row."""
    group = tree["group"]
    if group == "row":
        return rows, 1
    if group == "tensor":
        return 1, 1
    return (1, math.ceil(rows * columns / group)) if tree.get("flat") else (rows, math.ceil(columns / group))


def random_parts(rng: np.random.Generator, tree: dict, rows: int, columns: int, at: str = "") -> dict[str, np.ndarray]:
    """Codes, scales, zeros and codebooks by name, at random: codes of numbers that are not extreme."""
    inside = f"{at}." if at else ""
    table = rng.uniform(-1, 1, 2 ** tree["bits"]).astype(np.float32) if tree["values"] is None else np.array(tree["values"])
    most = 2.0**9 if "group" in tree else 1.0
    usable = [code for code, value in enumerate(table) if 2.0**-12 <= abs(value) <= most or (value == 0 and not at)]
    parts = {at or "codes": rng.choice(usable, (rows, columns)).astype(np.uint8)}
    parts |= {f"{inside}codebook": table} if tree["values"] is None else {}
    for role in ("scale", "zero"):
        match tree.get(role):
            case dict() as below:
                if "group" not in below and role == "zero":  # integer zeros among the values, as e4m3
                    whole = [code for code, value in enumerate(below["values"]) if value in (0, 1, 2, 4, 7, 8, 15)]
                    parts[f"{inside}{role}"] = rng.choice(whole, shape(tree, rows, columns)).astype(np.uint8)
                else:
                    parts |= random_parts(rng, below, *shape(tree, rows, columns), f"{inside}{role}")
            case str() as kind:
                numbers = rng.uniform(0.005, 0.025, shape(tree, rows, columns))
                parts[f"{inside}{role}"] = {"f16": np.float16, "f32": np.float32, "bf16": to_bf16}[kind](numbers)
    return parts


def weight(parts: dict[str, np.ndarray], tree: dict, at: str = "") -> np.ndarray:
    """What the parts stand for, value by value, in float64."""
    codes, inside = parts[at or "codes"], f"{at}." if at else ""
    table = parts[f"{inside}codebook"] if tree["values"] is None else tree["values"]
    of = {}
    for role in ("scale", "zero"):
        if role in tree:
            nested = isinstance(tree[role], dict)
            of[role] = weight(parts, tree[role], f"{inside}{role}") if nested else parts[f"{inside}{role}"].astype(np.float64)
    w = np.zeros(codes.shape)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            value = float(table[int(codes[row, column])])
            if of:
                place = (row, 0) if tree["group"] == "row" else (0, 0)
                if tree.get("flat"):
                    place = (0, (row * codes.shape[1] + column) // tree["group"])
                elif tree["group"] not in ("row", "tensor"):
                    place = (row, column // tree["group"])
                scale, zero = of["scale"][place], of["zero"][place] if "zero" in of else 0.0
                value = scale * value - zero if tree.get("mode") == "minimum" else scale * (value - zero)
            w[row, column] = value
    return w


HALF_UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-24}
"""The largest relative error of one rounding."""


def limit(kind: str, outputs: int, roundings: int = 1, k: int = 1, halves: bool = False) -> float:
    """The relative Frobenius error to the truth that y may have, with sums of k terms in f32, or of eight in halves first.

    One rounding: an even error of at most half a unit, 1 / sqrt(3) of that in the root mean square where mantissas are 1, and
    0.7355 of this on average. A weight that is rounded too adds in quadrature. Of n outputs the estimate has the relative
    standard deviation sqrt(0.6 / n); five of them may lie between it and the average. y alone is never off by more than half
    a unit.
    """
    one = HALF_UNIT[kind] * max(1, 0.7355 * (1 + 5 * math.sqrt(0.6 / outputs))) / math.sqrt(3)
    of_y, of_w, of_sums = min(one, HALF_UNIT[kind]), one * math.sqrt(roundings - 1), HALF_UNIT["f32"] * math.sqrt(k / 3)
    return max(math.sqrt(of_y**2 + of_w**2 + of_sums**2), 6e-4 if halves else 0)


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


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """u32[n, words]: the bits of each row written one code after the other, the lowest bit first; whole words of zeros follow."""
    rows = []
    for row in codes:
        text = "".join(format(int(code), f"0{bits}b")[::-1] for code in row)
        text += "0" * (-len(text) % 32)
        rows.append([int(text[start : start + 32][::-1], 2) for start in range(0, len(text), 32)])
    return np.array(rows, np.uint32)


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
