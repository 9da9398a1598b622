"""The text of decoding in pairs, run by an interpreter of PTX: every code at every place, whatever stands beside it."""

from __future__ import annotations

import itertools
import re

import numpy as np
import oracle
import ptx as interpreter
import pytest

from w4gen.codegen import ptx
from w4gen.errors import TemplateError
from w4gen.formats import named
from w4gen.ir.decode import decode, decode_pairs
from w4gen.ir.dtype import E4M3, E5M2, E8M0
from w4gen.ir.types import BF16, F16, F32, DType, Format, decoded

FORMATS = {
    "int4": (named("int4_g128"), oracle.INT4),
    "uint4": (named("uint4_g128"), oracle.UINT4),
    "int8": (named("int8_g128"), oracle.INT8),
    "uint8": (Format("uint8", bits=8), [float(code) for code in range(256)]),
    "int2": (Format("int2", bits=2, origin=-2.0), [-2.0, -1.0, 0.0, 1.0]),
    "half steps": (Format("halves", bits=2, step=0.5, origin=-1.0), [-1.0, -0.5, 0.0, 0.5]),
    "evens": (Format("evens", bits=1, step=2.0, origin=-2.0), [-2.0, 0.0]),
    "wide steps": (Format("wide", bits=4, step=4.0, origin=-32.0), [4.0 * code - 32 for code in range(16)]),
}
FLOATS = {
    name: (1 + e + m, oracle.small_float(e, m))
    for name, (e, m) in {
        "e1m0": (1, 0),
        "e1m2": (1, 2),
        "e2m1": (2, 1),
        "e3m0": (3, 0),
        "e4m3": (4, 3),
        "e5m2": (5, 2),
        "e3m4": (3, 4),
        "e2m5": (2, 5),
    }.items()
}
HELD = [(name, kind) for name, kind in itertools.product(FORMATS, (F16, BF16)) if FORMATS[name][0].bits <= kind.mantissa]


def words(bits: int) -> np.ndarray:
    """u32 words: every pattern of a half word beside four others, in the low half and in the high one."""
    every, others = np.arange(2**16, dtype=np.uint32), np.array([0, 0xFFFF, 0xA5C3, 0x1234], np.uint32)
    pairs = np.stack([every[None, :] | others[:, None] << 16, every[None, :] << 16 | others[:, None]])
    assert bits in (1, 2, 4, 8)
    return pairs.reshape(-1)


@pytest.mark.parametrize(("name", "kind"), HELD, ids=str)
def test_every_code_decodes_exactly_whatever_its_word_holds(name: str, kind: DType) -> None:
    """Pair i of a word is codes i and i + half: a low and a high half, in one register."""
    form, values = FORMATS[name]
    count, held = 16 // form.bits, words(form.bits)
    found = interpreter.run(ptx.decode_pairs(decode(form, kind, count)), count, held)
    table = np.array(values, np.float64)
    for code, half in itertools.product(range(count), range(2)):
        expected = table[held >> (16 * half + code * form.bits) & (2**form.bits - 1)]
        assert np.array_equal(interpreter.half_of(found[code], half, kind.name), expected), (code, half)


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_every_small_float_decodes_exactly_but_for_the_power_that_sums_make_up_for(name: str, kind: DType) -> None:
    bits, values = FLOATS[name]
    how = decode_pairs(Format(name, bits=bits, minifloat=name), kind, 32 // bits)
    count, held = 16 // bits, words(bits)
    found = interpreter.run(ptx.decode_pairs(how), count, held)
    table = np.array(values, np.float64)
    assert (how.power > 0) == (kind == F16 and name != "e5m2")
    for code, half in itertools.product(range(count), range(2)):
        expected = table[held >> (16 * half + code * bits) & (2**bits - 1)] * 2.0**-how.power
        assert np.array_equal(interpreter.half_of(found[code], half, kind.name), expected, equal_nan=True), (code, half)


SCALES = {
    "e8m0": (decoded(E8M0), oracle.E8M0),
    "e4m3": (decoded(E4M3), oracle.small_float(4, 3)),
    "e5m2": (decoded(E5M2), oracle.small_float(5, 2)),
    "e3m4": (Format("e3m4", bits=8, minifloat="e3m4"), oracle.small_float(3, 4)),
    "uint8": (Format("uint8", bits=8), [float(code) for code in range(256)]),
    "half steps": (Format("halves", bits=8, step=0.5, origin=-3.25), [0.5 * code - 3.25 for code in range(256)]),
}
"""Codes of scales, and what they are worth."""


@pytest.mark.parametrize("name", [*SCALES, "e4m3 by the machine"])
def test_every_code_of_a_scale_decodes_exactly_at_each_place_of_a_word(name: str) -> None:
    """Zeros, subnormals and what is no number included, whatever its neighbours are."""
    form, values = SCALES[name.partition(" by")[0]]
    text = ptx.e4m3_scales() if " by" in name else ptx.coded_scales(decode(form, F32, 1))
    code, other = np.arange(256, dtype=np.uint32)[:, None], np.array([0, 255, 0x5A, 1], np.uint32)[None, :]
    for place in range(4):
        word = sum((code if at == place else other) << (8 * at) for at in range(4)).astype(np.uint32).reshape(-1)
        found = interpreter.run(text, 4, word)
        for at in range(4):
            expected = np.array(values)[word >> (8 * at) & 255]
            assert np.array_equal(interpreter.single(found[at]).astype(np.float64), expected, equal_nan=True), at


@pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)
def test_scales_of_a_machine_type_come_out_as_they_are(kind: DType) -> None:
    count = 32 // kind.bits
    held = words(8) if count == 2 else np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)
    found = interpreter.run(ptx.stored_scales(kind.name), count, held)
    for half in range(count):
        expected = interpreter.half_of(held, half, kind.name) if count == 2 else interpreter.single(held)
        assert np.array_equal(interpreter.single(found[half]), expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "line", "wrong"),
    [
        ("e8m0", "max.u32 t, t, 0x00400000;", "max.u32 t, t, 0;"),
        ("e8m0", "fma.rn.f32 $2, $2, 0f00000000, $2;", "mov.b32 $2, t;"),
        ("e4m3", "setp.eq.u32 p, u, 0x07f00000;", "setp.eq.u32 p, u, 0x07800000;"),
    ],
)
def test_a_wrong_text_of_scales_is_noticed(name: str, line: str, wrong: str) -> None:
    text, held = ptx.coded_scales(decode(SCALES[name][0], F32, 1)), np.arange(256, dtype=np.uint32) * 0x01010101
    assert line in text
    right, other = (interpreter.run(each, 4, held) for each in (text, text.replace(line, wrong)))
    assert not all(np.array_equal(a, b) for a, b in zip(right, other, strict=True))


def test_codes_of_scales_that_are_looked_up_are_refused() -> None:
    with pytest.raises(TemplateError, match="a scale's code is not decoded by Lookup"):
        ptx.coded_scales(decode(Format("table", bits=8, codebook=tuple(float(code) for code in range(256))), F32, 1))


@pytest.mark.parametrize(("name", "kind"), HELD, ids=str)
def test_a_pair_costs_one_logical_operation_and_one_sum(name: str, kind: DType) -> None:
    text = ptx.decode_pairs(decode(FORMATS[name][0], kind, 16 // FORMATS[name][0].bits))
    count = 16 // FORMATS[name][0].bits
    assert len(re.findall(r"\blop3\.", text)) == count
    assert len(re.findall(r"\b(?:add|fma\.rn)\.b?f16x2", text)) == count
    assert len(re.findall(r"\bshr\.", text)) < count


def test_constants_that_halves_do_not_hold_are_refused() -> None:
    with pytest.raises(TemplateError, match=r"1025\.5 is not a number of type f16: decoding in pairs needs exact constants"):
        ptx.both(1025.5, F16)
    with pytest.raises(TemplateError, match=r"257\.0 is not a number of type bf16"):
        ptx.both(257.0, BF16)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [("lop3.b32 $1, $4, 0x00f000f0", "lop3.b32 $1, $4, 0x00f0000f"), ("shr.u32 t, $4, 8", "shr.u32 t, $4, 4")],
)
def test_a_wrong_text_is_noticed(line: str, wrong: str) -> None:
    """The interpreter tells what runs from what should."""
    text = ptx.decode_pairs(decode(named("int4_g128"), F16, 4))
    assert line in text
    held = words(4)
    right, other = (interpreter.run(each, 4, held) for each in (text, text.replace(line, wrong)))
    assert not all(np.array_equal(a, b) for a, b in zip(right, other, strict=True))
