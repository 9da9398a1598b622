"""Every built-in family and every tree of scales, in rendered kernels under Triton's interpreter."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from arrays import thinned

import w4gen
from w4gen import toolchain
from w4gen.formats import FAMILIES, named
from w4gen.ir.lower import lower
from w4gen.ir.problem import Problem
from w4gen.ir.types import F32, Format
from w4gen.pipeline import made
from w4gen.runtime.dtypes import OURS
from w4gen.runtime.interpreter import mend
from w4gen.schedule.arch import ARCHES
from w4gen.schedule.schedule import Schedule
from w4gen.schedule.stored import layout_for

F16, BF16 = torch.float16, torch.bfloat16
KINDS = pytest.mark.parametrize("kind", [F16, BF16], ids=["f16", "bf16"])
VENDOR = Schedule(template="dequant", unit="vendor", block_n=4, block_k=512, scale_at="weight", convert_at="global")


@KINDS
@pytest.mark.parametrize("name", FAMILIES)
def test_every_code_decodes_to_its_value_rounded_once(name: str, kind: torch.dtype) -> None:
    """At every position of a word, in the twin that dequantizes; scales are 1."""
    form = replace(FAMILIES[name], scale=F32, zero=None, zero_mode=None)
    n, k, count = 8, 512, 2**form.bits
    codes = ((np.arange(n)[:, None] * (count // n + 1) + np.arange(k)[None, :] * 5 + np.arange(k)[None, :] // 32) % count).astype(
        "u1"
    )
    assert len(np.unique(codes)) == count
    w = w4gen.Weight.from_codes(torch.from_numpy(codes), torch.ones(form.grid(n, k)), None, form)
    w = w.packed_as(layout_for(form, ARCHES["portable"], n, k))
    problem = Problem(m=(2, 2), n=n, k=k, format=form, layout=w.layout, x=OURS[kind], y=OURS[kind])
    kernel = made(lower(problem), VENDOR, ARCHES["portable"])
    dense = torch.full((n, k), 77.0, dtype=kind)
    given = {f"{each}_ptr": buffer for each, buffer in zip(w.names, w.buffers, strict=True)} | {"dense_ptr": dense}
    (piece,) = kernel.pieces
    mend()
    toolchain.function(kernel, piece)[kernel.programs(piece, 2)](*(given[name] for name in piece.arguments))
    expected = torch.tensor(np.array(oracle.VALUES[name])[codes], dtype=torch.float64).float().to(kind)
    assert torch.equal(torch.nan_to_num(dense, nan=-1234.0), torch.nan_to_num(expected, nan=-1234.0))


CALLS = [(1, F16), (1, BF16), (5, F16), (5, BF16), (130, F16)]


@pytest.mark.parametrize(("name", "call"), thinned(oracle.TREES, CALLS, strength=1))
def test_kernels_of_trees_give_the_truth(name: str, call: tuple[int, torch.dtype]) -> None:
    m, kind = call
    form, rng, n, k = named(name), np.random.default_rng(3), 21, (384 if m != 5 else 576)
    parts = oracle.random_parts(rng, oracle.TREES[name], n, k)
    kinds = {each: str(kind) for each, (kind, _) in form.parts(n, k).items()}
    tensors = {each: torch.from_numpy(array) for each, array in parts.items()}
    tensors = {each: t.bfloat16() if kinds[each] == "bf16" else t for each, t in tensors.items()}
    x = torch.from_numpy(rng.standard_normal((m, k))).to(kind)
    w = oracle.weight(parts, oracle.TREES[name])
    kernel = w4gen.compile(f"{m}x{k}x{n}", form, arch="sm_80", dtype=str(kind).removeprefix("torch."))
    y = w4gen.bind(kernel)(x, w4gen.Weight.from_parts(tensors, form))
    rows = x.double().numpy()
    error = oracle.error(y.double().numpy(), oracle.linear(rows, w), oracle.typical(rows, w))
    assert error <= (1.5 if m == 1 else 2.01) * oracle.HALF_UNIT["f16" if kind == F16 else "bf16"]


@KINDS
@pytest.mark.parametrize("form", ["int4_g32_e8m0", "int2_g16_e4m3", "int4(origin=-8,group=32,scale=u6(bits=6,group=8))"])
def test_gemm_takes_scales_that_are_codes(form: str, kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(40, 768).to(kind), w4gen.Weight.from_float(torch.randn(80, 768), form)
    kernel = w4gen.compile("40x768x80", form, arch="sm_80", dtype=str(kind).removeprefix("torch."))
    assert kernel.name == "gemm"
    truth = x.double() @ w.dequantize(torch.float64).T
    y = w4gen.bind(kernel)(x, w).double().numpy()
    assert oracle.error(y, truth.numpy()) <= oracle.limit("f16" if kind == F16 else "bf16", y.size, 2, 768)


PAIRS = ["e1m0", "e2m1", "e1m2", "e3m4", "fp8_e4m3", "fp8_e5m2", "int4", "uint8"]


@pytest.mark.parametrize(("name", "arch", "kind"), thinned(PAIRS, ["sm_80", "sm_90"], [F16, BF16]))
def test_gemm_decodes_every_code_in_pairs(name: str, arch: str, kind: torch.dtype) -> None:
    """x takes one weight of a row at a time, so y is the weights; a code that is no number stays in its row."""
    small = re.fullmatch(r"e(\d)m(\d)", name)
    values = np.array(oracle.small_float(*map(int, small.groups())) if small else oracle.VALUES[name])
    form = replace(Format(name, len(values).bit_length() - 1, minifloat=name) if small else FAMILIES[name], group=-1, scale=F32)
    n, k, m = 64, 512, 64
    finite = np.flatnonzero(np.isfinite(values))
    codes = finite[(np.arange(n)[:, None] * 7 + np.arange(k)[None, :]) % len(finite)]
    wrong = np.setdiff1d(np.arange(len(values)), finite)
    codes[np.arange(len(wrong)), 5] = wrong
    at = torch.arange(6, k, 7)[:m]  # not where the wrong ones are: times 0 they are no numbers
    w = w4gen.Weight.from_codes(torch.from_numpy(codes), torch.ones(form.grid(n, k)), None, form)
    kernel = w4gen.compile(f"{m}x{k}x{n}", form, arch=arch, dtype=str(kind).removeprefix("torch."))
    assert kernel.name == "gemm"
    y = w4gen.bind(kernel)(torch.nn.functional.one_hot(at, k).to(kind), w)
    assert y[:, : len(wrong)].isnan().all()
    expected = torch.from_numpy(values[codes]).T[at]
    assert torch.equal(y[:, len(wrong) :].double(), expected[:, len(wrong) :])


@pytest.mark.parametrize("m", [1, 5, 130])
def test_a_scale_that_is_nan_stays_in_its_row(m: int) -> None:
    """e8m0 has a code for NaN: that output is no number, all others are what they were."""
    torch.manual_seed(0)
    x, codes = torch.randn(m, 384).half(), torch.randint(0, 16, (21, 384))
    scales = torch.randint(110, 120, (21, 12))
    kernel = w4gen.compile(f"{m}x384x21", "mxfp4", arch="sm_80")
    clean = w4gen.bind(kernel)(x, w4gen.Weight.from_codes(codes, scales, None, "mxfp4"))
    scales[7, 5] = 255
    y = w4gen.bind(kernel)(x, w4gen.Weight.from_codes(codes, scales, None, "mxfp4"))
    others = [row for row in range(21) if row != 7]
    assert torch.equal(y[:, others], clean[:, others])
    assert y[:, 7].isnan().all()


def test_layers_with_tables_of_their_own_share_one_kernel() -> None:
    form, x = named("learned(codebook=tensor,group=64)"), torch.randn(1, 256).half()
    kernel = w4gen.compile("1x256x16", form, arch="portable")
    run = w4gen.bind(kernel)
    for seed in range(3):
        torch.manual_seed(seed)
        w = w4gen.Weight.from_float(torch.randn(16, 256) ** 3, form)
        truth = x.double() @ w.dequantize(torch.float64).T
        assert oracle.error(run(x, w).double().numpy(), truth.numpy()) <= 1.5 * oracle.HALF_UNIT["f16"]
