"""Every code of every format, at every position of a word, through the very word operations that kernels issue."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

from w4gen.errors import FormatError
from w4gen.formats import named
from w4gen.ir.decode import Fma, decode, decode_for_x, run
from w4gen.ir.types import BF16, E8M0, F16, F32, DType, Format

FORMATS = {
    "int4": (named("int4_g128"), oracle.INT4),
    "nf4": (named("nf4_g64"), oracle.NF4),
    "uint4": (named("uint4_z"), oracle.UINT4),
    "int2": (Format("int2", bits=2, origin=-2.0), [-2.0, -1.0, 0.0, 1.0]),
    "half steps": (Format("halves", bits=2, step=0.5, origin=-1.0), [-1.0, -0.5, 0.0, 0.5]),
    "one bit": (Format("evens", bits=1, step=2.0, origin=-2.0), [-2.0, 0.0]),
    "signs": (Format("signs", bits=1, codebook=(-1.0, 1.0)), [-1.0, 1.0]),
    "int8": (named("int8"), oracle.INT8),
    "uint8": (Format("uint8", bits=8), [float(code) for code in range(256)]),
    "e2m1": (named("e2m1"), oracle.E2M1),
    "learned 2 bits": (Format("learned", bits=2, codebook=(-3.0, -0.125, 0.125, 3.0)), [-3.0, -0.125, 0.125, 3.0]),
    "squares": (
        Format("squares", bits=8, codebook=tuple(code * code / 2 for code in range(256))),
        [c * c / 2 for c in range(256)],
    ),
}
FORMATS |= {
    "plus or minus one": (Format("int1", bits=1, step=2.0, origin=-1.0), [-1.0, 1.0]),
    "half steps off zero": (Format("centred", bits=2, origin=-1.5), [-1.5, -0.5, 0.5, 1.5]),
    "quarters": (Format("quarters", bits=4, step=0.25, origin=-1.875), [code / 4 - 1.875 for code in range(16)]),
}
FLOATS = {f"e{e}m{m}": (e, m) for e in range(1, 8) for m in range(8 - e)}
FORMATS |= {name: (Format(name, bits=1 + e + m, minifloat=name), oracle.small_float(e, m)) for name, (e, m) in FLOATS.items()}
WIDE = ("e5m0", "e5m1", "e6m0", "e6m1", "e7m0")
"""Small floats with values that f16 does not have: its largest exponent is inf's."""
ROUND = {F16: np.float16, BF16: oracle.to_bf16, F32: np.float32}


def words(bits: int, position: int) -> np.ndarray:
    """i32 words with every code at `position`, four times: the other bits all 0, all 1, and two sorts of noise."""
    codes = np.arange(2**bits, dtype=np.uint64)
    noise = np.random.default_rng(position).integers(0, 2**32, (2, 1), dtype=np.uint64)
    others = np.array([[0], [2**32 - 1], *noise], np.uint64) & np.uint64(~((2**bits - 1) << position * bits) & (2**32 - 1))
    return (others | codes << np.uint64(position * bits)).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_at_every_position_decodes_exactly(name: str, kind: DType) -> None:
    form, values = FORMATS[name]
    if name in ("int8", "uint8") and kind == BF16:
        pytest.skip("8-bit codes do not fit bf16: see the test below")
    if name in WIDE and kind == F16:
        pytest.skip("the exponent does not fit f16: see the test below")
    how = decode(form, kind, 32 // form.bits)
    table = ROUND[kind](np.array(values))
    for position in range(how.per_unit):
        with np.errstate(invalid="ignore"):
            found = run(how, words(form.bits, position), position, table)
        # a table is rounded to its type before it is looked up; affine values are exact in every type they fit
        exact = table if form.codebook is not None else np.array(values)
        expected = np.broadcast_to(exact - how.left_out, found.shape)
        assert np.array_equal(found.astype(np.float64), expected.astype(np.float64), equal_nan=True), position
        assert np.array_equal(np.signbit(found), np.signbit(expected)), position


@pytest.mark.parametrize("name", ["int4", "uint4", "int2", "int8", "uint8", "half steps", "plus or minus one", "quarters"])
def test_every_code_at_every_position_is_an_exact_subnormal(name: str) -> None:
    form, values = FORMATS[name]
    how = decode_for_x(form, 32 // form.bits)
    for position in range(how.per_unit):
        found, bit = run(how, words(form.bits, position), position), how.low(position)
        expected = np.ldexp(np.array(values) - how.left_out, bit - how.below)
        assert found.dtype == np.float32
        assert np.array_equal(found.astype(np.float64), np.broadcast_to(expected, found.shape)), position
        assert np.ldexp(65504.0, how.below - how.power - bit) < 2.0**127, "x carries the power of two without overflow"


@pytest.mark.parametrize("name", FLOATS)
def test_small_floats_go_without_their_last_multiplication(name: str) -> None:
    form, values = FORMATS[name]
    how = decode_for_x(form, 32 // form.bits)
    for position in range(how.per_unit):
        found, bit = run(how, words(form.bits, position), position), how.low(position)
        expected = np.ldexp(np.array(values), bit - how.below)
        assert np.array_equal(found.astype(np.float64), np.broadcast_to(expected, found.shape), equal_nan=True), position
        assert np.ldexp(65504.0, how.below - how.power - bit) < 2.0**127, "x carries the power of two without overflow"
    assert np.ldexp(1.0, -24 + how.below - how.power) >= 2.0**-126, "nor is a subnormal f16 lost"


@pytest.mark.parametrize("name", FLOATS)
def test_small_floats_are_those_of_the_paper(name: str) -> None:
    form, values = FORMATS[name]
    assert np.array_equal(form.values, values, equal_nan=True)
    assert form.minifloat.max == max(value for value in values if np.isfinite(value))


def test_a_scale_of_eight_exponent_bits_is_a_power_of_two() -> None:
    """OCP MX 5.4.1: 2**(b - 127); 255 is NaN; there is no zero."""
    how = decode(Format("e8m0", bits=8, minifloat=E8M0), F32, 4)
    expected = np.array([2.0 ** (b - 127) for b in range(255)] + [np.nan])
    for position in range(4):
        found = run(how, words(8, position), position)
        assert np.array_equal(found.astype(np.float64), np.broadcast_to(expected, found.shape), equal_nan=True)


@pytest.mark.parametrize("name", WIDE)
def test_exponents_wider_than_those_of_the_type_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match=f"{name} does not fit the 5 exponent and 10 mantissa bits of f16: use f32"):
        decode(FORMATS[name][0], F16, 4)


@pytest.mark.parametrize("kind", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_constants_of_the_operations_are_exact_in_their_type(name: str, kind: DType) -> None:
    """What is rounded before it is used would make a kernel differ from the operations checked above (bf16 runs as f32 here)."""
    form, _ = FORMATS[name]
    if (form.affine and form.bits > kind.mantissa) or (kind == F16 and name in WIDE):
        pytest.skip("refused")
    how = decode(form, kind, 32 // form.bits)
    for op in (op for op in how.value if isinstance(op, Fma)):
        constants = np.array([each.value(p) for each in (op.times, op.plus) for p in map(how.low, range(how.per_unit))])
        assert np.array_equal(ROUND[kind](constants).astype(np.float64), constants)


def test_word_operations_are_few() -> None:
    """Affine codes take no more than a shift, and, or, cast and one multiply-add; subnormals no more than shift, and, cast."""
    assert len(decode(FORMATS["int4"][0], F32, 8).value) <= 4
    assert len(decode_for_x(FORMATS["int4"][0], 8).value) <= 2


@pytest.mark.parametrize(("step", "origin"), [(0.1, -0.75), (1 / 3, -1.0), (0.5, -0.7), (2.0, -0.5), (1.0, -1000.0)])
def test_values_that_do_not_decode_exactly_are_refused(step: float, origin: float) -> None:
    with pytest.raises(FormatError, match=r"mine: .* do not decode exactly: take a power of two"):
        Format("mine", bits=4, step=step, origin=origin)


def test_codes_wider_than_the_mantissa_are_refused() -> None:
    with pytest.raises(FormatError, match="8-bit codes do not fit the 7 mantissa bits of bf16: use f16 or f32"):
        decode(FORMATS["int8"][0], BF16, 4)


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", ["uint4", "uint8", "int8", "int2"])
def test_every_code_minus_every_integer_zero_is_exact(name: str, kind: DType) -> None:
    """As a kernel forms it: both in the type of the decoded values (f32 where codes are wider than the mantissa), then x's."""
    _, values = FORMATS[name]
    q, z = np.meshgrid(ROUND[kind](np.array(values)), ROUND[kind](np.array(values)))
    assert np.array_equal(q[0].astype(np.float64), np.array(values)), "the values themselves are exact in the type"
    assert np.array_equal(ROUND[kind](q - z).astype(np.float64), np.subtract(*np.meshgrid(values, values)))


@pytest.mark.parametrize("form", [named("nf4"), Format("huge", step=2.0**20)], ids=str)
def test_only_affine_codes_are_read_as_subnormals(form: Format) -> None:
    with pytest.raises(FormatError, match=r"only affine codes, of steps up to 2\*\*16, are read as subnormals"):
        decode_for_x(form, 8)
