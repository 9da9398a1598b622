"""Kernels on a GPU against the truth in f64, worked out by torch with no help of w4gen."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import ahead
import cases
import numpy as np
import oracle
import pytest
import torch
import triton
from arrays import covered
from truth import KINDS, case, name_of

import w4gen
from w4gen.formats import FAMILIES, named
from w4gen.ir.layout import rows
from w4gen.ir.problem import Problem
from w4gen.ir.types import F16, F32
from w4gen.pipeline import compile
from w4gen.runtime import launch, ops
from w4gen.runtime.launch import arch_of
from w4gen.schedule.rules import BUCKETS, bucket

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES = [(256, 1536), (4096, 4096), (37, 331), (1021, 1000), (1, 4096), (64, 28672)]
MANY = [(4096, 4096), (1021, 1000), (37, 2040), (8192, 9216)]
OTHERS = ["uint4_g128_z", "uint4_g32_m", "uint4_g64_zf", "int8_g128", "int8_g64_z", "e2m1_g32", "uint4_g50_m"]


FEW_ROWS = covered(SHAPES, ["int4_g128", "nf4_g64", "int4_g50"], [1, 2, 7, 16], KINDS, strength=3)
MORE_ROWS = covered(MANY, ["int4_g128", "int4_g32", "nf4_g64", "int4_g50"], [17, 64, 100, 128, 129, 512], KINDS, strength=3)
OTHER_FORMATS = covered([(256, 1536), (1021, 1000), (4096, 4096)], OTHERS, [1, 16], KINDS, strength=3)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernels of the longest tests, compiled side by side."""
    arch = arch_of(torch.device("cuda")).name
    asked = [each.values for each in [*FEW_ROWS, *MORE_ROWS, *OTHER_FORMATS]]
    ahead.compile_all([(form, bucket(m)[0], n, k, name_of(kind), True, arch) for (n, k), form, m, kind in asked])


@pytest.mark.parametrize(("size", "form", "m", "kind"), FEW_ROWS + OTHER_FORMATS)
def test_kernels_give_the_truth(
    size: tuple[int, int], form: str, m: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")  # a kernel, not the fallback
    it = case(form, m, *size, kind, bias=True)
    assert it.error(it.layer(it.x)) <= it.limit()


@pytest.mark.parametrize(("size", "form", "m", "kind"), MORE_ROWS)
def test_more_rows_give_the_truth(
    size: tuple[int, int], form: str, m: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of these is large enough for the widest tiles of an H200, others end inside a tile in every direction."""
    monkeypatch.setenv("W4GEN_STRICT", "1")
    it = case(form, m, *size, kind, bias=True)
    assert it.error(it.layer(it.x)) <= it.limit()


@pytest.mark.parametrize("m", [1, 2, 17, 64, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
@pytest.mark.parametrize("run", [16, 1])
def test_a_weight_in_rows_gives_the_truth(run: int, form: str, m: int) -> None:
    """What archs without fragments store; also the plain dense stream."""
    n, k = 1021, 4096
    it, layout = case(form, m, n, k, bias=True), rows(n, k, 4, run)
    problem = Problem(m=bucket(m), n=n, k=k, format=named(form), layout=layout, x=F16, y=F16, bias=True)
    kernel = compile(problem, arch_of(it.x.device))
    assert kernel.name == ("gemv" if m <= 16 else "dequant")
    assert it.error(w4gen.bind(kernel)(it.x, it.layer.weight, it.bias)) <= it.limit(kernel=kernel)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["uint4_g128_z", "uint4_g50_z"])
@pytest.mark.parametrize("m", [1, 16])
def test_codes_that_are_the_zero_give_exact_zeros(m: int, form: str, kind: torch.dtype) -> None:
    it = case(form, m, 256, 1536, kind)
    codes, scales, zeros = it.layer.weight.unpack()
    codes[0] = zeros.repeat_interleave(named(form).group, 1)[0, :1536].to(torch.uint8)
    y = w4gen.Linear(w4gen.Weight.from_codes(codes, scales, zeros, form))(it.x)
    assert (y[:, 0] == 0).all()
    assert (y[:, 1:] != 0).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_an_outlier_in_a_long_row_keeps_the_error(form: str, m: int, kind: torch.dtype) -> None:
    it = case(form, m, 256, 28672, kind)
    it.x[0, 12345] = 6e4
    assert it.error(it.layer(it.x)) <= it.limit(outputs=256)  # the row of the outlier outweighs all others


@pytest.mark.parametrize("m", [1, 16, 64, 512])
def test_a_wrong_zero_of_one_group_is_above_the_limit(m: int) -> None:
    """One zero of 49,152, off by 1: the limit is tight on a full shape too."""
    it = case("uint4_g128_z", m, 1536, 4096)
    it.x.abs_()
    codes, scales, zeros = it.layer.weight.unpack()
    assert it.error(it.layer(it.x)) <= it.limit()
    zeros[77, 11] += 1 if zeros[77, 11] < 15 else -1
    assert it.error(w4gen.Linear(w4gen.Weight.from_codes(codes, scales, zeros, "uint4_g128_z"))(it.x)) > it.limit()


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_what_is_not_finite_stays_in_its_row(form: str, m: int) -> None:
    it = case(form, m, 256, 1536)
    clean = it.layer(it.x)
    it.x[0, 100] = torch.inf
    y = it.layer(it.x)
    assert not y[0].isfinite().any()
    assert torch.equal(y[1:], clean[1:])


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_forty_calls_are_equal_bit_for_bit_over_poisoned_outputs(form: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is what lives between the functions of a kernel: partial sums, the dense weight."""
    plain = launch._workspace
    poisoned = lambda *call: {name: each.fill_(torch.nan) for name, each in plain(*call).items()}  # noqa: E731
    monkeypatch.setattr(launch, "_workspace", poisoned)
    it = case(form, m, 1021, 4096)
    kernel = w4gen.compile(f"{m}x4096x1021", form, arch="sm_90" if torch.cuda.get_device_capability() == (9, 0) else "")
    run = w4gen.bind(kernel)  # y is full of NaN before every launch
    weight = it.layer.weight
    first = run(it.x, weight)
    assert it.error(first) <= it.limit(kernel=kernel)
    assert all(torch.equal(first, run(it.x, weight)) for _ in range(40))


@pytest.mark.parametrize("m", [1, 16, 64, 512])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_a_warmed_layer_is_captured_in_a_cuda_graph(form: str, m: int) -> None:
    it = case(form, m, 4096, 4096)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        it.layer(it.x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = it.layer(it.x)
    it.x.copy_(torch.randn_like(it.x))
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert it.error(y) <= it.limit()


@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64"])
def test_a_million_rows_take_a_kernel(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    it = case(form, 2**20 + 1, 16, 100, bias=True)
    y = it.layer(it.x)
    assert torch.equal(it.layer(it.x), y)
    assert it.error(y) <= it.limit()


def test_the_fallback_answers_float32_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    ops.LAUNCHES.clear()
    it = case("nf4_g64", 40, 256, 1536, torch.float32)
    with caplog.at_level(logging.WARNING, "w4gen"):
        y = it.layer(it.x)
        assert torch.equal(it.layer(it.x), y)
    assert it.error(y) <= oracle.limit("f32", y.numel(), 2, 1536)
    assert len(caplog.records) == 1


GRANULE = 2**20
"""Bytes that PyTorch's allocator may add to a large block."""


@pytest.mark.parametrize("m", [1, 16, 64, 128, 512, 4096])
@pytest.mark.parametrize("form", ["int4_g128", "nf4_g64", "uint4_g50_m"])
def test_a_call_needs_no_more_memory_than_one_dequantized_layer(form: str, m: int) -> None:
    """Beyond x and y, and the weights as they are stored; also in a stack of layers, which dequantize one after the other."""
    n = k = 4096
    layers = [w4gen.Linear(w4gen.Weight.from_float(torch.randn(n, k, device="cuda") * 0.02, form)) for _ in range(3)]
    x = torch.randn(m, k, device="cuda", dtype=torch.float16)
    stack = torch.nn.Sequential(*layers)
    with torch.inference_mode():
        stack(x)  # kernels are loaded, and cuBLAS has its workspace
        for run, activations in ((layers[0], 1), (stack, 2)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = run(x)
            peak = torch.cuda.max_memory_allocated() - before - activations * y.nbytes
            del y
            assert peak <= 2 * n * k + (activations + 1) * GRANULE
            dequantizes = w4gen.compile(f"{m}x{k}x{n}", form, arch=arch_of(x.device).name).schedule.unit == "vendor"
            assert (peak >= 2 * n * k) == dequantizes


@pytest.mark.parametrize("m", [1, 5, 40, 200])
@pytest.mark.parametrize("shift", [1, 4])
def test_a_misaligned_x_gives_the_same_bits(m: int, shift: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    held = torch.empty(m * 1536 + shift, device="cuda", dtype=torch.float16)
    x = held[shift:].view(m, 1536)
    x.copy_(it.x)
    assert x.data_ptr() % 16
    assert torch.equal(it.layer(x), it.layer(it.x))


@pytest.mark.parametrize("how", ["1-D", "3-D", "transposed", "broadcast", "no rows"])
def test_x_of_any_shape(how: str) -> None:
    it = case("nf4_g64", 4, 256, 1536)
    x = {
        "1-D": it.x[0],
        "3-D": it.x.reshape(2, 2, -1),
        "transposed": it.x.T.contiguous().T,
        "broadcast": it.x[:1].expand(4, -1),
        "no rows": it.x[:0],
    }[how]
    y = it.layer(x)
    assert y.shape == (*x.shape[:-1], 256)
    if x.numel():
        assert it.error(y.reshape(-1, 256), x.reshape(-1, 1536)) <= it.limit(outputs=y.numel())


@pytest.mark.parametrize("m", [1, 3, 40, 200])
def test_a_side_stream_is_used(m: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    expected = it.layer(it.x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = it.layer(it.x)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_a_layer_made_on_a_cpu_moves() -> None:
    it = case("nf4_g64", 2, 256, 1536)
    moved = w4gen.Linear(it.layer.weight.to("cpu")).to("cuda")
    assert torch.equal(moved(it.x), it.layer(it.x))


def test_no_compile_inside_a_warmed_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("int4_g128", 16, 256, 1536)
    it.layer(it.x[:2])
    it.layer(it.x[:9])
    monkeypatch.setattr(ops, "compile", None)
    for m in (3, 8, 10, 16):
        assert it.error(it.layer(it.x[:m]), it.x[:m]) <= it.limit(m)


def test_a_sweep_of_m_compiles_once_for_each_bucket(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M = 1 … 300 in order, x where it starts, further on, and where no 16 bytes begin; Triton's own compiles are counted."""
    ops.LAUNCHES.clear()
    it, asked, built, inner = case("int4_g128", 300, 256, 1536), [], [], triton.compile
    monkeypatch.setattr(ops, "compile", lambda problem, arch: asked.append(compile(problem, arch)) or asked[-1])
    monkeypatch.setattr(triton, "compile", lambda *given, **options: built.append(given) or inner(*given, **options))
    shifted = torch.empty(300 * 1536 + 1, device="cuda", dtype=torch.float16)[1:].view(300, 1536)
    shifted.copy_(it.x)
    for m in range(1, 301):
        y = it.layer(it.x[:m])
        assert it.error(y, it.x[:m]) <= it.limit(m)
        assert torch.equal(it.layer(shifted[:m]), y)
        it.layer(it.x[300 - m :])
    assert [kernel.problem.m for kernel in asked] == [each for each in BUCKETS if each[0] <= 300]
    assert len(built) == sum(len(kernel.pieces) for kernel in asked)


@pytest.mark.parametrize("m", [2, 40, 200])
def test_a_compiled_model_is_one_graph(m: int) -> None:
    it = case("int4_g128", m, 256, 1536)
    compiled = torch.compile(it.layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(it.x), it.layer(it.x))


@pytest.mark.parametrize(("name", "m", "kind"), covered(FAMILIES, [1, 16, 64, 512], KINDS))
def test_every_code_decodes_to_its_value_rounded_once(name: str, m: int, kind: torch.dtype) -> None:
    """x picks out single weights, whose scale is 1: what comes out is the value in x's type, at every position of a word."""
    form = replace(FAMILIES[name], scale=F32, zero=None, zero_mode=None)
    n, k, count = 256, 512, 2**form.bits
    row, column = np.arange(n)[:, None], np.arange(k)[None, :]
    codes = (row + 5 * column + column // 32) % count
    values = np.array(oracle.VALUES[name])
    whole = np.isfinite(values).all()  # a NaN is in every output of its row
    codes = codes if whole else np.flatnonzero(np.isfinite(values))[codes % np.isfinite(values).sum()]
    w = w4gen.Weight.from_codes(torch.from_numpy(codes).cuda(), torch.ones(form.grid(n, k), device="cuda"), None, form)
    layer, x = w4gen.Linear(w), torch.eye(512, device="cuda", dtype=kind)
    y = torch.cat([layer(rows) for rows in x[:: 1 if m > 1 else 16].split(m)])
    expected = torch.tensor(values[codes]).float().to(kind).T[:: 1 if m > 1 else 16].cuda()
    assert torch.equal(y, expected)


@pytest.mark.parametrize(("name", "m", "kind"), covered(oracle.TREES, [1, 16, 64, 512], KINDS))
def test_kernels_of_trees_give_the_truth(name: str, m: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEN_STRICT", "1")
    form, rng, n, k = named(name), np.random.default_rng(3), 70, 576
    parts = oracle.random_parts(rng, oracle.TREES[name], n, k)
    kinds = {each: str(kind) for each, (kind, _) in form.parts(n, k).items()}
    tensors = {each: torch.from_numpy(array).cuda() for each, array in parts.items()}
    tensors = {each: t.bfloat16() if kinds[each] == "bf16" else t for each, t in tensors.items()}
    w = torch.from_numpy(oracle.weight(parts, oracle.TREES[name])).cuda()
    x = torch.randn(m, k, device="cuda").to(kind)
    layer = w4gen.Linear(w4gen.Weight.from_parts(tensors, form))
    y, truth, roundings = layer(x), x.double() @ w.T, 2 if m > 1 else 1  # weights may be rounded too
    assert float((y.double() - truth).norm() / truth.norm()) <= oracle.limit(cases.NAMES[kind], y.numel(), roundings, k)
    assert all(torch.equal(layer(x), y) for _ in range(5))
