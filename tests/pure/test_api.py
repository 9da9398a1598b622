"""What people type: shapes, names, refusals in one line with the way out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import w4gen
from w4gen.api import parse_shape
from w4gen.errors import ShapeError, W4Error
from w4gen.schedule.arch import ARCHES


@pytest.mark.parametrize("text", ["1x1536x256", " 1X1536x256 ", "1×1536×256"])
def test_a_shape_is_tokens_inputs_outputs(text: str) -> None:
    assert parse_shape(text) == (1, 1536, 256)


@pytest.mark.parametrize("text", ["", "1x1536", "1x2x3x4", "axbxc", "1.5x2x3", "1 x 2 x 3", "1x1536x", "0x10x1x1", "١xx"])
def test_a_malformed_shape_is_refused(text: str) -> None:
    with pytest.raises(ShapeError, match=r"is not MxKxN: give tokens x inputs x outputs, as in 1x1536x256"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"shape": "0x1536x256"}, "m=0 is not a positive whole number"),
        ({"shape": "1x0x256"}, "k=0 is not a positive whole number"),
        ({"shape": "1x1536x-3"}, "n=-3 is not a positive whole number"),
        ({"shape": "1x1536x256", "format": "int9_g128"}, "unknown format 'int9_g128': the nearest is int"),
        ({"shape": "1x1536x256", "format": "int4_g0"}, "the group must be positive"),
        ({"shape": "1x1536x256", "format": "nf4_g-64"}, "the group must be positive"),
        ({"shape": (1, 1536, 256)}, "shape (1, 1536, 256) is not MxKxN: give tokens x inputs x outputs"),
        ({"shape": "1x999999999999x256"}, "a layer has at most 68,719,476,736, cut it"),
        ({"shape": "1x1536x256", "arch": "sm_9"}, "unknown arch 'sm_9': the nearest is sm_90"),
        ({"shape": "1x1536x256", "arch": "A100"}, "unknown arch 'A100': the nearest is sm_80 (A100 SXM 80 GB)"),
        ({"shape": "1x1536x256", "arch": "H100"}, "unknown arch 'H100': the nearest is sm_90 (H200 SXM)"),
        ({"shape": "1x1536x256", "arch": "rtx4090"}, "unknown arch 'rtx4090': the nearest is sm_89 (RTX 4090)"),
        ({"shape": "1x1536x256", "dtype": "int8"}, "unknown dtype 'int8'"),
        ({"shape": "1x1536x256", "dtype": "float32"}, "float32 x is run by the fallback"),
        ({"shape": "17x1536x256", "dtype": "float32"}, "float32 x is run by the fallback"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_what_cannot_be_compiled_is_refused_in_one_line(asked: dict[str, str], message: str, fresh_cache) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(W4Error) as caught:
        w4gen.compile(**asked)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not fresh_cache.exists(), "nothing is written"


def test_the_default_is_int4_g128_in_f16_for_the_portable_arch() -> None:
    kernel = w4gen.compile("1x1536x256")
    assert (kernel.problem.format.label, str(kernel.problem.x), kernel.problem.m) == ("int4_g128", "f16", (1, 1))
    assert "--arch portable" in kernel.source


def test_the_arch_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_ARCH", "sm_90")
    assert "--arch sm_90" in w4gen.compile("1x1536x256").source
    assert "--arch sm_80" in w4gen.compile("1x1536x256", arch="sm_80").source


@pytest.mark.parametrize(("low", "high"), [(2, 8), (9, 16), (17, 32), (33, 64), (65, 128), (2049, 2**31 - 1)])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_rendering_is_deterministic(form: str, low: int, high: int) -> None:
    """One text for all M of a bucket, every time."""
    assert w4gen.compile(f"{high}x1536x256", form).source == w4gen.compile(f"{low}x1536x256", form).source


def test_supports_says_why_not() -> None:
    assert w4gen.supports(m=1, n=256, k=1536, format="nf4_g64", arch="sm_90") == (True, "")
    assert w4gen.supports(m=17, n=256, k=1536) == (True, "")
    ok, why = w4gen.supports(m=17, n=256, k=1536, dtype="float32")
    assert not ok
    assert "float32 x is run by the fallback" in why
    ok, why = w4gen.supports(m=1, n=256, k=1536, format="nf9")
    assert (ok, "unknown format" in why) == (False, True)


def test_a_name_that_is_not_public_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Kernels': it has Format"):
        w4gen.Kernels  # noqa: B018


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g50", "uint4_g128_z", "int8_g128"])
@pytest.mark.parametrize("m", [1, 2, 17, 33, 65, 129, 4096, 2**20])
def test_every_m_has_a_kernel_on_every_arch(m: int, form: str, arch: str) -> None:
    for dtype in ("float16", "bfloat16"):
        assert w4gen.supports(m=m, n=256, k=1536, format=form, arch=arch, dtype=dtype) == (True, "")


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128, 129])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 13), (257, 1021), (1, 28672), (28672, 8)])
def test_odd_shapes_compile(m: int, n: int, k: int) -> None:
    assert f"N = tl.constexpr({n})" in w4gen.compile(f"{m}x{k}x{n}", "nf4_g64").source


MORE = ["uint4_g128_z", "uint4_g50_m", "uint4_g32_zf", "int8_g128", "int8_row_z", "e2m1_g32"]


@given(
    m=st.sampled_from([1, 2, 16, 17, 64, 128, 4096]),
    n=st.sampled_from([1, 13, 515, 4096, 8193]),
    k=st.integers(1, 4000) | st.integers(1, 900).map(lambda words: 32 * words),
    form=st.sampled_from(["int4_g128", "nf4_g64", "int4_g32", "int4_g50", "nf4_row", "int4_g16_bf16", *MORE]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
)
@settings(max_examples=200)
def test_any_shape_compiles(m: int, n: int, k: int, form: str, dtype: str) -> None:
    """Legal but unusual shapes run (design section 10)."""
    kernel = w4gen.compile(f"{m}x{k}x{n}", form, dtype=dtype)
    assert [f"def {piece.name}(" in kernel.source for piece in kernel.pieces] in ([True], [True, True])
    assert kernel.name == ("gemv" if m == 1 else "dequant" if m > 128 else kernel.name)
