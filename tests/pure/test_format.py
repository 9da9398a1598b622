"""Formats and problems: text that reads back, names, refusals."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from w4gen.errors import FormatError, ShapeError
from w4gen.formats import FAMILIES, named
from w4gen.ir.layout import rows
from w4gen.ir.problem import Problem
from w4gen.ir.types import BF16, E4M3, E8M0, F16, F32, I32, PER_TENSOR, ZERO_MODES, Format, dtype, minifloat

E2M1 = Format("e2m1", bits=4, codebook=(0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6), group=32)
finite = st.floats(-1e3, 1e3)


@st.composite
def formats(draw: st.DrawFn, depth: int = 2) -> Format:
    bits = draw(st.integers(1, 8))
    floats = [f"e{e}m{bits - 1 - e}" for e in range(1, bits)]
    kind = draw(st.sampled_from(["affine", "minifloat", "codebook"] if floats else ["affine", "codebook"]))
    table = (
        st.just(PER_TENSOR) | st.lists(finite, min_size=2**bits, max_size=2**bits).map(tuple) if bits < 6 else st.just(PER_TENSOR)
    )
    codebook = draw(table.filter(any)) if kind == "codebook" else None
    small = minifloat(draw(st.sampled_from(floats))) if kind == "minifloat" else None
    types = st.sampled_from([F16, BF16, F32, E4M3, E8M0])
    types = types | formats(depth - 1) if depth else types | st.none()
    group, scale = draw(st.sampled_from([-1, 1, 32, 50, 128])), draw(types)
    step = 2.0 ** draw(st.integers(-8, 8)) if kind == "affine" else 1.0
    origin = step * draw(st.integers(-256, 256)) / 2 if kind == "affine" else 0.0
    modes = ["float", "original", "minimum", "rescale"]
    modes = list(ZERO_MODES) if kind == "affine" and step == 1 and origin.is_integer() else modes
    zero, mode = draw(st.just((None, None)) | st.tuples(types.filter(bool), st.sampled_from(modes)))
    name = draw(st.sampled_from(["a", "e2m1", "_x9"]))
    return Format(name, bits, step, origin, codebook, group, scale, zero, mode, small, draw(st.booleans()))


@given(formats())
def test_a_format_reads_what_it_writes(form: Format) -> None:
    assert Format.parse(str(form)) == form == named(str(form))


@given(formats(), st.integers(1, 99), st.integers(1, 999), st.booleans(), st.booleans(), st.sampled_from([F16, BF16]))
def test_a_problem_reads_what_it_writes(form: Format, n: int, k: int, bias: bool, packed: bool, x: object) -> None:
    problem = Problem(m=(2, 16), n=n, k=k, format=form, bias=bias, x=x, layout=rows(n, k, form.bits) if packed else None)
    assert Problem.parse(str(problem)) == problem


@pytest.mark.parametrize(("alias", "mode"), [("quantized", "integer"), ("original", "float"), ("rescale", "minimum")])
def test_zero_modes_have_the_names_of_bitblas_too(alias: str, mode: str) -> None:
    assert Format("mine", zero=F16, zero_mode=alias) == Format("mine", zero=F16, zero_mode=mode)
    assert f"zero_mode={mode}" in str(Format("mine", zero=F16, zero_mode=alias))


def test_a_zero_is_an_integer_unless_it_says_otherwise() -> None:
    assert Format("mine", zero=F16).zero_mode == "integer"
    assert Format("mine").zero_mode is None


@pytest.mark.parametrize("name", sorted(oracle.VALUES))
def test_built_in_values_are_those_of_the_papers(name: str) -> None:
    assert np.array_equal(named(name).values, oracle.VALUES[name], equal_nan=True)


def test_negative_zero_survives_the_text() -> None:
    assert str(Format.parse(str(E2M1)).values[8]) == "-0.0"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("suffix", ["", "_g64", "_row", "_tensor"])
def test_every_family_is_called_by_its_name_and_by_its_label(family: str, suffix: str) -> None:
    form = named(family + suffix)
    assert form.name == family
    assert named(form.label) == form
    assert Format.parse(str(form)) == form
    assert form.label.startswith(family + suffix)


@pytest.mark.parametrize(
    ("name", "group", "scale"),
    [
        ("int4_g128", 128, F16),
        ("nf4_g64", 64, F16),
        ("int4", 128, F16),
        ("nf4_row", -1, F16),
        ("int4_g50_bf16", 50, BF16),
        ("nf4_f32", 64, F32),
        ("e2m1", 32, F16),
        ("int8", 128, F16),
        ("uint4_g64_z", 64, F16),
        ("uint4_g32_m_bf16", 32, BF16),
        ("uint4_bf16_g32_m", 32, BF16),
        ("uint4_row_zf_f32", -1, F32),
    ],
)
def test_a_name_is_a_family_and_its_suffixes(name: str, group: int, scale: object) -> None:
    form = named(name)
    assert (form.group, form.scale, form.zero or scale) == (group, scale, scale)
    assert named(form.label) == form


def test_a_format_of_your_own_needs_no_name() -> None:
    assert named(E2M1) is E2M1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int9_g128", "unknown format 'int9_g128': the nearest is int"),
        ("nf5_g64", "unknown format 'nf5_g64': the nearest is nf4_g64"),
        ("fp5", "unknown format 'fp5': the nearest is fp4_g64"),
        ("", "unknown format ''"),
        ("int4_zz", "unknown suffix _zz"),
        ("nf4_z", "only codes that step by 1 have an integer zero"),
        ("int4(zero=integer)", "zero=integer is not a float type"),
        ("int4(scale=minimum)", "scale=minimum is not a float type"),
        ("int4_g0", "the group must be positive"),
        ("int4_g-5", "the group must be positive"),
        ("int4_x", "unknown suffix _x"),
        ("int4(bits=4", "cannot read the format"),
        ("int4(bits=4,colour=3)", "a format has no colour; write it"),
        ("int4(4)", "cannot read the format"),
        ("int4(scale=f99)", "f99 is no type; write it"),
        ("int4(group=0)", "group=0 is not positive"),
    ],
)
def test_unknown_formats_are_refused_with_the_way_out(name: str, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        named(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": 0}, "group=0 is not positive"),
        ({"group": -2}, "group=-2 is not positive"),
        ({"bits": 0}, "bits=0 is not stored"),
        ({"bits": 9}, "bits=9 is not stored"),
        ({"minifloat": E4M3}, "minifloat=e4m3 has 8 bits, not 4: say bits=8"),
        ({"minifloat": E4M3, "bits": 8, "step": 2.0}, "give one of step, minifloat, codebook"),
        ({"minifloat": "e9m1"}, "no small float 'e9m1': use eXmY with 1 to 7 exponent bits"),
        ({"bits": 4, "codebook": (1.0, 2.0)}, "codebook has 2 entries, 4 bits need 16"),
        ({"bits": 1, "codebook": (0.0, 0.0)}, "holds 0 alone: give a value that a scale can multiply"),
        ({"scale": I32}, "scale=i32 is not a float type"),
        ({"zero": I32}, "zero=i32 is not a float type"),
        ({"zero": F16, "zero_mode": "half"}, "zero_mode='half': use one of integer, quantized, float"),
        ({"zero_mode": "minimum"}, "zero_mode=minimum without zeros: add zero=f16, or leave it out"),
        ({"zero": F16, "step": 0.5}, "only codes that step by 1 have an integer zero"),
    ],
)
def test_malformed_formats_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Format("mine", **fields)


@pytest.mark.parametrize("values", [(0.0, float("nan")), (0.0, float("inf"))])
def test_a_codebook_holds_finite_numbers(values: tuple[float, ...]) -> None:
    with pytest.raises(FormatError, match="mine"):
        Format("mine", bits=1, codebook=values)


@pytest.mark.parametrize("name", ["my format", "", "a-b", "1a"])
def test_a_format_is_called_by_an_identifier(name: str) -> None:
    with pytest.raises(FormatError, match="is not an identifier"):
        Format(name)


@pytest.mark.parametrize(("name", "found"), [("float16", F16), ("fp16", F16), ("bfloat16", BF16), ("f32", F32)])
def test_dtypes_have_the_names_people_use(name: str, found: object) -> None:
    assert dtype(name) == found


@pytest.mark.parametrize(("kind", "largest"), [(F16, 65504.0), (BF16, 3.3895313892515355e38), (F32, 3.4028234663852886e38)])
def test_the_largest_finite_value_of_a_float_type(kind: object, largest: float) -> None:
    assert kind.max == largest


@pytest.mark.parametrize(
    "sizes",
    [{"m": (0, 1)}, {"m": (1, 0)}, {"m": (-1, 1)}, {"n": 0}, {"n": -1}, {"k": 0}, {"k": 2.0}, {"n": True}],
    ids=str,
)
def test_sizes_below_one_are_refused(sizes: dict[str, object]) -> None:
    with pytest.raises(ShapeError):
        Problem(**{"m": (1, 1), "n": 8, "k": 8, "format": E2M1, **sizes})


@pytest.mark.parametrize("text", ["", "m=1", "m=1..1 n=x k=1 format=int4() x=f16 y=f16 accumulate=f32 bias=0"])
def test_text_that_is_no_problem_is_refused(text: str) -> None:
    with pytest.raises(ShapeError, match="cannot read the problem"):
        Problem.parse(text)


@pytest.mark.parametrize("what", [4, None, b"int4", ["int4_g64"]])
def test_what_is_no_text_is_no_format(what: object) -> None:
    for read in (named, Format.parse):
        with pytest.raises(FormatError, match=r"cannot read the format .*: it is no text; write it with str"):
            read(what)  # type: ignore[arg-type]
