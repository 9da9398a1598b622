"""A small interpreter of PTX: what inline assembly computes on 32-bit words, exactly. Shares no code with w4gen.

Words are u32 arrays; a pair of 16-bit floats is computed in float64, which holds every product and sum of two of them exactly or
far more precisely than they are rounded, and rounded to nearest even once, as `fma.rn` and `add` do.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import oracle


def half_of(word: np.ndarray, half: int, kind: str) -> np.ndarray:
    """A half of u32 words as the float64 that it stands for."""
    bits = (word >> (16 * half) & 0xFFFF).astype(np.uint16)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bits_of(value: np.ndarray, kind: str) -> np.ndarray:
    """The nearest 16-bit float to a float64, as u32 of its bits."""
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16).astype(np.uint32)
    return (oracle.to_bf16(value).view(np.uint32) >> 16).astype(np.uint32)


def in_pairs(kind: str, compute: Callable[..., np.ndarray], *words: np.ndarray) -> np.ndarray:
    low, high = (bits_of(compute(*(half_of(word, half, kind) for word in words)), kind) for half in range(2))
    return low | high << 16


def single(word: np.ndarray) -> np.ndarray:
    """u32 words as the f32 they stand for."""
    return word.view(np.float32)


E4M3 = np.array(oracle.small_float(4, 3))


def in_singles(compute: Callable[..., np.ndarray], *words: np.ndarray) -> np.ndarray:
    """Computed in float64 and rounded once, which is what a sum or product of two f32 is rounded to."""
    with np.errstate(invalid="ignore", over="ignore"):
        return compute(*(single(word).astype(np.float64) for word in words)).astype(np.float32).view(np.uint32)


def run(text: str, outputs: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """The registers $0 … of `outputs` after `text`, whose inputs $outputs … are u32 arrays. Raises on what it does not know."""
    registers = {f"${outputs + index}": each.astype(np.uint32) for index, each in enumerate(inputs)}
    shape = inputs[0].shape

    holds: dict[str, np.ndarray] = {}

    def value(operand: str) -> np.ndarray:
        if re.fullmatch(r"0f[0-9A-F]{8}", operand):
            return np.full(shape, int(operand[2:], 16), np.uint32)
        if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", operand):
            return np.full(shape, int(operand, 0), np.uint32)
        return registers[operand]  # an unset register is an error

    for line in text.strip().removeprefix("{").removesuffix("}").strip().splitlines():
        name, _, rest = line.strip().rstrip(";").partition(" ")
        if name == ".reg":
            continue
        if name.startswith("@p"):  # where the predicate holds
            (name, _, rest), chosen = rest.partition(" "), holds["p"]
        else:
            chosen = np.ones(shape, bool)
        if rest.startswith("{"):  # the halves of a word
            for half, register in enumerate(rest[1 : rest.index("}")].split(",")):
                registers[register.strip()] = value(rest.rpartition(",")[2].strip()) >> (16 * half) & 0xFFFF
            continue
        to, *sources = (operand.strip() for operand in rest.split(","))
        if name == "lop3.b32":
            table = sources.pop()
            assert int(table, 16) == 0xEA, f"only (a & b) | c is known, not {table}"
        operands = [value(source) for source in sources]
        match name.split("."):
            case ["shr", "u32"]:
                registers[to] = operands[0] >> operands[1]
            case ["shl", "b32"]:
                registers[to] = operands[0] << operands[1]
            case ["shr", "s32"]:
                registers[to] = (operands[0].view(np.int32) >> operands[1].view(np.int32)).view(np.uint32)
            case ["and", "b32"]:
                registers[to] = operands[0] & operands[1]
            case ["or", "b32"]:
                registers[to] = np.where(chosen, operands[0] | operands[1], registers.get(to, operands[0]))
            case ["xor", "b32"]:
                registers[to] = operands[0] ^ operands[1]
            case ["max", "u32"]:
                registers[to] = np.maximum(*operands)
            case ["setp", "eq", "u32"]:
                holds[to] = operands[0] == operands[1]
            case ["add", "u32"]:
                registers[to] = operands[0] + operands[1]
            case ["sub", "u32"]:
                registers[to] = operands[0] - operands[1]
            case ["mov", "b32" | "u32"]:
                registers[to] = operands[0]
            case ["lop3", "b32"]:
                registers[to] = operands[0] & operands[1] | operands[2]
            case ["add", "f16x2" | "bf16x2" as kind]:
                registers[to] = in_pairs(kind[:-2], np.add, *operands)
            case ["sub", "f16x2" as kind]:
                registers[to] = in_pairs(kind[:-2], np.subtract, *operands)
            case ["fma", "rn", "f16x2" | "bf16x2" as kind]:
                registers[to] = in_pairs(kind[:-2], lambda a, b, c: a * b + c, *operands)
            case ["mul", "rn", "f32"]:
                registers[to] = in_singles(np.multiply, *operands)
            case ["fma", "rn", "f32"]:
                registers[to] = in_singles(lambda a, b, c: a * b + c, *operands)
            case ["cvt", "f32", "f16"]:
                registers[to] = half_of(operands[0], 0, "f16").astype(np.float32).view(np.uint32)
            case ["cvt", "rn", "f16x2", "e4m3x2"]:
                low, high = (bits_of(E4M3[operands[0] >> (8 * half) & 0xFF], "f16") for half in range(2))
                registers[to] = low | high << 16
            case _:
                raise AssertionError(f"unknown instruction: {line}")
    return [registers[f"${index}"] for index in range(outputs)]
