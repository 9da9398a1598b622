"""Rendered kernels under Triton's interpreter against the oracle."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cases
import oracle
import pytest
import torch

import w4gen
from w4gen import Format
from w4gen.errors import ShapeError
from w4gen.runtime import check, launch, ops
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.rules import layout_for

F16, BF16 = torch.float16, torch.bfloat16


def kernel_for(case: cases.Call) -> w4gen.compile:  # type: ignore[valid-type]
    m, k = case.x.shape
    return w4gen.compile(
        f"{m}x{k}x{case.w.n}", case.w.format, dtype=cases.NAMES[case.x.dtype], bias=case.bias is not None, arch="portable"
    )


def bound(case: cases.Call) -> torch.Tensor:
    """y by the kernel itself: no op, no fallback."""
    return w4gen.bind(kernel_for(case))(case.x, case.w, case.bias)


@pytest.fixture(autouse=True)
def fresh_launches() -> None:
    ops.LAUNCHES.clear()


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of kernels must not pass by way of the fallback."""

    def refuse(*_: object) -> None:
        raise AssertionError("the fallback answered")

    monkeypatch.setattr(ops, "fallback", refuse)


FORMATS = ["int4_g128", "nf4_g64", "int4_g32", "nf4_g16", "int4_g50", "nf4_row", "int4_g64_bf16", "nf4_g128_f32"]
FORMATS += [*cases.ZEROS, "int8_g128", "e2m1_g32"]


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("form", FORMATS)
def test_formats_and_groups(form: str, m: int, kind: torch.dtype) -> None:
    case = cases.call(form, m, 26, 384, kind)
    rounded = m > 1 and ("g50" in form or "zf" in form)  # each weight on matrix cores, as y is: 2.9e-4 on average in f16
    assert case.error(bound(case)) <= (1.2 if rounded else 1) * case.limit


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("form", [cases.CUBES, cases.UINT8, cases.UINT2], ids=lambda form: form.name)
def test_formats_of_your_own(form: Format, m: int) -> None:
    case = cases.call(form, m, 26, 384)
    assert case.error(bound(case)) <= case.limit


def with_codes_at_zero(form: str, m: int, kind: torch.dtype) -> cases.Call:
    """A call in which the codes of the first group of every row are its zero, in all weights of the first row."""
    case = cases.call(form, m, 26, 384, kind)
    zeros = case.zeros.float().round()
    each = zeros.repeat_interleave(case.w.format.group_in(384), 1)[:, :384] - case.w.format.origin
    codes = case.codes.clone()
    codes[0] = each[0].to(torch.uint8)
    return replace(case, w=w4gen.Weight.from_codes(codes, case.scales, zeros.to(case.zeros.dtype), case.w.format), codes=codes)


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g50_z", "int8_g64_z", "uint4_g64_zf"])
def test_codes_that_are_the_zero_give_exact_zeros(form: str, m: int, kind: torch.dtype) -> None:
    y = bound(with_codes_at_zero(form, m, kind))
    assert (y[:, 0] == 0).all()
    assert (y[:, 1:] != 0).all()


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g128_m", "uint4_g128_zf"])
def test_a_group_without_scale_is_zero_or_the_minimum(form: str, m: int) -> None:
    """s = 0: what is left is 0, or -z in the mode minimum (a group of equal weights)."""
    case = cases.call(form, m, 26, 384)
    w = w4gen.Weight.from_codes(case.codes, case.scales * 0, case.zeros, form)
    y = w4gen.bind(kernel_for(case))(case.x, w)
    if not form.endswith("_m"):
        assert (y == 0).all()
    else:
        truth = oracle.linear(case.x.double().numpy(), -case.zeros.double().numpy().repeat(128, 1))
        assert oracle.error(y.double().numpy(), truth) <= case.limit


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g50", "uint4_g50_m"])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 256), (29, 256), (3, 131), (13, 1), (7, 31), (33, 129), (9, 2049), (2, 4133), (1, 1)],
    ids=str,
)
def test_ragged_and_prime_sizes(n: int, k: int, m: int, form: str) -> None:
    """N = 1, K smaller than a block, last partial groups, more than one step along K."""
    case = cases.call(form, m, n, k, bias=True)
    y = bound(case)
    least = oracle.typical(case.x.double().numpy(), case.true_w)
    error = oracle.error(y.double().numpy(), case.truth(), least)
    assert error <= cases.limit(F16, n * m)


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("m", [1, 2, 5, 16])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_every_m_of_the_buckets_with_bias(form: str, m: int, kind: torch.dtype) -> None:
    case = cases.call(form, m, 27, 300, kind, bias=True)
    assert case.error(bound(case)) <= case.limit


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_one_row_and_many_outputs(form: str, kind: torch.dtype) -> None:
    """Several rows of w in one program, the last block partial; enough outputs for the limit of the issue."""
    case = cases.call(form, 1, 515, 160, kind)
    assert kernel_for(case).schedule.block_n > 1
    assert case.limit == oracle.LIMIT[cases.NAMES[kind]]
    assert case.error(bound(case)) <= case.limit


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g128_z", "uint4_g64_m"])
def test_an_outlier_in_x_keeps_the_error(form: str, m: int) -> None:
    case = cases.call(form, m, 26, 512)
    case.x[0, 77] = 6e4
    assert case.error(bound(case)) <= case.limit


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "int4_g50", "uint4_g128_z", "uint4_g64_m"])
@pytest.mark.parametrize("place", [0, 129, 299])
def test_what_is_not_finite_stays_in_its_row(form: str, bad: float, place: int) -> None:
    case = cases.call(form, 5, 40, 300)
    clean = bound(case)
    case.x[2, place] = bad
    y = bound(case)
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])
    assert not y[2].isfinite().any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_what_is_not_finite_shows_in_a_single_row(form: str, bad: float) -> None:
    case = cases.call(form, 1, 8, 300)
    case.x[0, 299] = bad
    assert not bound(case).isfinite().any()


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_repeated_calls_are_equal_bit_for_bit(form: str, m: int) -> None:
    case = cases.call(form, m, 5, 300, bias=True)
    run = w4gen.bind(kernel_for(case))
    first = run(case.x, case.w, case.bias)
    assert all(torch.equal(first, run(case.x, case.w, case.bias)) for _ in range(3))


@pytest.mark.parametrize("m", [1, 3, 16])
def test_a_kernel_writes_all_of_y_and_nothing_else(m: int) -> None:
    """Poisoned outputs: NaN everywhere before, around y too."""
    case = cases.call("int4_g128", m, 37, 200)
    kernel = kernel_for(case)
    w = case.w.packed_as(layout_for(case.w.format, ARCHES["portable"], 37, 200))
    held = torch.full((m * 37 + 64,), torch.nan, dtype=F16)
    launch.launcher(kernel, case.x.device)(held[32 : 32 + m * 37], case.x, *w.buffers, None, m)
    assert held[32 : 32 + m * 37].isfinite().all()
    assert held[:32].isnan().all()
    assert held[32 + m * 37 :].isnan().all()


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        ((17, 300), None, r"x is \[17, 300\]; this kernel takes \[2…16, 300\]"),
        ((1, 300), None, r"this kernel takes \[2…16, 300\]"),
        ((2, 299), None, r"x is \[2, 299\]"),
        ((300,), None, r"x is \[300\]"),
        ((2, 300), 40, "with bias does not answer"),
    ],
)
def test_a_bound_kernel_refuses_what_it_does_not_answer(x: tuple[int, ...], bias: int | None, message: str) -> None:
    case = cases.call("int4_g128", 2, 40, 300)
    run = w4gen.bind(kernel_for(case))
    with pytest.raises(ShapeError, match=message):
        run(torch.zeros(x, dtype=F16), case.w, None if bias is None else torch.zeros(bias, dtype=F16))


def test_a_bound_kernel_refuses_x_of_another_dtype() -> None:
    case = cases.call("int4_g128", 2, 40, 300)
    with pytest.raises(ShapeError):
        w4gen.bind(kernel_for(case))(case.x.float(), case.w)


def shaped(x: torch.Tensor, how: str) -> torch.Tensor:
    """x [4, K] in forms that a kernel does not take as they are."""
    match how:
        case "1-D":
            return x[0]
        case "3-D":
            return x.reshape(2, 2, -1)
        case "transposed":
            return x.T.contiguous().T
        case "every second":
            return torch.stack([x, x], 1).reshape(8, -1)[::2]
        case "columns of a wider x":
            return torch.cat([x, x], 1)[:, x.shape[1] :]
        case "offset by one element":
            return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].reshape(x.shape)
        case "broadcast":
            return x[:1].expand(4, -1)
        case "leading axes broadcast":
            return x[0].expand(2, 3, -1)
        case "leading axes of one":
            return x[:1].reshape(1, 1, 1, -1)
        case "no rows":
            return x[:0]
        case _:
            return x.reshape(2, 2, -1)[:, :0]


SHAPES = [
    "1-D", "3-D", "transposed", "every second", "columns of a wider x", "offset by one element", "broadcast",
    "leading axes broadcast", "leading axes of one", "no rows", "no rows in 3-D",
]  # fmt: skip


@pytest.mark.parametrize("how", SHAPES)
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_x_of_any_shape(form: str, how: str, no_fallback: None) -> None:
    case = cases.call(form, 4, 26, 383, bias=True)
    x = shaped(case.x, how)
    y = w4gen.linear(x, case.w, case.bias)
    assert y.shape == (*x.shape[:-1], 26)
    assert y.dtype == x.dtype
    if x.numel():
        assert case.error(y, x) <= case.limit


@pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g128_z", "uint4_g128_m"])
def test_a_linear_layer_runs_the_kernel(form: str, m: int, kind: torch.dtype, no_fallback: None) -> None:
    case = cases.call(form, m, 26, 383, kind, bias=True)
    layer = w4gen.Linear(case.w, case.bias)
    assert case.error(layer(case.x)) <= case.limit
    assert torch.equal(layer(case.x), w4gen.linear(case.x, case.w, case.bias))


def test_out_is_written_and_returned() -> None:
    case = cases.call("int4_g128", 2, 66, 300)
    out = torch.full((2, 66), torch.nan, dtype=F16)
    assert w4gen.linear(case.x, case.w, out=out) is out
    assert case.error(out) <= case.limit


def test_no_compile_inside_a_warmed_bucket(monkeypatch: pytest.MonkeyPatch, no_fallback: None) -> None:
    """One kernel serves every M of its bucket."""
    case = cases.call("int4_g128", 16, 40, 383)
    layer = w4gen.Linear(case.w)
    layer(case.x[:2])
    monkeypatch.setattr(ops, "compile", None)
    for m in (3, 7, 16):
        assert case.error(layer(case.x[:m]), case.x[:m]) <= case.limit


def test_above_the_buckets_the_fallback_answers_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    case = cases.call("nf4_g64", 17, 40, 383, bias=True)
    layer = w4gen.Linear(case.w, case.bias)
    with caplog.at_level(logging.WARNING, "w4gen"):
        errors = [case.error(layer(case.x)) for _ in range(3)]
    assert max(errors) <= case.limit
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "nf4_g64 is dequantized and multiplied: M is above 16" in caplog.text


def test_f32_is_run_by_the_fallback_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    case = cases.call("nf4_g64", 2, 40, 383, torch.float32)
    layer = w4gen.Linear(case.w)
    with caplog.at_level(logging.WARNING, "w4gen"):
        assert case.error(layer(case.x)) <= 1e-5
        layer(case.x)
    assert len(caplog.records) == 1
    assert "float32" in caplog.text


@pytest.mark.parametrize("kind", [F16, torch.float32])
def test_strict_makes_the_fallback_an_error(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    case = cases.call("nf4_g64", 17, 40, 383, kind)
    with pytest.raises(ShapeError, match=r"no kernel for .*nf4_g64: .*unset W4GEN_STRICT"):
        w4gen.Linear(case.w)(case.x)


def test_strict_does_not_stop_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    case = cases.call("nf4_g64", 2, 40, 383)
    assert case.error(w4gen.Linear(case.w)(case.x)) <= case.limit


@pytest.mark.parametrize(
    ("m", "form", "dtype"),
    [
        (1, "int4_g128", "float16"),
        (1, "uint4_g128_z", "bfloat16"),
        (16, "int4_g128", "float16"),
        (16, "uint4_g32_m", "bfloat16"),
    ],
)
def test_a_rendered_file_checks_itself(m: int, form: str, dtype: str, tmp_path: Path) -> None:
    """`python kernel.py` in a process of its own."""
    path = tmp_path / "kernel.py"
    path.write_text(w4gen.compile(f"{m}x256x32", form, arch="portable", dtype=dtype).source)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked under the interpreter" in done.stdout


def test_a_wrong_rendered_file_is_found_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = w4gen.compile("1x256x32", "nf4_g64", arch="portable").source
    path = tmp_path / "kernel.py"
    path.write_text(source.replace("acc += scaled", "acc += scaled * 1.01"))
    assert source != path.read_text()
    assert check.main(str(path)) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("k", [300, 31])
def test_rows_too_ragged_for_a_wider_layout_run_the_kernel_too(k: int, no_fallback: None) -> None:
    """Where the layout that kernels read is the canonical one, the op still takes the kernel."""
    case = cases.call("nf4_g64", 2, 26, k)
    assert case.error(w4gen.Linear(case.w)(case.x)) <= case.limit
