"""Rendered kernels under Triton's interpreter against the oracle."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache as once
from pathlib import Path

import cases
import hypothesis
import oracle
import pytest
import torch
import weights
from arrays import thinned
from hypothesis import strategies as st

import w4gen
from w4gen import Format, toolchain
from w4gen.codegen.dense import DensePrinter
from w4gen.errors import ShapeError, W4Error
from w4gen.formats import named
from w4gen.ir.layout import Layout, rows
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.pipeline import compile, made
from w4gen.runtime import check, launch, ops
from w4gen.runtime.dtypes import OURS
from w4gen.runtime.interpreter import mend
from w4gen.schedule.arch import ARCHES, M16K16
from w4gen.schedule.rules import BUCKETS, bucket
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import fragment_order, layout_for

F16, BF16 = torch.float16, torch.bfloat16
KINDS = [F16, BF16]


def kernel_for(case: cases.Call, arch: str = "sm_80") -> w4gen.compile:  # type: ignore[valid-type]
    m, k = case.x.shape
    return w4gen.compile(
        f"{m}x{k}x{case.w.n}", case.w.format, dtype=cases.NAMES[case.x.dtype], bias=case.bias is not None, arch=arch
    )


def bound(case: cases.Call, arch: str = "sm_80") -> torch.Tensor:
    """y by the kernel itself: no op, no fallback."""
    return w4gen.bind(kernel_for(case, arch))(case.x, case.w, case.bias)


def ragged(m: int) -> int:
    """Outputs that fill no blocks: few for one row, where each is a program of its own, and programs take the time."""
    return 9 if m == 1 else 26


def fragments(case: cases.Call) -> cases.Call:
    """The same call with the codes in the order of a matrix instruction."""
    return replace(case, w=case.w.packed_as(fragment_order(case.w.format, M16K16, case.w.n, case.w.k)))


def kernel_as_stored(case: cases.Call, arch: str = "portable") -> w4gen.compile:  # type: ignore[valid-type]
    """The kernel that reads the weight as it is, on an arch of no GPU, where what is not in rows is dequantized."""
    (m, k), kind = case.x.shape, OURS[case.x.dtype]
    form, layout = case.w.format, case.w.layout
    problem = Problem(m=bucket(m), n=case.w.n, k=k, format=form, layout=layout, x=kind, y=kind, bias=case.bias is not None)
    return compile(problem, ARCHES[arch])


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives between the functions of a kernel is full of NaN before every call."""
    plain = launch._workspace

    def poisoned(*call: object) -> dict[str, torch.Tensor]:
        return {name: each.fill_(torch.nan) for name, each in plain(*call).items()}

    monkeypatch.setattr(launch, "_workspace", poisoned)


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


@pytest.mark.parametrize(("form", "m", "kind"), thinned(FORMATS, [1, 16], KINDS))
def test_formats_and_groups(form: str, m: int, kind: torch.dtype) -> None:
    """Codes in rows."""
    case = cases.call(form, m, ragged(m), 384, kind)
    assert kernel_for(case).name == "gemv"
    assert case.error(bound(case)) <= case.limit(kernel_for(case))


OWN = [cases.CUBES, cases.UINT8, cases.UINT2, cases.SIGNS, *cases.FLOATS, *cases.SPLIT]


@pytest.mark.parametrize(("form", "m", "kind"), thinned(OWN, [1, 5, 130], KINDS))
def test_formats_of_your_own(form: Format, m: int, kind: torch.dtype) -> None:
    case = cases.call(form, m, ragged(m), 384, kind)
    if form.name == "e6m1" and kind == F16:
        case = with_f32_scales(case, 2.0**-34)  # its weights are numbers of f16 once they are scaled, its values are not
    assert case.error(bound(case)) <= case.limit(kernel_for(case))


def with_f32_scales(case: cases.Call, size: float) -> cases.Call:
    """The same call with scales in f32, `size` times as large."""
    form, scales = replace(case.w.format, scale=named("int4_f32").scale), case.scales.float() * size
    return replace(case, w=w4gen.Weight.from_codes(case.codes, scales, None, form), scales=scales, true_w=case.true_w * size)


NO_NUMBERS = [("e4m3", 0x7F), ("e4m3", 0xFF), ("e5m2", 0x7E), ("e5m2", 0xFC), ("e5m2", 0x7C)]


@pytest.mark.parametrize(("code", "m"), thinned(NO_NUMBERS, [1, 5, 130], strength=1))
def test_a_code_that_is_no_number_stays_in_its_row(code: tuple[str, int], m: int) -> None:
    """The output of that row is no number either, whatever x is there, and all others are what they were."""
    case = cases.call(next(each for each in cases.FLOATS if each.name == code[0]), m, ragged(m), 384)
    clean = bound(case)
    codes = case.codes.clone()
    codes[7, 200] = code[1]
    y = bound(replace(case, w=w4gen.Weight.from_codes(codes, case.scales, None, case.w.format)))
    others = [row for row in range(len(codes)) if row != 7]
    assert torch.equal(y[:, others], clean[:, others])
    assert not y[:, 7].isfinite().any()


@pytest.mark.parametrize(
    ("form", "m", "arch", "kind"), thinned([*FORMATS, cases.UINT2, cases.CUBES, cases.EVENS], [1, 5], ["sm_80", "sm_90"], KINDS)
)
def test_formats_and_groups_in_blocks(form: str | Format, m: int, arch: str, kind: torch.dtype) -> None:
    """Every format in the order of fragments, at few rows: what stands in for the fast templates."""
    case = cases.call(form, m, 32, 512, kind)
    kernel = kernel_for(case, arch)
    assert kernel.name == "gemm"
    assert case.error(bound(case, arch)) <= case.limit(kernel)


def with_codes_at_zero(form: str, m: int, kind: torch.dtype) -> cases.Call:
    """A call in which the codes of the first group of every row are its zero, in all weights of the first row."""
    case = cases.call(form, m, ragged(m), 384, kind)
    zeros = case.zeros.float().round()
    each = zeros.repeat_interleave(case.w.format.group_in(384), 1)[:, :384] - case.w.format.origin
    codes = case.codes.clone()
    codes[0] = each[0].to(torch.uint8)
    return replace(case, w=w4gen.Weight.from_codes(codes, case.scales, zeros.to(case.zeros.dtype), case.w.format), codes=codes)


@pytest.mark.parametrize(
    ("form", "m", "kind"), thinned(["uint4_g128_z", "uint4_g50_z", "int8_g64_z", "uint4_g64_zf"], [1, 5], KINDS)
)
def test_codes_that_are_the_zero_give_exact_zeros(form: str, m: int, kind: torch.dtype) -> None:
    y = bound(with_codes_at_zero(form, m, kind))
    assert (y[:, 0] == 0).all()
    assert (y[:, 1:] != 0).all()


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g128_m", "uint4_g128_zf"])
def test_a_group_without_scale_is_zero_or_the_minimum(form: str, m: int) -> None:
    """s = 0: what is left is 0, or -z in the mode minimum (a group of equal weights)."""
    case = cases.call(form, m, ragged(m), 384)
    w = w4gen.Weight.from_codes(case.codes, case.scales * 0, case.zeros, form)
    y = w4gen.bind(kernel_for(case))(case.x, w)
    if not form.endswith("_m"):
        assert (y == 0).all()
    else:
        truth = oracle.linear(case.x.double().numpy(), -case.zeros.double().numpy().repeat(128, 1))
        assert oracle.error(y.double().numpy(), truth) <= case.limit(kernel_for(case))


RAGGED = [(1, 256), (29, 256), (3, 131), (13, 1), (7, 31), (33, 129), (9, 2049), (2, 4133), (1, 1)]


@pytest.mark.parametrize(("size", "m", "form"), thinned(RAGGED, [1, 2], ["int4_g128", "nf4_g64", "int4_g50", "uint4_g50_m"]))
def test_ragged_and_prime_sizes(size: tuple[int, int], m: int, form: str) -> None:
    """N = 1, K smaller than a block, last partial groups, more than one step along K."""
    case = cases.call(form, m, *size, bias=True)
    y = bound(case)
    assert case.error(y) <= case.limit(kernel_for(case))


GEMM = ["int4_g128", "int4_g32", "int4_g64_bf16", "int4_g16_f32", "int4_row", "uint4_g128", "int8_g64", cases.UINT2]
GEMM += ["nf4_g64", "uint4_g128_z", "uint4_g64_m", "e2m1_g32"]


@pytest.mark.parametrize(("form", "m", "kind", "arch"), thinned(GEMM, [16, 17, 33, 65], KINDS, ["sm_80", "sm_90"]))
def test_formats_and_groups_of_gemm(form: str | Format, m: int, kind: torch.dtype, arch: str, poison: None) -> None:
    """Several steps, partial tiles of n and m, a bias, k shared by programs."""
    case = cases.call(form, m, 80, 1280, kind, bias=True)
    kernel = kernel_for(case, arch)
    assert kernel.name == "gemm"
    assert kernel.schedule.split_k > 1 or kernel.problem.format.bits == 2
    assert case.error(w4gen.bind(kernel)(case.x, case.w, case.bias)) <= case.limit(kernel)


RAGGED_MANY = [(1, 128), (64, 128), (63, 121), (65, 120), (130, 635), (143, 633)]


@pytest.mark.parametrize(
    ("form", "size", "m"), thinned(["int4_g128", "int4_g32", "int4_row", "nf4_g64", "uint4_g128_z"], RAGGED_MANY, [17, 70, 130])
)
def test_ragged_sizes_of_more_rows(form: str, size: tuple[int, int], m: int, poison: None) -> None:
    """One output, one step, rows that end inside a step or a group, one program for all of k; in blocks and in rows."""
    case = cases.call(form, m, *size, bias=True)
    kernel = kernel_for(case)
    assert (kernel.name == "gemm") == (m <= 128 and size[0] in (64, 143))
    assert case.error(bound(case)) <= case.limit(kernel)


@pytest.mark.parametrize(("split", "vector"), [(1, 2), (2, 4), (3, 2), (6, 4), (1, 4)])
@pytest.mark.parametrize(("block_m", "block_n", "warps"), [(16, 64, 4), (32, 128, 4), (64, 128, 8), (128, 128, 4)])
def test_every_tile_of_gemm(block_m: int, block_n: int, warps: int, split: int, vector: int, poison: None) -> None:
    case = cases.call("int4_g128", 40, 140, 768, bias=True)
    problem = Problem(m=(33, 64), n=140, k=768, format=case.w.format, bias=True)
    schedule = Schedule(
        template="gemm", unit="mma", side="left", block_m=block_m, block_n=block_n, block_k=128, warps=warps, vector=vector
    )
    kernel = made(lower(problem), replace(schedule, split_k=split), replace(ARCHES["sm_80"], registers=10**6))
    assert case.error(w4gen.bind(kernel)(case.x, case.w, case.bias)) <= case.limit(kernel)


@pytest.mark.parametrize(
    ("form", "m", "kind"), thinned(["int4_g128", "nf4_g64", "e2m1_g32", "uint4_g64_zf", "uint4_g50_m"], [2, 17, 130], KINDS)
)
def test_fragments_are_read_by_any_m(form: str, m: int, kind: torch.dtype, poison: None) -> None:
    case = fragments(cases.call(form, m, 37, 331, kind, bias=True))
    kernel = kernel_as_stored(case)
    assert kernel.name == "dequant"
    assert case.error(w4gen.bind(kernel)(case.x, case.w, case.bias)) <= case.limit(kernel)


@pytest.mark.parametrize("m", [1, 5, 130])
@pytest.mark.parametrize("form", cases.SPLIT, ids=cases.ids)
def test_codes_with_a_gap_in_their_words(form: Format, m: int) -> None:
    """10 codes of 3 bits in a word, 6 of 5: not what the rules take, and read all the same."""
    case = cases.call(form, m, ragged(m), 384, bias=True)
    case = replace(case, w=case.w.packed_as(rows(ragged(m), 384, form.bits, 4)))
    y = w4gen.bind(kernel_as_stored(case))(case.x, case.w, case.bias)
    assert case.error(y) <= case.limit(kernel_as_stored(case))


ANY = ("int4_g128", "nf4_g64", "int8_g128", cases.UINT2, "uint4_g32_m")


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_a_dequantized_weight_is_exact_in_any_layout(data: st.DataObject) -> None:
    """scale * value (- zero), formed in f32 and rounded once, for any order of the codes in memory."""
    form = named(data.draw(st.sampled_from(ANY)))
    form = replace(form, group=data.draw(st.sampled_from([7, 16, 64, -1])))
    layout = data.draw(weights.layouts((form.bits,)).filter(lambda each: each.size("n") <= 64 and each.size("k") <= 2048))
    n, k = (data.draw(st.integers(max(1, layout.size(axis) // 2), layout.size(axis))) for axis in "nk")
    kind = data.draw(st.sampled_from([F16, BF16]))
    case = cases.call(form, 2, n, k, kind)
    case = replace(case, w=case.w.packed_as(layout))
    check_dense(case)


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g50_m"])
def test_a_weight_is_dequantized_with_indices_of_64_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DensePrinter, "wide", ["w.dense"])
    check_dense(cases.call(form, 2, 37, 331))
    check_dense(fragments(cases.call(form, 2, 37, 331)))


def test_a_weight_in_a_single_word_is_dequantized() -> None:
    case = cases.call("int4_g128", 2, 4, 1)
    check_dense(replace(case, w=case.w.packed_as(Layout.parse("n8@4,k1@0;4/32"))))


def check_dense(case: cases.Call) -> None:
    """The first kernel of a call writes the weight, exact up to one rounding."""
    (n, k), kind = case.codes.shape, case.x.dtype
    problem = Problem(m=(2, 2), n=n, k=k, format=case.w.format, layout=case.w.layout, x=OURS[kind], y=OURS[kind])
    vendor = Schedule(template="dequant", unit="vendor", block_n=4, block_k=512, scale_at="weight", convert_at="global")
    kernel = made(lower(problem), vendor, ARCHES["portable"])
    dense = torch.full((n, k), torch.nan, dtype=kind)
    given = {f"{name}_ptr": each for name, each in zip(case.w.names, case.w.buffers, strict=True)} | {"dense_ptr": dense}
    (piece,) = kernel.pieces
    mend()
    toolchain.function(kernel, piece)[kernel.programs(piece, 2)](*(given[name] for name in piece.arguments))
    assert torch.equal(dense, torch.from_numpy(case.true_w).float().to(kind))


ROWS = [1, 2, 5, 16, 17, 24, 32, 33, 50, 64, 65, 128, 129, 200]


@pytest.mark.parametrize(("form", "m", "kind", "n"), thinned(["int4_g128", "nf4_g64"], ROWS, KINDS, [27, 47]))
def test_every_m_of_the_buckets_with_bias(form: str, m: int, kind: torch.dtype, n: int) -> None:
    """27 outputs are in rows, 47 in blocks."""
    last, name = {27: (16, "gemv"), 47: (128, "gemm")}[n]
    case = cases.call(form, m, n, 380, kind, bias=True)
    kernel = kernel_for(case)
    assert kernel.name == (name if m <= last else "dequant")
    assert case.error(w4gen.bind(kernel)(case.x, case.w, case.bias)) <= case.limit(kernel)


@pytest.mark.parametrize(("form", "kind"), thinned(["int4_g128", "nf4_g64"], KINDS, strength=1))
def test_one_row_and_many_outputs(form: str, kind: torch.dtype) -> None:
    """Several rows of w in one program, the last block partial; enough outputs for the limit of a full shape."""
    case = cases.call(form, 1, 515, 160, kind)
    assert kernel_for(case).schedule.block_n > 1
    assert case.error(bound(case)) <= case.limit(kernel_for(case))


@pytest.mark.parametrize(
    ("n", "form", "m"), thinned([26, 32], ["int4_g128", "nf4_g64", "uint4_g128_z", "uint4_g64_m"], [1, 2, 17, 130])
)
def test_an_outlier_in_x_keeps_the_error(n: int, form: str, m: int) -> None:
    """So do two whose sum is beyond the range of a half. The row of the outliers outweighs all others."""
    case = cases.call(form, m, n, 512)
    case.x[0, 77] = 6e4
    assert case.error(bound(case)) <= case.limit(kernel_for(case), 26)
    case.x[0, 78] = 4e4
    case.x[0, 80] = -4e4
    assert case.error(bound(case)) <= case.limit(kernel_for(case), 26)


NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize(
    ("form", "bad", "place"),
    thinned(["int4_g128", "nf4_g64", "int4_g50", "uint4_g128_z", "uint4_g64_m"], NOT_FINITE, [0, 129, 299]),
)
def test_what_is_not_finite_stays_in_its_row(form: str, bad: float, place: int) -> None:
    case = cases.call(form, 5, 40, 300)
    clean = bound(case)
    case.x[2, place] = bad
    y = bound(case)
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])
    assert not y[2].isfinite().any()


PLACES = [(16, 0), (40, 129), (70, 379), (130, 129)]


@pytest.mark.parametrize(
    ("where", "form", "bad"), thinned(PLACES, ["int4_g128", "int4_g32", "nf4_g64", "uint4_g128_z"], NOT_FINITE)
)
def test_what_is_not_finite_stays_in_its_row_of_many(where: tuple[int, int], form: str, bad: float, poison: None) -> None:
    """Also where it is in the last step, the rest of which is padding, and in the last row of a tile."""
    m, place = where
    case = cases.call(form, m, 40, 380)
    clean = bound(case)
    case.x[15, place] = bad
    y = bound(case)
    others = [row for row in range(m) if row != 15]
    assert clean.isfinite().all()
    assert torch.equal(y[others], clean[others])
    assert not y[15].isfinite().any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_what_is_not_finite_shows_in_a_single_row(form: str, bad: float) -> None:
    case = cases.call(form, 1, 8, 300)
    case.x[0, 299] = bad
    assert not bound(case).isfinite().any()


@pytest.mark.parametrize("m", [1, 16, 17, 33, 65, 130])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_repeated_calls_are_equal_bit_for_bit(form: str, m: int, poison: None) -> None:
    case = cases.call(form, m, 5, 380 if m > 16 else 300, bias=True)
    run = w4gen.bind(kernel_for(case))
    first = run(case.x, case.w, case.bias)
    assert all(torch.equal(first, run(case.x, case.w, case.bias)) for _ in range(3))


@pytest.mark.parametrize(
    ("m", "n", "k", "name"),
    [
        (1, 37, 200, "gemv"),
        (3, 37, 200, "gemv"),
        (16, 37, 200, "gemv"),
        (1, 47, 768, "gemm"),
        (3, 47, 768, "gemm"),
        (33, 47, 768, "gemm"),
        (70, 47, 128, "gemm"),
        (130, 37, 200, "dequant"),
        (130, 47, 768, "dequant"),
    ],
)
def test_a_kernel_writes_all_of_y_and_nothing_else(m: int, n: int, k: int, name: str, poison: None) -> None:
    """Poisoned outputs: NaN everywhere before, around y too."""
    case = cases.call("int4_g128", m, n, k)
    kernel = kernel_for(case)
    assert kernel.name == name
    w = case.w.packed_as(layout_for(case.w.format, ARCHES["sm_80"], n, k))
    held = torch.full((m * n + 64,), torch.nan, dtype=F16)
    launch.launcher(kernel, case.x.device)(held[32 : 32 + m * n].view(m, n), case.x, *w.buffers, None, m)
    assert held[32 : 32 + m * n].isfinite().all()
    assert held[:32].isnan().all()
    assert held[32 + m * n :].isnan().all()


@pytest.mark.parametrize("m", [17, 33, 70])
@pytest.mark.parametrize("split", [1, 6])
def test_partial_sums_are_written_whole_and_nothing_else(m: int, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around `parts` too."""
    plain, held = launch._workspace, {}

    def guarded(*call: object) -> dict[str, torch.Tensor]:
        for name, each in plain(*call).items():
            held[name] = torch.full((each.numel() + 128,), torch.nan, dtype=each.dtype)
            held[f"inner {name}"] = held[name][64:-64].view(each.shape)
        return {name: held[f"inner {name}"] for name in held if not name.startswith("inner")}

    monkeypatch.setattr(launch, "_workspace", guarded)
    case = cases.call("int4_g128", m, 79, 768, bias=True)
    kernel = kernel_for(case)
    kernel = made(lower(kernel.problem), replace(kernel.schedule, split_k=split), ARCHES["sm_80"])
    assert case.error(w4gen.bind(kernel)(case.x, case.w, case.bias)) <= case.limit(kernel)
    assert ("parts_ptr" in held) == (split > 1)
    for name in [name for name in held if name.startswith("inner")]:
        whole = held[name.removeprefix("inner ")]
        assert held[name].isfinite().all()
        assert torch.cat([whole[:64], whole[-64:]]).isnan().all()


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        ((17, 300), None, r"x is \[17, 300\]; this kernel takes \[2…8, 300\]"),
        ((1, 300), None, r"this kernel takes \[2…8, 300\]"),
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


def test_a_bound_kernel_refuses_a_bias_on_another_device() -> None:
    """Its address would be read where x is."""
    case = cases.call("int4_g128", 2, 40, 300, bias=True)
    with pytest.raises(ShapeError, match="x is on cpu, and another tensor is not: move all of them to one device"):
        w4gen.bind(kernel_for(case))(case.x, case.w, case.bias.to("meta"))


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


@pytest.mark.parametrize(("form", "how"), thinned(["int4_g128", "nf4_g64"], SHAPES, strength=1))
def test_x_of_any_shape(form: str, how: str, no_fallback: None) -> None:
    case = cases.call(form, 4, 26, 383, bias=True)
    x = shaped(case.x, how)
    y = w4gen.linear(x, case.w, case.bias)
    assert y.shape == (*x.shape[:-1], 26)
    assert y.dtype == x.dtype
    if x.numel():
        assert case.error(y, x) <= case.limit(kernel_for(case), y.numel())


@pytest.mark.parametrize(
    ("where", "form", "m", "kind"),
    thinned([("portable", 26), ("sm_80", 47)], ["int4_g128", "nf4_g64", "uint4_g128_z", "uint4_g128_m"], [1, 16, 33, 130], KINDS),
)
def test_a_linear_layer_runs_the_kernel(
    where: tuple[str, int], form: str, m: int, kind: torch.dtype, no_fallback: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, n = where
    monkeypatch.setenv("W4GEN_ARCH", arch)
    case = cases.call(form, m, n, 383, kind, bias=True)
    layer = w4gen.Linear(case.w, case.bias)
    assert case.error(layer(case.x)) <= case.limit(kernel_for(case, arch))
    assert torch.equal(layer(case.x), w4gen.linear(case.x, case.w, case.bias))


def test_out_is_written_and_returned() -> None:
    case = cases.call("int4_g128", 2, 66, 300)
    out = torch.full((2, 66), torch.nan, dtype=F16)
    assert w4gen.linear(case.x, case.w, out=out) is out
    assert case.error(out) <= case.limit(kernel_for(case))


WARMED = [(2, 3, 5, 8), (9, 12, 16), (17, 20, 32), (64, 33, 50), (65, 127, 128), (200, 129, 140)]


@pytest.mark.parametrize(("arch", "form", "rows"), thinned(["portable", "sm_80"], ["int4_g128", "nf4_g64"], WARMED))
def test_no_compile_inside_a_warmed_bucket(
    arch: str, form: str, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, no_fallback: None
) -> None:
    """One kernel serves every M of its bucket."""
    monkeypatch.setenv("W4GEN_ARCH", arch)
    first, *others = rows
    case = cases.call(form, max(rows), 48, 383)
    layer = w4gen.Linear(case.w)
    layer(case.x[:first])
    monkeypatch.setattr(ops, "compile", None)
    for m in others:
        assert case.error(layer(case.x[:m]), case.x[:m]) <= case.limit(kernel_for(case, arch), m * 48)


def test_a_sweep_of_m_compiles_once_for_each_bucket(monkeypatch: pytest.MonkeyPatch, no_fallback: None) -> None:
    asked, plain = [], ops.compile
    monkeypatch.setattr(ops, "compile", lambda problem, arch: asked.append(problem.m) or plain(problem, arch))
    layer = w4gen.Linear(cases.call("int4_g128", 1, 8, 256).w)
    for m in [1, 2, 16, 17, 18, 32, 33, 63, 64, 65, 66, 128, 129, 130, 256, 257, 300, 512, 513, 1025, 2049]:
        layer(torch.zeros(m, 256, dtype=F16))
    assert asked == list(BUCKETS)


def test_a_million_rows_take_a_kernel(no_fallback: None) -> None:
    case = cases.call("nf4_g64", 2, 1, 33, bias=True)
    y = w4gen.Linear(case.w, case.bias)(case.x[:1].expand(2**20 + 1, -1))
    assert y.shape == (2**20 + 1, 1)
    assert (y == y[0]).all()
    assert case.error(y[:1], case.x[:1]) <= oracle.limit("f16", 1, 2, 33)


def test_f32_is_run_by_the_fallback_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    case = cases.call("nf4_g64", 2, 40, 383, torch.float32)
    layer = w4gen.Linear(case.w)
    with caplog.at_level(logging.WARNING, "w4gen"):
        assert case.error(layer(case.x)) <= case.limit()
        layer(case.x)
    assert len(caplog.records) == 1
    assert "float32" in caplog.text


def test_strict_makes_the_fallback_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    case = cases.call("nf4_g64", 17, 1, 33, torch.float32)
    with pytest.raises(ShapeError, match=r"no kernel for .*nf4_g64: .*unset W4GEN_STRICT"):
        w4gen.Linear(case.w)(case.x)


@pytest.mark.parametrize("m", [2, 40, 130])
def test_strict_does_not_stop_a_kernel(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    case = cases.call("nf4_g64", m, 40, 383)
    assert case.error(w4gen.Linear(case.w)(case.x)) <= case.limit(kernel_for(case))


@pytest.mark.parametrize(
    ("m", "form", "dtype"),
    [
        (1, "int4_g128", "float16"),
        (1, "uint4_g128_z", "bfloat16"),
        (1, "int3_g128", "float16"),
        (1, "q4_k", "float16"),
        (16, "nvfp4", "float16"),
        (16, "int4_g128", "float16"),
        (16, "uint4_g32_m", "bfloat16"),
        (64, "int4_g32", "bfloat16"),
        (512, "nf4_g64", "float16"),
    ],
)
def test_a_rendered_file_checks_itself(m: int, form: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `python kernel.py` runs, here; the first one in a process of its own too, as people run it."""
    path = tmp_path / "kernel.py"
    path.write_text(w4gen.compile(f"{m}x256x{16 if m == 1 else 48}", form, arch="portable", dtype=dtype).source)
    assert check.main(str(path)) == 0
    told = capsys.readouterr().out
    assert "checked under the interpreter" in told
    if (m, form) == (1, "int4_g128"):
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("checked under the interpreter: error ")


def compiling() -> dict[str, str]:
    """The environment of a process whose triton compiles."""
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


@once
def fast_text(shape: str) -> str:
    """The text of a fast kernel, which is not picked where triton interprets."""
    command = [sys.executable, "-m", "w4gen.cli", "show", "kernel", "--shape", shape, "--arch", "sm_90"]
    return subprocess.run(command, env=compiling(), capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "shape", ["1x256x96", *(pytest.param(each, marks=pytest.mark.slow) for each in ("8x256x96", "40x256x96"))]
)
def test_a_rendered_file_of_a_fast_template_checks_its_twin(shape: str, tmp_path: Path) -> None:
    """So does one that launches early: no interpreter runs their instructions. They are compiled, and that is all they are."""
    path = tmp_path / "kernel.py"
    path.write_text(fast_text(shape))
    done = subprocess.run([sys.executable, str(path)], env=compiling(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    placed = "compiled" if shape.startswith("40") else "compiled, placement proven"
    twin, this = done.stdout.strip().split(" · ")
    assert twin.startswith("portable twin: checked under the interpreter: error ")
    assert this == f"this kernel: {placed}, not run"


def test_a_fast_kernel_that_moves_values_between_lanes_is_found_out(tmp_path: Path) -> None:
    """The layout of the words is no longer the one that each lane's values are in: it does not compile, and the check says so."""
    source = fast_text("1x256x96")
    wrong = source.replace("gl.BlockedLayout([1, 4], [32, 1]", "gl.BlockedLayout([1, 4], [16, 2]")
    assert source != wrong
    command = [sys.executable, "-m", "w4gen.runtime.check", "-"]
    done = subprocess.run(command, env=compiling(), input=wrong, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "portable twin: checked" in done.stdout
    assert "this kernel: WRONG, as it does not compile: gemv_half for sm_90" in done.stdout


@pytest.mark.parametrize(("form", "n"), [("int4_g128", 300), ("uint4_g50_m", 300), ("int4_g128", 47)])
@pytest.mark.parametrize("m", [(1, 1), (33, 64)], ids=str)
def test_a_check_of_blocks_takes_the_first_rows(form: str, n: int, m: tuple[int, int]) -> None:
    """Whole blocks of the layout and whole programs, with the bias of the second function of split k."""
    problem = Problem(m=m, n=n, k=1280, format=named(form), bias=True)
    report = check.check(compile(problem, ARCHES["sm_80"]))
    assert report.passed
    assert (report.outputs, report.of) == (min(n, 64), n)


@pytest.mark.parametrize(
    ("shape", "form", "line", "wrong"),
    [
        ("1x256x37", "nf4_g64", "acc += scaled", "acc += scaled * 1.01"),
        ("1x256x32", "nf4_g64", "acc += scaled", "acc += scaled * 1.01"),
        ("20x1280x80", "int4_g128", "parts += scaled", "parts += scaled * 1.01"),
        ("20x1280x80", "int4_g128", "parts += scaled", "parts = (parts + scaled).to(tl.float16).to(tl.float32)"),
        ("1x4096x65", "int4_g128", "part += w_value", "part = part.to(tl.bfloat16).to(tl.float32) + w_value"),
        ("20x1280x80", "int4_g128", "for share in tl.static_range(1, SPLIT)", "for share in tl.static_range(1, SPLIT - 1)"),
        ("200x256x32", "nf4_g64", "w = (w_value", "w = (1.01 * w_value"),
    ],
)
def test_a_wrong_rendered_file_is_found_out(
    shape: str, form: str, line: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = w4gen.compile(shape, form, arch="sm_80").source
    path = tmp_path / "kernel.py"
    path.write_text(source.replace(line, wrong))
    assert source != path.read_text()
    assert check.main(str(path)) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(("form", "n", "k"), [("int4_g128", 64, 256), ("nf4_g64", 20, 70), ("uint4_g64_m", 33, 129)])
def test_a_rendered_file_that_reads_fragments_checks_itself(
    form: str, n: int, k: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = fragment_order(named(form), M16K16, n, k)
    kernel = compile(Problem(m=(17, 32), n=n, k=k, format=named(form), layout=layout), ARCHES["portable"])
    (tmp_path / "kernel.py").write_text(kernel.source)
    assert check.main(str(tmp_path / "kernel.py")) == 0
    assert "checked" in capsys.readouterr().out


def test_codes_in_another_order_within_their_word() -> None:
    case = cases.call("int4_g128", 20, 64, 256)
    case = replace(case, w=case.w.packed_as(Layout.parse("n64@1024,k16@32,k2@16,k4@4,k2@512;4/32")))
    kernel = kernel_as_stored(case)
    assert case.error(w4gen.bind(kernel)(case.x, case.w)) <= case.limit(kernel)


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("form", ["int4_g128", "uint4_g32_m", "nf4_row", "int4_g7"])
@pytest.mark.parametrize(
    "layout", ["n12@384,k2@16,k4@4,k4@96,k3@32;4/32", "n12@640,k8@4,k5@32,k4@160;4/32", "n12@384,k3@32,k8@4,k4@96;4/32"]
)
def test_rows_whose_words_are_digits_of_three_and_five(layout: str, form: str, m: int) -> None:
    """The four words of a thread are not the digits of such a row."""
    k = Layout.parse(layout).size("k")
    case = cases.call(form, m, 12, k)
    case = replace(case, w=case.w.packed_as(Layout.parse(layout)))
    kernel = kernel_as_stored(case, "portable" if m == 1 else "sm_80")
    assert kernel.name == "gemv"
    assert case.error(w4gen.bind(kernel)(case.x, case.w)) <= case.limit(kernel)


@pytest.mark.parametrize("k", [300, 31])
def test_rows_too_ragged_for_a_wider_layout_run_the_kernel_too(k: int, no_fallback: None) -> None:
    """Where the layout that kernels read is the canonical one, the op still takes the kernel."""
    case = cases.call("nf4_g64", 2, 26, k)
    assert case.error(w4gen.Linear(case.w)(case.x)) <= case.limit(kernel_for(case))


def test_a_first_call_inside_a_capture_names_the_call_that_warms_up(monkeypatch: pytest.MonkeyPatch, no_fallback: None) -> None:
    case = cases.call("int4_g128", 1, 16, 256)
    layer, here = w4gen.Linear(case.w), ops.capturing
    monkeypatch.setattr(ops, "capturing", lambda device: True)
    with pytest.raises(W4Error, match=r"call layer\(torch.zeros\(1, 256, dtype=torch.float16, device='cpu'\)\) once before"):
        layer(case.x)
    assert not ops.LAUNCHES
    monkeypatch.setattr(ops, "capturing", here)
    y = layer(case.x)
    monkeypatch.setattr(ops, "capturing", lambda device: True)
    assert torch.equal(layer(case.x), y)
